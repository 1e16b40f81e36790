"""HEAD on the real S3 server: two processes, a network that loses, delays and repeats; no commit is stale."""

from __future__ import annotations

import os

import pytest

from tests.support.headrace import Track
from tests.support.s3server import S3Server

ROUNDS = int(os.environ.get("SPOTTRAIN_RACES", "40"))


@pytest.mark.heavy
def test_no_race_between_two_attempts_leaves_a_stale_commit_or_an_unreadable_head(
    server: S3Server, bucket: str
) -> None:
    with Track(server=server, bucket=bucket, prefix="race", seed=7).open() as track:
        verdicts = [track.race(number) for number in range(ROUNDS)]
    assert [problem for verdict in verdicts for problem in verdict.problems] == []
    finishes = [finish for verdict in verdicts for finish in verdict.finishes]
    assert {finish.how.partition(":")[0] for finish in finishes} <= {"released", "Superseded"}
    assert sum(verdict.contended for verdict in verdicts) >= ROUNDS / 2
    assert sum(verdict.ambiguous for verdict in verdicts) > 0
