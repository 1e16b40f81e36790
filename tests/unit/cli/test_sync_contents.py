"""`spottrain checkpoints delete|prune` where `spottrain sync` has stored a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from spottrain.checkpoint.head.owner import ClaimPolicy, Identity
from spottrain.contract import BLOBS_PREFIX, MANIFEST_NAME, OnExisting
from spottrain.errors import CheckpointError
from spottrain.storage.base import Object, never
from spottrain.storage.local import FolderStore
from spottrain.sync.checkpoints import SyncedCheckpoints
from spottrain.sync.folder import look
from spottrain.sync.whole import Judgement

from tests.unit.cli.conftest import Place


def synced(place: Place, folder: Path, *contents: bytes, uid: str = "A") -> list[str]:
    """Stores these contents of one file, one checkpoint each. Returns the checkpoints' keys."""
    folder.mkdir(exist_ok=True)
    policy = ClaimPolicy(on_existing=OnExisting.FRESH)
    who = Identity(job_uid=uid, job=f"job-{uid}", attempt=1)
    checkpoints = SyncedCheckpoints(folder, place.store, who, policy, keep=9, run=uid)
    assert checkpoints.claim(0.0, never, 5.0)
    checkpoints.restore()
    keys = []
    for content in contents:
        (folder / "file").write_bytes(content)
        keys.append(checkpoints.commit(Judgement(tree=look(folder)), lambda: True).key)
    checkpoints.release(5.0)
    return keys


def blobs(place: Place) -> set[str]:
    return set(place.store.list(BLOBS_PREFIX))


def test_delete_reads_each_manifest_once(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept,) = synced(place, tmp_path / "one", b"1")
    synced(place, tmp_path / "two", *(b"%d" % number for number in range(2, 9)), uid="B")
    read: list[str] = []
    get = FolderStore.get

    def counting(store: FolderStore, key: str) -> Object | None:
        read.append(key)
        return get(store, key)

    monkeypatch.setattr(FolderStore, "get", counting)
    assert place("delete", "--job-uid", "B", "--yes").code == 0
    assert read.count(kept + MANIFEST_NAME) == 1 and len(blobs(place)) == 1


def test_delete_keeps_contents_of_an_earlier_job_whose_checkpoint_cannot_be_read(
    place: Place, tmp_path: Path
) -> None:
    (kept,) = synced(place, tmp_path / "one", b"1")
    before = blobs(place)
    synced(place, tmp_path / "two", b"2", uid="B")
    place.store.put(kept + MANIFEST_NAME, b"damaged")
    code, out, err = place("delete", "--job-uid", "B", "--yes")
    assert (code, err) == (0, "") and f"{kept} may need stay" in out
    assert blobs(place) == before


def test_a_folder_whose_head_is_lost_is_neither_begun_again_nor_deleted_and_is_repaired(
    place: Place, tmp_path: Path
) -> None:
    synced(place, tmp_path / "one", b"1", b"22")
    before, sizes = place.store.list(""), [entry.bytes for entry in place.head.checkpoints]
    place.store.delete(["HEAD"])
    with pytest.raises(CheckpointError, match=r"2 checkpoints \(step 2, 1\) but no HEAD"):
        synced(place, tmp_path / "two", b"3", uid="B")
    assert place("repair").code == 0 and place.store.list("") == before
    assert [entry.bytes for entry in place.head.checkpoints] == sizes and place("verify").code == 0
    policy = ClaimPolicy(on_existing=OnExisting.RESUME)
    who = Identity(job_uid="B", job="job-B", attempt=1)
    (tmp_path / "two").mkdir(exist_ok=True)
    again = SyncedCheckpoints(tmp_path / "two", place.store, who, policy, keep=9, run="B")
    assert again.claim(0.0, never, 5.0) and again.restore().resumed
    assert (tmp_path / "two" / "file").read_bytes() == b"22"


def test_prune_deletes_stray_contents_only_with_orphans(place: Place, tmp_path: Path) -> None:
    old, _, _ = synced(place, tmp_path / "one", b"1", b"2", b"3")
    stray = "blobs/t000001-s000000001-x/" + "0" * 64
    place.store.put(stray, b"x")
    assert place("prune", "--keep", "2", "--yes").code == 0
    assert stray in blobs(place) and len(blobs(place)) == 3
    assert not place.store.list(old)
    assert "1 content of files" in place("prune", "--orphans", "--dry-run").out and stray in blobs(place)
    assert place("prune", "--orphans", "--yes").code == 0
    assert stray not in blobs(place) and len(blobs(place)) == 2


def test_prune_deletes_contents_where_no_checkpoint_of_a_folder_is_left(place: Place) -> None:
    place.ended(1, 2)
    place.store.put("blobs/t000001-s000000001-x/" + "0" * 64, b"x")
    assert place("prune", "--orphans", "--yes").code == 0
    assert not blobs(place)


# --- reading ----------------------------------------------------------------------------------------------
def contents(folder: Path) -> dict[str, bytes]:
    return {path: (folder / path).read_bytes() for path, node in look(folder).items() if node.size}


def test_a_download_writes_the_folder_and_claims_nothing(place: Place, tmp_path: Path) -> None:
    synced(place, tmp_path / "one", b"1", b"2" * 5000)
    before = place.store.get("HEAD")
    target = tmp_path / "out"
    answer = place("download", "--to", str(target))
    assert (answer.code, answer.err) == (0, "") and "1 file of checkpoint 2" in answer.out
    assert contents(target) == {"file": b"2" * 5000} and before == place.store.get("HEAD")
    assert place("download", "--step", "1", "--to", str(target)).code == 2, "it is there already"
    assert place("download", "--step", "1", "--to", str(tmp_path / "old")).code == 0
    assert contents(tmp_path / "old") == {"file": b"1"}
    assert place("download", "--to", str(tmp_path / "pt"), "--format", "pt").code == 2
    (tmp_path / "empty").mkdir()
    assert place("download", "--to", str(tmp_path / "empty")).code == 0
    assert contents(tmp_path / "empty") == {"file": b"2" * 5000}
    place.store.delete(sorted(blobs(place)))
    answer = place("download", "--to", str(tmp_path / "damaged"))
    assert answer.code == 1 and "cannot be downloaded" in answer.err
    assert not [each for each in tmp_path.iterdir() if "damaged" in each.name]


def test_copy_makes_a_uri_from_which_a_folder_is_restored(place: Place, tmp_path: Path) -> None:
    synced(place, tmp_path / "one", b"1", b"22")
    target = FolderStore(tmp_path / "target")
    answer = place("copy", "--to", str(tmp_path / "target"), "--step", "1")
    assert (answer.code, answer.err) == (0, "") and "spottrain sync --on-existing resume" in answer.out
    (tmp_path / "two").mkdir()
    who, policy = Identity(job_uid="B", job="b", attempt=1), ClaimPolicy(on_existing=OnExisting.RESUME)
    checkpoints = SyncedCheckpoints(tmp_path / "two", target, who, policy, keep=2, run="B")
    assert checkpoints.claim(0.0, never, 5.0) and checkpoints.restore().resumed
    assert contents(tmp_path / "two") == {"file": b"1"}
    assert len(target.list(BLOBS_PREFIX)) == 1


def test_a_copy_of_a_damaged_folder_leaves_nothing(place: Place, tmp_path: Path) -> None:
    synced(place, tmp_path / "one", b"1" * 10)
    (blob,) = blobs(place)
    place.store.put(blob, b"2" * 10)
    answer = place("copy", "--to", str(tmp_path / "target"))
    assert answer.code == 1 and "cannot be copied" in answer.err
    assert FolderStore(tmp_path / "target").list("") == []
