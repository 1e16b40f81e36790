"""Folders on the real S3 server: what is sent, what comes back, and what an outage leaves."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest
from spottrain.checkpoint.head.owner import Identity
from spottrain.contract import BLOBS_PREFIX
from spottrain.errors import StoreUnavailable
from spottrain.storage.base import Cancelled, Changed, FilePart, never
from spottrain.storage.s3 import S3Store
from spottrain.sync.checkpoints import SyncedCheckpoints
from spottrain.sync.folder import look
from spottrain.sync.whole import Judgement

from tests.support.faultproxy import Fault, FaultProxy, Treatment, plain

SIZE = 5 * 2**20 + 3


def attempt(store: S3Store, folder: Path, number: int, chunk_bytes: int = 2**21) -> SyncedCheckpoints:
    folder.mkdir()
    who = Identity(job_uid="u", job="j", attempt=number)
    run = f"pod/{number}"
    found = SyncedCheckpoints(folder, store, who, keep=2, run=run, chunk_bytes=chunk_bytes)
    assert found.claim(0.0, never, 5.0)
    found.restore()
    return found


def commit(checkpoints: SyncedCheckpoints, folder: Path) -> int:
    tree = look(folder)
    return checkpoints.commit(Judgement(tree=tree), lambda: look(folder) == tree).sent


def part(path: Path, sha256: str = "") -> FilePart:
    body = path.read_bytes()
    file = os.open(path, os.O_RDONLY)
    return FilePart(file=file, offset=0, bytes=len(body), sha256=sha256 or hashlib.sha256(body).hexdigest())


def test_a_folder_comes_back_from_s3_and_only_changes_are_sent(direct: S3Store, tmp_path: Path) -> None:
    first = attempt(direct, tmp_path / "1", 1)
    big = random.Random(1).randbytes(SIZE)
    (tmp_path / "1/big").write_bytes(big)
    (tmp_path / "1/small").write_bytes(b"small")
    assert commit(first, tmp_path / "1") == SIZE + 5
    os.utime(tmp_path / "1/big")
    assert commit(first, tmp_path / "1") == 0
    (tmp_path / "1/big").write_bytes(big[:-1] + b"?")
    assert commit(first, tmp_path / "1") == SIZE % 2**21
    (tmp_path / "1/small").write_bytes(b"other")
    commit(first, tmp_path / "1")
    second = attempt(direct, tmp_path / "2", 2)
    assert (tmp_path / "2/big").read_bytes() == big[:-1] + b"?"
    assert (tmp_path / "2/small").read_bytes() == b"other"
    assert second.committed == look(tmp_path / "2"), "nothing is to be read"
    assert len(direct.list(BLOBS_PREFIX)) == 5, "three parts and two small ones, of the two that are kept"


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1, SIZE])
def test_a_part_of_a_file_arrives_as_it_is(direct: S3Store, tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(random.Random(size).randbytes(size))
    direct.put_part("blobs/x", part(path))
    found = direct.get("blobs/x")
    assert found is not None and found.body == path.read_bytes()


@pytest.mark.parametrize("size", [10, SIZE])
def test_a_part_that_is_not_what_its_digest_says_is_not_stored(
    direct: S3Store, tmp_path: Path, size: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    direct.pause = lambda failures: 0.01
    with pytest.raises((Changed, StoreUnavailable)):
        direct.put_part("blobs/x", part(path, sha256="0" * 64))
    assert direct.get("blobs/x") is None


def test_a_part_of_a_file_that_is_cut_short_is_not_stored(direct: S3Store, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * SIZE)
    whole = part(path)
    os.truncate(path, 100)
    with pytest.raises(Changed):
        direct.put_part("blobs/x", whole)
    with pytest.raises(Cancelled):
        direct.put_part("blobs/x", whole, cancelled=lambda: True)
    assert direct.get("blobs/x") is None


def test_an_outage_leaves_the_newest_checkpoint_and_the_next_try_commits(
    patient: S3Store, proxy: FaultProxy, direct: S3Store, tmp_path: Path
) -> None:
    checkpoints = attempt(patient, tmp_path / "1", 1)
    (tmp_path / "1/a").write_bytes(b"1")
    commit(checkpoints, tmp_path / "1")
    (tmp_path / "1/a").write_bytes(b"22")
    proxy.reset(lambda request: Treatment(fault=Fault.ERROR_503))
    with pytest.raises(StoreUnavailable):
        commit(checkpoints, tmp_path / "1")
    proxy.reset(plain)
    assert commit(checkpoints, tmp_path / "1") == 2
    attempt(direct, tmp_path / "2", 2)
    assert (tmp_path / "2/a").read_bytes() == b"22"
