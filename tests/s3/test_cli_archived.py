"""Archived checkpoints in the command line.

versitygw, the S3 server of the other tests here, has no storage classes, so these run against moto, an
imitation of AWS inside this process. moto does not move objects: an archived one is written as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from spottrain.checkpoint.head.owner import HeadOwner, Identity
from spottrain.storage.s3 import S3Store

from tests.support import s3server
from tests.support.command import checkpoints as main
from tests.support.headcheckpoints import Made, save

BUCKET = "models"
URI = f"s3://{BUCKET}/team/run"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in s3server.credentials().items():
        monkeypatch.setenv(name, value)
    # moto reads no bytearray, which is what the store sends small bodies as.
    monkeypatch.setattr("spottrain.storage.s3.bytearray", bytes, raising=False)
    with mock_aws():
        it = boto3.client("s3", region_name="us-east-1")
        it.create_bucket(Bucket=BUCKET)
        yield it


@pytest.fixture(autouse=True)
def archived(client: Any) -> None:
    """A run that left steps 5 and 7; the shards of the newer one lie in Glacier."""
    store = S3Store(BUCKET, "team/run")
    owner = HeadOwner(store, Identity(job_uid="A", job="job-A", attempt=1))
    owner.claim()
    save(store, owner, 5, best=True)
    newest = save(store, owner, 7).key
    owner.release(done=True)
    for name, body in Made(step=7).objects().items():
        if name != "manifest.json":  # S3 moves nothing below 128 KiB
            client.put_object(
                Bucket=BUCKET, Key=f"team/run/{newest}{name}", Body=body, StorageClass="GLACIER"
            )


@pytest.mark.parametrize(
    ("command", "conditions"), [("list", ["archived", ""]), ("verify", ["ARCHIVED", "ok"])]
)
def test_an_archived_checkpoint_is_marked(
    capsys: pytest.CaptureFixture[str], command: str, conditions: list[str]
) -> None:
    main([command, URI, "-o", "json"])
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["condition"] for each in found] == conditions


@pytest.mark.parametrize(
    "words", [("verify",), ("copy", "--to", "{tmp}/copy"), ("download", "--to", "{tmp}/m")]
)
def test_an_archived_checkpoint_says_how_to_restore_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    command, *rest = (word.format(tmp=tmp_path) for word in words)
    assert main([command, URI, *rest]) == 1
    said = capsys.readouterr()
    assert "restore-object" in said.out + said.err
    assert not (tmp_path / "m").exists()
    assert not list((tmp_path / "copy").glob("checkpoints/*"))
