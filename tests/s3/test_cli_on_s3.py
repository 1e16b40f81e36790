"""`spottrain checkpoints` against the real S3 server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spottrain.checkpoint.head.owner import HeadOwner, Identity
from spottrain.storage.s3 import S3Store

from tests.support.command import checkpoints as main
from tests.support.headcheckpoints import save
from tests.support.s3server import S3Server


@pytest.fixture
def store(bucket: str, server: S3Server) -> S3Store:
    it = S3Store(bucket, "run", endpoint=server.endpoint)
    owner = HeadOwner(it, Identity(job_uid="A", job="job-A", attempt=1))
    owner.claim()
    for step in (3, 5, 7):
        save(it, owner, step, best=step == 3)
    it.put(f"{owner.new_key(8)}r00000-00.safetensors", b"half")
    owner.release()
    return it


def ran(server: S3Server, capsys: pytest.CaptureFixture[str], uri: str, *words: str) -> tuple[int, Any]:
    code = main([words[0], uri, "--endpoint", server.endpoint, *words[1:], "-o", "json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else said.err


def test_a_run_is_listed_verified_pruned_copied_and_downloaded(
    store: S3Store, server: S3Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, listed = ran(server, capsys, store.uri, "list")
    assert [(e["step"], e["condition"]) for e in listed["checkpoints"]] == [(7, ""), (5, ""), (3, "")]
    assert len(listed["orphans"]) == 1
    assert ran(server, capsys, store.uri, "verify")[0] == 0

    branch = f"s3://{bucket}/branch"
    assert ran(server, capsys, store.uri, "copy", "--to", branch, "--step", "5")[0] == 0
    assert ran(server, capsys, branch, "verify")[1]["checkpoints"][0]["step"] == 5

    pruned, _ = ran(server, capsys, store.uri, "prune", "--keep", "1", "--orphans", "--yes")
    assert pruned == 0
    _, listed = ran(server, capsys, store.uri, "list")
    assert [e["step"] for e in listed["checkpoints"]] == [7, 3]
    assert listed["orphans"] == []
    assert ran(server, capsys, store.uri, "verify")[0] == 0
    assert ran(server, capsys, store.uri, "download", "--to", str(tmp_path / "m"), "--step", "best")[0] == 0


def test_a_damaged_shard_on_the_server_is_found(
    store: S3Store, server: S3Server, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = store.list("checkpoints/t000001-s000000007")[1]
    file = server.folder / bucket / "run" / key
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    code, found = ran(server, capsys, store.uri, "verify")
    assert code == 1
    assert [bool(each["problems"]) for each in found["checkpoints"]] == [True, False, False]


def test_a_bucket_that_is_not_there_is_a_sentence(
    store: S3Store, server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = ran(server, capsys, "s3://no-such-bucket-here/run", "list")
    assert code == 3 and "the bucket does not exist" in said
