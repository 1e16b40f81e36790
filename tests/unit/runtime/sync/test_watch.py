"""The loop that looks at a folder and commits it, with a store that is a folder and a clock of the test."""

from __future__ import annotations

import io
import itertools
import zipfile
from pathlib import Path

import pytest
from spottrain.checkpoint.head.owner import Identity
from spottrain.contract import SyncWhen
from spottrain.core.progress import ProgressBoard
from spottrain.storage.base import Cancelled, FilePart, never
from spottrain.storage.local import FolderStore
from spottrain.sync.checkpoints import SyncedCheckpoints
from spottrain.sync.manifest import read_manifest
from spottrain.sync.watch import Watcher


class SlowStore(FolderStore):
    """Something happens during each upload of a part."""

    def during(self) -> None:
        """What happens."""

    def put_part(self, key: str, part: FilePart, **more: object) -> None:
        super().put_part(key, part)
        self.during()


class Scene:
    def __init__(self, root: Path) -> None:
        self.folder = root / "folder"
        self.store = SlowStore(root / "store")
        self.folder.mkdir()
        self.board = ProgressBoard(1)
        self.now = 1000.0
        self.left = float("inf")
        self.checkpoints: SyncedCheckpoints

    def start(self, when: SyncWhen) -> Watcher:
        """Starts the sidecar, or the same one again."""
        who = Identity(job_uid="u", job="j", attempt=1)
        self.checkpoints = SyncedCheckpoints(self.folder, self.store, who, keep=2, run="pod/1")
        assert self.checkpoints.claim(0.0, never, 5.0)
        self.checkpoints.restore()
        return Watcher(
            self.folder,
            when,
            self.checkpoints,
            self.board,
            lambda: self.left,
            grace=30.0,
            clock=lambda: self.now,
        )

    def step(self, watcher: Watcher, seconds: float = 2.0) -> list[str]:
        """One look, later. Returns what the newest checkpoint holds."""
        self.now += seconds
        watcher.step()
        return sorted(self.checkpoints.committed)

    def write(self, path: str, text: str = "1") -> None:
        (self.folder / path).write_text(text)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


QUIET = SyncWhen(quietSeconds=30)


def test_a_folder_becomes_quiet_after_the_program_has_ended_too(scene: Scene) -> None:
    watcher = scene.start(QUIET)
    scene.step(watcher)
    scene.write("model")
    for _ in range(16):  # what the program has left behind writes no more
        scene.now += 2.0
        watcher.step(alive=False)
    assert sorted(scene.checkpoints.committed) == ["model"]


def test_a_folder_that_was_filled_before_the_first_look_is_not_taken_for_quiet(scene: Scene) -> None:
    scene.write("model")
    watcher = scene.start(QUIET)
    assert scene.step(watcher) == []
    assert scene.step(watcher, 30) == ["model"]


def test_after_a_restart_a_file_that_is_newer_than_the_marker_stands_against_a_commit(scene: Scene) -> None:
    scene.write("optimizer")
    scene.write("latest")
    scene.write("model", "half of the next")
    watcher = scene.start(SyncWhen(marker="latest"))
    assert scene.step(watcher) == []
    scene.write("latest", "2")
    assert scene.step(watcher) == ["latest", "model", "optimizer"]


def test_what_comes_and_goes_during_an_upload_does_not_stop_its_commit(scene: Scene) -> None:
    for name in ("step_1", "step_2"):
        scene.write(name, name)
    watcher = scene.start(SyncWhen(renamed="step_*"))
    uploads = itertools.count(1)

    def train() -> None:  # by two threads
        number = next(uploads)
        scene.write(f"tmp_{number}")
        if number == 2:  # both are sent
            (scene.folder / "step_1").unlink()

    scene.store.during = train  # type: ignore[method-assign]
    assert scene.step(watcher) == ["step_1", "step_2"]
    assert scene.step(watcher) == ["step_2"]


def test_a_file_that_is_written_over_during_an_upload_stops_its_commit(scene: Scene) -> None:
    for name in ("step_1", "step_2"):
        scene.write(name, name)
    watcher = scene.start(SyncWhen(renamed="step_*"))
    scene.store.during = lambda: scene.write("step_1", "other content")  # type: ignore[method-assign]
    assert scene.step(watcher) == []
    assert "changed while it was read" in str(watcher.failure)


def test_a_commit_before_a_deadline_is_tried_however_much_is_to_be_read(scene: Scene) -> None:
    chunk = 2**20
    scene.write("step_1", "1" * chunk)
    watcher = scene.start(SyncWhen(renamed="step_*"))
    scene.step(watcher)
    scene.left = 20.0
    scene.write("step_2", "1" * chunk)
    assert scene.step(watcher) == ["step_1", "step_2"], "no byte of it was new"


def test_of_a_commit_that_takes_too_long_nothing_counts(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.write("step_1")
    watcher = scene.start(SyncWhen(renamed="step_*"))
    scene.left = 5.0

    def too_long(key: str, part: FilePart, **more: object) -> None:
        scene.left = 0.0
        raise Cancelled(key)

    monkeypatch.setattr(scene.store, "put_part", too_long)
    assert scene.step(watcher) == []
    assert "the time was up" in str(watcher.failure)


@pytest.mark.parametrize(
    ("when", "why"),
    [
        (SyncWhen(marker="latest"), "there is no file latest in the folder"),
        (SyncWhen(renamed="step_*"), "log and 0 others match no step_*"),
        (SyncWhen(quietSeconds=30), "files change more often than every 30 s"),
    ],
)
def test_a_checkpoint_that_never_becomes_whole_is_a_warning_until_there_is_one(
    scene: Scene, when: SyncWhen, why: str
) -> None:
    watcher = scene.start(when)
    for number in range(62):
        scene.write("log", str(number))
        scene.step(watcher, 10)
    assert scene.board.facts.warning == f"No checkpoint for 300 s: {why}."
    scene.write("step_1")
    scene.write("latest")
    scene.step(watcher)
    assert scene.step(watcher, 30)
    assert scene.board.facts.warning == ""


@pytest.mark.parametrize("when", [QUIET, SyncWhen(renamed="step_*"), SyncWhen(marker="latest")])
def test_a_program_that_saves_once_an_hour_is_not_warned_of(scene: Scene, when: SyncWhen) -> None:
    watcher = scene.start(when)
    for number in range(3):
        if when.renamed:
            scene.write("metrics.csv", f"{number}")
        scene.write(f"step_{number}", "content")
        for name in ("half", "latest"):
            scene.step(watcher)
            assert scene.board.facts.warning == ""
            scene.write(name, f"{number}")
        scene.step(watcher)
        for _ in range(360):
            scene.step(watcher, 10)
            assert scene.board.facts.warning == ""
    assert "step_2" in scene.checkpoints.committed


def test_a_file_that_changes_each_time_it_is_read_is_a_warning(scene: Scene) -> None:
    scene.write("step_1")
    watcher = scene.start(SyncWhen(renamed="step_*"))
    number = iter(range(1000))
    scene.store.during = lambda: scene.write("step_1", f"content {next(number)}")  # type: ignore[method-assign]
    for _ in range(62):
        assert scene.step(watcher, 10) == []
    assert "No checkpoint for 300 s: the folder changed while it was read" in scene.board.facts.warning
    scene.store.during = lambda: None  # type: ignore[method-assign]
    assert scene.step(watcher, 10) == ["step_1"] and scene.board.facts.warning == ""


def test_a_folder_that_is_gone_is_a_warning(scene: Scene) -> None:
    watcher = scene.start(QUIET)
    scene.folder.rename(scene.folder.with_name("moved"))
    for _ in range(62):
        scene.step(watcher, 10)
    assert "cannot be listed: No such file or directory" in scene.board.facts.warning


def test_a_commit_that_only_the_end_made_whole_is_no_durable_step(scene: Scene) -> None:
    scene.write("step_1")
    watcher = scene.start(SyncWhen(renamed="step_*"))
    scene.step(watcher)
    key = scene.board.facts.key
    scene.write("half")
    assert watcher.last(everything=True, at_end=True, until=lambda: True)
    facts = scene.board.facts
    assert (facts.step, facts.durable_step, watcher.newest) == (2, 1, 2)
    assert key and facts.key == key


def test_a_commit_after_the_exit_code_0_is_a_durable_step(scene: Scene) -> None:
    scene.write("half")
    watcher = scene.start(SyncWhen(renamed="step_*"))
    assert watcher.last(everything=True, at_end=False, until=lambda: True)
    assert scene.board.facts.durable_step == 1


def _save(scene: Scene, step: int) -> None:
    with zipfile.ZipFile(scene.folder / "ckpt.pt", "w") as file:
        file.writestr("step", str(step) * 1000)


def test_where_there_is_no_room_for_a_copy_the_file_itself_is_sent(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spottrain.sync.checkpoints.RESERVE", 1.0)
    watcher = scene.start(SyncWhen())
    steps = iter((2,))

    def once() -> None:
        for step in steps:
            _save(scene, step)

    scene.store.during = once  # type: ignore[method-assign]
    _save(scene, 1)
    failures = []
    for _ in range(5):
        stored = scene.step(watcher, 6)
        failures.append(str(watcher.failure))
    assert any("changed while it was read" in each for each in failures)
    assert any("has no room for a copy" in each for each in failures) and stored == ["ckpt.pt"]


def test_a_file_that_is_written_again_before_it_is_sent_is_copied_first(scene: Scene) -> None:
    watcher = scene.start(SyncWhen())
    number = iter(range(2, 100))
    scene.store.during = lambda: _save(scene, next(number))  # type: ignore[method-assign]
    _save(scene, 1)
    stored = [scene.step(watcher, 3) for _ in range(3)]
    assert stored[0] == [] and ["ckpt.pt"] in stored, "the first one was written to while it was sent"
    assert [each.name for each in scene.folder.parent.iterdir() if "spottrain-sync" in each.name] == []
    manifest = read_manifest(scene.store, str(scene.board.facts.key))
    content = b"".join((scene.folder.parent / "store" / key).read_bytes() for key in manifest.blobs)
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        assert int(file.read("step")[:1]) > 1
