"""Checkpoints of a folder in a store that is a folder: what is sent, restored, deleted, refused."""

from __future__ import annotations

import errno
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from spottrain.checkpoint.head.owner import ClaimPolicy, Identity
from spottrain.contract import BLOBS_PREFIX, MANIFEST_NAME, LastExit, OnExisting, SyncResult, SyncWhen
from spottrain.errors import ConfigurationError, StoreUnavailable, Superseded
from spottrain.storage.base import Body, Cancelled, Changed, FilePart, never
from spottrain.storage.local import FolderStore
from spottrain.sync.checkpoints import Commit, SyncedCheckpoints
from spottrain.sync.folder import PRIVATE, Record, is_restored, look, notes_of
from spottrain.sync.manifest import StoredFile, SyncManifest, unnamed
from spottrain.sync.program import make_folder
from spottrain.sync.restore import uncounted
from spottrain.sync.whole import Judgement

from tests.support.sentences import Told

CHUNK = 1000


class Place:
    """A store, and a new folder for each attempt."""

    def __init__(self, root: Path, store: FolderStore | None = None) -> None:
        self.root = root
        self.store = store or FolderStore(root / "store")
        self.attempts = 0

    def attempt(
        self,
        *,
        folder: Path | None = None,
        number: int = 0,
        uid: str = "u",
        last_exit: int | LastExit | None = None,
        when: SyncWhen | None = None,
        run: str = "",
        policy: ClaimPolicy | None = None,
    ) -> Attempt:
        self.attempts = number or self.attempts + 1
        folder = folder or self.root / f"folder-{self.attempts}"
        folder.mkdir(exist_ok=True)
        who = Identity(job_uid=uid, job="j", attempt=self.attempts)
        if isinstance(last_exit, int):
            last_exit = LastExit(attempt=self.attempts - 1, code=last_exit)
        checkpoints = SyncedCheckpoints(
            folder,
            self.store,
            who,
            policy,
            keep=2,
            run=run or f"pod/{self.attempts}",
            when=when,
            last_exit=last_exit,
            chunk_bytes=CHUNK,
        )
        assert checkpoints.claim(0.0, never, 5.0)
        return Attempt(folder, checkpoints)

    def saved(self, *contents: bytes) -> Attempt:
        """An attempt that has committed a file `a` with these contents, one after the other."""
        attempt = self.attempt().restored()
        for each in contents:
            attempt.write("a", each)
            attempt.commit()
        return attempt

    def newest(self, **more: Any) -> object:
        """The content of `a` that the next attempt restores."""
        return content(self.attempt(**more).restored().folder)["a"][1]

    def set_owners(self, key: str, owners: dict[str, tuple[int, int]]) -> None:
        """Changes a stored manifest."""
        found = self.store.get(key + MANIFEST_NAME)
        assert found is not None
        changed = replace(SyncManifest.from_bytes(found.body), owners=owners)
        self.store.put(key + MANIFEST_NAME, changed.to_bytes())

    def blobs(self) -> set[str]:
        return set(self.store.list(BLOBS_PREFIX))


class Attempt:
    def __init__(self, folder: Path, checkpoints: SyncedCheckpoints) -> None:
        self.folder = folder
        self.checkpoints = checkpoints
        self.result: SyncResult | None = None

    def restored(self) -> Attempt:
        self.result = self.checkpoints.restore()
        return self

    def write(self, path: str, content: bytes) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(content)

    def commit(self, *, at_end: bool = False) -> Commit:
        tree = look(self.folder)
        return self.checkpoints.commit(Judgement(tree=tree), lambda: look(self.folder) == tree, at_end=at_end)

    def commit_in_vain(self) -> None:
        """Sends all, and the folder has changed meanwhile."""
        with pytest.raises(Changed):
            self.checkpoints.commit(Judgement(tree=look(self.folder)), lambda: False)


def content(folder: Path) -> dict[str, tuple[int, object]]:
    """Modes, and contents or targets, by path."""
    found: dict[str, tuple[int, object]] = {}
    for path, node in look(folder).items():
        what = node.target or ((folder / path).read_bytes() if node.size else b"")
        found[path] = (node.mode, what)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_folder_comes_back_as_it_was(place: Place) -> None:
    first = place.attempt().restored()
    first.write("a/weights", random.Random(1).randbytes(3 * CHUNK + 7))
    first.write("a/empty", b"")
    (first.folder / "empty folder").mkdir(mode=0o700)
    (first.folder / "a/weights").chmod(0o640)
    os.utime(first.folder / "a/weights", ns=(10**18, 10**18 + 1))
    (first.folder / "latest").symlink_to("a")
    (first.folder / "out").symlink_to("/nowhere")
    first.commit()
    second = place.attempt().restored()
    assert second.result and (second.result.resumed, second.result.step) == (True, 1)
    assert content(second.folder) == content(first.folder)
    assert (second.folder / "a/weights").stat().st_mtime_ns == 10**18 + 1
    assert second.checkpoints.committed == look(second.folder), "nothing is to be committed"


def test_unchanged_and_equal_contents_are_not_sent_again(place: Place) -> None:
    first = place.attempt().restored()
    first.write("a", b"x" * 2500)
    first.commit()
    first.write("copy", b"x" * 2500)
    first.write("new", b"y" * 10)
    assert first.commit().sent == 10
    second = place.attempt().restored()
    os.utime(second.folder / "a")
    assert second.commit().sent == 0
    (second.folder / "copy").unlink()
    second.commit()
    assert "copy" not in content(place.attempt().restored().folder)


def test_a_file_that_changes_while_it_is_read_is_not_committed(place: Place) -> None:
    first = place.saved(b"1")
    first.write("a", b"22")
    verdict = Judgement(tree=look(first.folder))
    first.write("a", b"333")
    with pytest.raises(Changed):
        first.checkpoints.commit(verdict, lambda: True)
    first.commit_in_vain()
    assert place.newest() == b"1"


def test_contents_that_no_checkpoint_names_are_deleted_and_all_others_stay(place: Place) -> None:
    chance = random.Random(4)
    attempt = place.attempt().restored()
    for _ in range(30):
        attempt.write(f"f{chance.randrange(4)}", bytes([chance.randrange(5)]) * chance.randrange(1, 3000))
        if chance.random() < 0.3:
            attempt.checkpoints.step += 1  # an upload in vain
            attempt.commit_in_vain()
        attempt.commit()
        if chance.random() < 0.2:
            attempt = place.attempt().restored()
        keys = place.store.list("checkpoints/")
        manifests = [SyncManifest.from_bytes(o.body) for key in keys if (o := place.store.get(key))]
        assert len(manifests) <= 2 and place.blobs() == {b for m in manifests for b in m.blobs}


def test_a_stale_attempt_is_fenced_out_and_deletes_nothing(place: Place) -> None:
    old = place.saved(b"1")
    place.saved(b"2")
    old.write("a", b"3")
    with pytest.raises(Superseded):
        old.commit()
    assert place.newest() == b"2"
    with pytest.raises(Superseded):
        place.attempt(number=1)


def test_another_job_is_refused_at_a_uri_in_use(place: Place, told: Told) -> None:
    place.attempt().restored()
    told(lambda: place.attempt(uid="other", policy=ClaimPolicy(on_existing=OnExisting.RESUME)))


def test_a_damaged_checkpoint_is_skipped_and_if_all_are_the_folder_stays(place: Place, told: Told) -> None:
    first = place.saved(b"1")
    first.write("a", b"2")
    newest = first.commit()
    for key in place.blobs():
        if newest.key.split("/")[1] in key:
            place.store.delete([key])
    assert place.newest() == b"1"
    place.store.delete(sorted(place.blobs()))
    last = place.attempt()
    last.write("b", b"mine")
    Record(uri=place.store.uri, run="x", ready=True).write(last.folder)
    told(last.restored)
    assert content(last.folder)["b"][1] == b"mine"


def test_the_program_sees_nothing_of_ours_in_its_folder(place: Place) -> None:
    first = place.saved(b"1")
    assert [each.name for each in first.folder.iterdir()] == ["a"]
    first.write("a", b"half")
    again = place.attempt(folder=first.folder).restored()
    assert [each.name for each in again.folder.iterdir()] == ["a"] and content(again.folder)["a"][1] == b"1"
    shutil.move(first.folder, place.root / "moved")
    place.attempt(folder=place.root / "moved").restored()


def test_what_a_killed_start_left_cut_off_is_moved_away_unless_there_was_something_to_store(
    place: Place,
) -> None:
    for there in (True, False):
        folder = place.root / str(there)
        folder.mkdir()
        if there:
            (folder / "config.json").write_bytes(b"{} // of a person")
        first = place.attempt(folder=folder).restored()
        first.write("config.json", b"{} // of a person")
        first.write("a.pt", b"PK\3\4 cut off")
        first.write("b.bin", b"")
        place.attempt(folder=folder).restored()
        assert list(content(folder)) == (["a.pt", "b.bin", "config.json"] if there else ["config.json"])
    assert {each.name for each in (notes_of(folder) / "replaced/1").iterdir()} == {"a.pt", "b.bin"}


def test_without_extended_attributes_notes_are_a_file_beside_the_folder_or_in_a_mount(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "setxattr", refused, raising=False)
    beside = place.saved(b"1").folder
    assert [each.name for each in beside.iterdir()] == ["a"] and (notes_of(beside) / "record.json").exists()
    assert "sync-notes-inside" not in capsys.readouterr().out
    mounts = [place.root.resolve() / f"folder-{number}" for number in range(9)]
    monkeypatch.setattr("spottrain.core.container.mount_points", lambda: mounts)
    mount = place.attempt().restored().folder
    assert sorted(each.name for each in mount.iterdir()) == [PRIVATE, "a"]
    assert "sync-notes-inside" in capsys.readouterr().out
    (mount / "a").write_bytes(b"half")
    again = place.attempt(folder=mount).restored()
    assert content(again.folder)["a"][1] == b"1"


def test_a_folder_of_our_own_name_deeper_down_is_stored_like_any_other(place: Place) -> None:
    first = place.attempt().restored()
    first.write(f"inner/{PRIVATE}/record.json", b"{}")
    first.commit()
    assert f"inner/{PRIVATE}/record.json" in content(place.attempt().restored().folder)


def test_a_restored_file_never_runs_as_its_owner(place: Place) -> None:
    first = place.attempt().restored()
    first.write("a", b"1")
    (first.folder / "a").chmod(0o4755)
    first.commit()
    second = place.attempt().restored()
    assert (second.folder / "a").stat().st_mode & 0o7777 == 0o755
    assert second.checkpoints.committed == look(second.folder)
    older = SyncManifest(step=1, files={"a": StoredFile(size=0, mode=0o4755, mtime_ns=0, chunks=())})
    assert SyncManifest.from_bytes(older.to_bytes()).files["a"].mode == 0o755


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


def owners(folder: Path) -> dict[str, tuple[int, int]]:
    return {path: node.owner for path, node in look(folder).items()}


@as_root
def test_what_root_restores_belongs_to_the_user_who_had_written_it(place: Place) -> None:
    first = place.attempt().restored()
    first.write("a/weights", b"1")
    first.write("mine", b"2")
    (first.folder / "latest").symlink_to("nowhere")
    for path in ("a", "a/weights", "latest"):
        os.lchown(first.folder / path, 1000, 1001)
    first.commit()
    second = place.attempt().restored()
    assert owners(second.folder) == owners(first.folder)
    assert owners(second.folder)["latest"] == (1000, 1001) and owners(second.folder)["mine"] == (0, 0)
    assert second.checkpoints.committed == look(second.folder), "nothing is to be committed"


@as_root
def test_a_folder_that_root_makes_for_a_script_is_as_open_as_the_one_it_is_in(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    os.chown(volume, 1000, 1001)
    make_folder(volume / "a/b", for_others=True)
    make_folder(volume / "mine", for_others=False)
    assert owners(volume) == {"a": (1000, 1001), "a/b": (1000, 1001), "mine": (0, 0)}
    assert (volume / "a/b").stat().st_mode & 0o777 == 0o777


@as_root
def test_an_older_manifest_without_owners_leaves_them_as_they_are(place: Place) -> None:
    first = place.attempt().restored()
    first.write("a", b"1")
    os.chown(first.folder / "a", 1000, 1000)
    place.set_owners(first.commit().key, {})
    assert owners(place.attempt().restored().folder) == {"a": (os.geteuid(), os.getegid())}


def test_a_file_system_that_refuses_owners_does_not_stop_a_restore(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = place.attempt().restored()
    first.write("a", b"1")
    first.write("b", b"1")
    place.set_owners(first.commit().key, {"a": (1, 1), "b": (1, 1)})

    def refused(*words: object, **more: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", refused)
    assert content(place.attempt().restored().folder) == content(first.folder)
    assert capsys.readouterr().out.count("event=sync-owners-lost") == 1


def test_what_no_restart_could_read_is_not_committed(place: Place, told: Told) -> None:
    first = place.attempt().restored()
    first.write("a/b", b"1")
    without_parents = Judgement(tree={"a/b": look(first.folder)["a/b"]})
    told(lambda: first.checkpoints.commit(without_parents, lambda: True))
    assert place.attempt().restored().result == SyncResult(resumed=False)


def test_no_fresh_start_if_what_is_left_beside_a_damaged_checkpoint_does_not_count(
    place: Place, told: Told
) -> None:
    first = place.attempt().restored()
    first.write("a", b"1")
    whole = first.commit()
    first.write("a", b"cut o")
    first.commit(at_end=True)
    place.store.delete([whole.key + MANIFEST_NAME])
    told(lambda: place.attempt(last_exit=137).restored())


def test_an_end_before_a_damaged_one_does_not_count(place: Place) -> None:
    first = place.attempt().restored()
    for text, at_end in ((b"whole", False), (b"half", True), (b"all", True)):
        first.write("a", text)
        newest = first.commit(at_end=at_end)
    place.store.delete([newest.key + MANIFEST_NAME])
    assert place.newest(last_exit=0) == b"whole"


def test_a_checkpoint_of_a_newer_format_keeps_its_contents(place: Place) -> None:
    first = place.attempt().restored()
    first.write("a", b"1")
    old = first.commit()
    before = place.blobs()
    second = place.attempt().restored()
    place.store.put(old.key + MANIFEST_NAME, b'{"format": 99, "kind": "sync"}')
    second.write("a", b"22")
    second.commit()
    third = place.attempt().restored()
    assert before <= place.blobs()
    assert content(third.folder)["a"][1] == b"22"


def test_an_unreadable_checkpoint_protects_only_contents_that_it_can_name(place: Place) -> None:
    place.saved(b"1")
    second = place.attempt().restored()
    second.write("a", b"22")
    place.store.put(second.commit().key + MANIFEST_NAME, b"damaged")
    before = place.blobs()
    third = place.attempt().restored()
    third.write("a", b"sent in vain")
    third.commit_in_vain()
    third.write("a", b"333")
    third.commit()
    assert before < place.blobs() and len(place.blobs()) == len(before) + 1


@pytest.mark.parametrize(
    ("when", "moved"),
    [
        (SyncWhen(renamed="step_*"), {"step_1/extra", "step_2/half"}),
        (SyncWhen(marker="step_*/done"), {"step_1/extra", "step_2/half"}),
        (SyncWhen(marker="done"), {"step_1/extra", "step_2/half", "logs/train", "metrics.csv"}),
        (SyncWhen(quietSeconds=1), {"step_1/extra", "step_2/half", "logs/train", "metrics.csv"}),
    ],
)
def test_with_a_pattern_a_restore_moves_only_what_has_its_name(
    place: Place, when: SyncWhen, moved: set[str]
) -> None:
    first = place.attempt().restored()
    first.write("step_1/weights", b"1")
    first.commit()
    for path in ("step_1/extra", "step_2/half", "logs/train", "metrics.csv"):
        first.write(path, b"mine")
    again = place.attempt(folder=first.folder, when=when).restored()
    replaced = notes_of(again.folder) / "replaced/1"
    assert {str(f.relative_to(replaced)) for f in replaced.rglob("*") if f.is_file()} == moved
    stay = {"step_1/weights", "step_1/extra", "step_2/half", "logs/train", "metrics.csv"} - moved
    assert {path for path, node in look(again.folder).items() if node.size} == stay


def test_with_a_pattern_what_is_in_the_way_of_a_restored_file_is_moved(place: Place) -> None:
    first = place.attempt().restored()
    first.write("metrics.csv", b"all of it")
    first.write("out/step_1", b"1")
    first.commit()
    first.write("metrics.csv", b"half")
    (first.folder / "out/step_1").unlink()
    (first.folder / "out").rmdir()
    first.write("out", b"a file")
    again = place.attempt(folder=first.folder, when=SyncWhen(renamed="out/step_*")).restored()
    assert (again.folder / "metrics.csv").read_bytes() == b"all of it"
    assert (again.folder / "out/step_1").read_bytes() == b"1"
    replaced = notes_of(again.folder) / "replaced/1"
    assert (replaced / "metrics.csv").read_bytes() == b"half" and (replaced / "out").is_file()


@pytest.mark.parametrize("after", range(6))
def test_a_restore_that_is_stopped_changes_nothing_and_the_next_start_restores(
    place: Place, after: int
) -> None:
    first = place.attempt().restored()
    first.write("a", b"1" * 5000)
    first.write("b", b"2" * 5000)
    first.commit()
    mine = place.attempt(folder=first.folder)
    mine.write("a", b"half")
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > after

    with pytest.raises(Cancelled):
        mine.checkpoints.restore(cancelled=cancelled)
    assert content(mine.folder)["a"][1] == b"half"
    again = place.attempt(folder=first.folder, number=mine.checkpoints._attempt).restored()
    assert content(again.folder)["a"][1] == b"1" * 5000


def test_a_folder_that_the_script_has_emptied_is_still_known_to_the_same_pod(
    place: Place, told: Told
) -> None:
    place.saved(b"1")
    mine = place.attempt().restored()
    shutil.rmtree(mine.folder)
    mine.write("b", b"half of the next")
    again = place.attempt(folder=mine.folder, number=2)
    told(again.checkpoints.restore)
    again.result = again.checkpoints.restore(again=True)
    assert content(again.folder).keys() == {"b"}
    again.commit()
    assert Record.read(again.folder) is not None
    third = place.attempt(folder=mine.folder).restored()
    assert content(third.folder).keys() == {"b"}


def test_what_was_sent_in_vain_is_deleted_at_the_end(place: Place) -> None:
    first = place.saved(b"1")
    before = place.blobs()
    first.write("b", b"22")
    first.commit_in_vain()
    assert place.blobs() > before
    first.checkpoints.collect()
    assert place.blobs() == before
    assert first.commit().sent == 2, "what was deleted is sent again"


def test_files_that_differ_are_moved_away_and_never_deleted(place: Place) -> None:
    first = place.attempt().restored()
    first.write("a", b"1")
    first.write("d/same", b"same")
    first.commit()
    first.write("a", b"half")
    first.write("e/more", b"2")
    again = place.attempt(folder=first.folder).restored()
    assert sorted(content(again.folder)) == ["a", "d", "d/same"]
    moved = notes_of(again.folder) / "replaced"
    assert (moved / "1/a").read_bytes() == b"half" and (moved / "1/e/more").read_bytes() == b"2"
    again.write("a", b"third")
    place.attempt(folder=first.folder).restored()
    assert (moved / "1/a").read_bytes() == b"half" and (moved / "2/a").read_bytes() == b"third"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EIO])
def test_an_error_of_the_file_system_in_a_restore_is_a_sentence(
    place: Place, monkeypatch: pytest.MonkeyPatch, code: int, told: Told
) -> None:
    place.saved(b"1")

    def failing(file: int, view: memoryview, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    second = place.attempt()
    monkeypatch.setattr(os, "pwrite", failing)
    told(second.restored)


def test_a_start_of_the_same_pod_goes_on_with_the_folder(place: Place) -> None:
    first = place.saved(b"1")
    first.write("a", b"22")
    again = place.attempt(folder=first.folder, number=1).restored()
    assert (again.folder / "a").read_bytes() == b"22"
    assert again.commit().step == 2


def test_no_room_is_said_before_anything_is_written(
    place: Place, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    place.saved(b"1" * 5000)
    second = place.attempt()
    full = os.statvfs_result((1, 1, 100, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    told(second.restored)
    assert content(second.folder) == {}


@pytest.mark.parametrize(("last_exit", "found"), [(None, b"whole"), (137, b"whole"), (0, b"at the end")])
def test_a_checkpoint_of_an_end_counts_only_after_exit_code_0(
    place: Place, last_exit: int | None, found: bytes
) -> None:
    first = place.saved(b"whole")
    first.write("a", b"at the end")
    first.commit(at_end=True)
    assert place.newest(last_exit=last_exit) == found


def test_the_exit_code_of_a_later_attempt_says_nothing_of_an_earlier_end(place: Place) -> None:
    first = place.saved(b"whole")
    first.write("a", b"cut o")
    first.commit(at_end=True)  # its script was killed
    place.attempt(last_exit=137).restored()  # ends with 0, and commits nothing
    assert place.newest(last_exit=0) == b"whole"


def test_an_exit_code_counts_for_its_own_attempt_and_not_for_later_ones(place: Place) -> None:
    first = place.attempt().restored()
    first.write("a", b"at the end")
    first.commit(at_end=True)
    place.attempt()  # is lost before its restore, and nobody knows how its script would have ended
    known = LastExit(attempt=1, code=0)
    assert place.attempt(last_exit=LastExit(attempt=2, code=0)).restored().result == SyncResult(resumed=False)
    assert place.newest(last_exit=known) == b"at the end"


def test_an_end_that_was_used_counts_for_later_attempts_too(place: Place) -> None:
    first = place.saved(b"whole")
    first.write("a", b"at the end")
    first.commit(at_end=True)
    before = place.blobs()
    second = place.attempt(last_exit=0).restored()
    assert second.result and second.result.step == second.checkpoints.step == 3
    assert place.blobs() <= before, "nothing is sent again"
    third = place.attempt(last_exit=137).restored()
    assert content(third.folder)["a"][1] == b"at the end"


def test_checkpoints_of_an_end_do_not_push_out_the_whole_one(place: Place) -> None:
    place.saved(b"whole")
    for number in range(5):
        attempt = place.attempt().restored()
        assert content(attempt.folder)["a"][1] == b"whole"
        attempt.write("a", b"cut off %d" % number)
        attempt.commit(at_end=True)


def test_only_the_newest_end_counts() -> None:
    end, whole = SyncManifest(step=2, attempt=1, atEnd=True), SyncManifest(step=1, attempt=1)
    done = LastExit(attempt=1, code=0)
    assert not uncounted(end, done, newest=True) and not uncounted(whole, done, newest=False)
    assert uncounted(end, done, newest=False) == "it was stored at the end, and a later one is damaged"


class Unreachable(FolderStore):
    down = False

    def put_part(self, key: str, part: FilePart, **more: object) -> None:
        if self.down:
            raise StoreUnavailable("no answer")
        super().put_part(key, part)

    def put_if_match(self, key: str, body: Body, etag: str) -> str:
        return super().put_if_match(key, body, etag)


def test_what_was_sent_before_an_outage_is_not_sent_again(tmp_path: Path) -> None:
    store = Unreachable(tmp_path / "store")
    attempt = Place(tmp_path, store).attempt().restored()
    attempt.write("a", b"1" * CHUNK)
    attempt.commit_in_vain()
    store.down = True
    attempt.write("b", b"2")
    with pytest.raises(StoreUnavailable):
        attempt.commit()
    store.down = False
    assert attempt.commit().sent == 1


# --- pure rules -----------------------------------------------------------------------------------------
def test_what_happens_to_a_folder_at_the_start(tmp_path: Path, told: Told) -> None:
    mine = Record(uri="s3://b", run="pod/2", ready=True)
    before = Record(uri="s3://b", run="pod/1", ready=True)
    cut_off = Record(uri="s3://b", run="pod/2", ready=False)

    def start(found: Record | None, *, empty: bool = False, stored: bool = True) -> bool:
        return is_restored(found, mine, empty=empty, stored=stored, folder=tmp_path)

    assert not start(None, stored=False) and not start(mine)
    assert start(None, empty=True) and start(before) and start(cut_off)
    for found in (None, Record(uri="s3://other", run="pod/1", ready=True)):
        with pytest.raises(ConfigurationError) as refused:
            start(found)
        told(refused)


def test_only_unnamed_contents_of_earlier_terms_may_go() -> None:
    keys = [
        "blobs/t000001-s000000001-a/1",
        "blobs/t000001-s000000001-a/2",
        "blobs/t000003-s000000001-b/3",
        "blobs/x",
    ]
    assert unnamed(keys, {keys[0]}, below=3) == [keys[1]]


@pytest.mark.parametrize("path", ["../a", "/a", "a//b", ".spottrain-sync/record.json", "link/a"])
def test_a_manifest_that_leads_out_of_the_folder_is_damaged(path: str, told: Told) -> None:

    file = StoredFile(size=0, mode=0o644, mtime_ns=0, chunks=())
    body = SyncManifest(step=1, files={path: file}, links={"link": "/etc"}).to_bytes()
    told(lambda: SyncManifest.from_bytes(body))
