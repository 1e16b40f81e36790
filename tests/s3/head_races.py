"""Races for HEAD by two processes on the real S3 server behind a fault proxy.

    python -m tests.s3.head_races --rounds 1000

The last line is JSON. Exit code 1 when a HEAD was unreadable or a stale commit succeeded.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support import s3server
from tests.support.headrace import Track, Verdict
from tests.support.s3server import S3Server

BUCKET = "races"


def run(rounds: int, seed: int, tracks: int) -> list[Verdict]:
    os.environ.update(s3server.credentials())
    with tempfile.TemporaryDirectory() as folder, s3server.running(Path(folder)) as server:
        server.make_bucket(BUCKET)
        with ThreadPoolExecutor(tracks) as pool:
            shares = pool.map(
                lambda track: on_a_track(server, seed, range(track, rounds, tracks)), range(tracks)
            )
            return [verdict for share in shares for verdict in share]


def on_a_track(server: S3Server, seed: int, numbers: range) -> list[Verdict]:
    """These races one after another, with two racers and a proxy of their own."""
    track = Track(server=server, bucket=BUCKET, prefix=f"track-{numbers.start}", seed=seed)
    with track.open():
        return [told(number, track.race(number)) for number in numbers]


def told(number: int, verdict: Verdict) -> Verdict:
    for problem in verdict.problems:
        print(f"race {number}: {problem}", flush=True)
    return verdict


def summary(verdicts: list[Verdict], seed: int) -> dict[str, object]:
    ends = collections.Counter(f.how.partition(":")[0] for v in verdicts for f in v.finishes)
    return {
        "races": len(verdicts),
        "contended_races": sum(v.contended for v in verdicts),
        "ambiguous_replies": sum(v.ambiguous for v in verdicts),
        "unreadable_heads": sum(v.unreadable for v in verdicts),
        "stale_commits": sum(v.stale for v in verdicts),
        "commits": sum(len(f.committed) for v in verdicts for f in v.finishes),
        "ends": dict(ends),
        "seed": seed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tracks", type=int, default=4, help="races at the same time")
    options = parser.parse_args()
    figures = summary(run(options.rounds, options.seed, options.tracks), options.seed)
    print(json.dumps(figures))
    return 1 if figures["unreadable_heads"] or figures["stale_commits"] else 0


if __name__ == "__main__":
    sys.exit(main())
