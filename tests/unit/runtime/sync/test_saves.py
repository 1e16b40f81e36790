"""The default rule: files that say themselves whether they are whole, and saves of several files."""

from __future__ import annotations

import json
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from spottrain.sync.folder import Node, NodeKind, Tree, look
from spottrain.sync.saves import Saves
from spottrain.sync.whole import Judgement, says_whole
from spottrain.sync.writes import Write


def zipped(path: Path, size: int = 5000, seed: int = 1) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 100)
        file.writestr("archive/data/0", random.Random(seed).randbytes(size))


def safetensors(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [500], "data_offsets": [0, 500]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\1" * 500)


def state(path: Path) -> None:
    path.write_text(json.dumps({"step": 12, "history": [1, 2, 3] * 50}))


@pytest.mark.parametrize(
    ("name", "write"), [("a.pt", zipped), ("a.safetensors", safetensors), ("a.json", state)]
)
def test_a_format_says_of_each_length_whether_the_file_is_whole(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    path = tmp_path / name
    write(path)
    whole = path.read_bytes()
    assert says_whole(path) is True
    for length in {*range(9, len(whole), 97), *range(max(9, len(whole) - 60), len(whole))}:
        path.write_bytes(whole[:length])
        assert says_whole(path) is (None if name == "a.json" else False), length


def test_other_files_say_nothing(tmp_path: Path) -> None:
    for name, content in (("a.txt", b"some words of text"), ("a.bin", b"\x80\x02" * 99), ("b", b"")):
        (tmp_path / name).write_bytes(content)
        assert says_whole(tmp_path / name) is None


def test_a_file_whose_size_was_reserved_says_nothing_until_it_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = json.dumps({"a": {"dtype": "U8", "shape": [10**6], "data_offsets": [0, 10**6]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 10**6)
    assert says_whole(path) is None


class Scene:
    """A folder, and what the kernel tells of it; time is what the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saves = Saves(folder, reaction=0.5)
        self.writes: dict[str, Write] = {}
        self.committed: Tree = {}
        self.now = 100.0
        self.saves.look({}, {}, self.now)

    def write(self, path: str, *, closed: bool = True, told: bool = True, content: bytes = b"") -> None:
        """Writes a file: a zip, or one of another format with `content`."""
        place = self.folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if content:
            place.write_bytes(content)
        else:
            zipped(place, seed=int(self.now * 10))
        if told:
            number = len(self.writes) + self.now
            self.writes[path] = Write(
                number=int(number * 100),
                began=self.now,
                changed=self.now,
                closed=self.now if closed else None,
            )

    def append(self, path: str, content: bytes) -> None:
        with (self.folder / path).open("ab") as file:
            file.write(content)

    def remove(self, path: str) -> None:
        (self.folder / path).unlink()
        self.writes.pop(path, None)

    def judge(self, seconds: float = 0.0, *, ended: bool = False) -> Judgement:
        self.now += seconds
        self.saves.look(look(self.folder), self.writes, self.now)
        return self.saves.judge(self.committed, lambda path: True, self.now, ended=ended)

    def commit(self, seconds: float = 0.0, *, ended: bool = False) -> list[str] | None:
        """Returns the files of a commit at that time; None without one."""
        verdict = self.judge(seconds, ended=ended)
        if verdict.tree is None:
            return None
        self.committed = verdict.tree
        return sorted(path for path, node in verdict.tree.items() if node.kind is not NodeKind.FOLDER)

    def node(self, path: str) -> Node:
        return look(self.folder)[path]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_file_that_is_written_in_place_is_whole_again_and_again_without_a_setting(scene: Scene) -> None:
    scene.write("ckpt.pt")
    assert scene.commit() is None, "another file may follow"
    assert scene.commit(2.5) == ["ckpt.pt"]
    for _ in range(3):
        scene.now += 1
        scene.write("ckpt.pt")
        assert scene.commit() == ["ckpt.pt"], "the last save had no other file"


def test_a_first_file_just_before_the_end_is_stored_unless_the_program_was_killed(scene: Scene) -> None:
    scene.write("ckpt.pt")
    scene.judge()
    killed, itself = (
        scene.saves.judge({}, lambda path: True, scene.now, ended=True, killed=by) for by in (True, False)
    )
    assert killed.tree is None and itself.tree is not None


def test_a_file_of_a_known_format_that_is_cut_off_stands_against_a_commit(scene: Scene) -> None:
    scene.write("ckpt.pt")
    scene.commit(3)
    whole = scene.node("ckpt.pt")
    (scene.folder / "ckpt.pt").write_bytes((scene.folder / "ckpt.pt").read_bytes()[:-1])
    verdict = scene.judge(3, ended=True)
    assert verdict.tree is None and verdict.why == "ckpt.pt was cut off"
    assert scene.committed["ckpt.pt"] == whole
    assert scene.saves.reason("ckpt.pt", scene.now) == "is cut off"


@pytest.mark.parametrize("seconds", [0.0, 0.4])
def test_a_file_of_another_format_is_whole_once_its_writer_has_outlived_the_close(
    scene: Scene, seconds: float
) -> None:
    scene.write("model.bin", content=b"\x80\x02 1")
    assert scene.commit(3) == ["model.bin"]
    scene.now += 1
    scene.write("model.bin", content=b"\x80\x02 22")
    assert scene.commit(seconds, ended=True) is None, "its close may be that of a killed process"
    assert scene.commit(0.6) == ["model.bin"]


def test_a_file_that_is_open_is_not_whole_however_quiet_it_is(scene: Scene) -> None:
    scene.write("model.bin", content=b"\x80\x02 1", closed=False)
    scene.write("other.pt")
    assert scene.judge(40).why == "model.bin was open for writing"


def test_a_file_of_another_format_without_word_of_the_kernel_is_whole_after_a_quiet_time(
    scene: Scene,
) -> None:
    scene.write("model.bin", content=b"\x80\x02 1", told=False)
    assert scene.commit() is None and scene.commit(20) is None
    assert scene.commit(11) == ["model.bin"]
    scene.write("model.bin", content=b"\x80\x02 22", told=False)
    assert scene.commit() is None and scene.commit(31) == ["model.bin"]


def test_two_files_of_one_save_are_never_of_two_saves(scene: Scene) -> None:
    for number in range(3):
        scene.write("model.pt")
        if number:
            assert scene.commit(3) is None, "the last save had an optimizer too"
            assert scene.commit(0, ended=True) is None
        scene.now += 1
        scene.write("optimizer.pt")
        assert (scene.commit() is not None) == bool(number), "at once where the last save was the same"
        assert scene.commit(2.5) == (None if number else ["model.pt", "optimizer.pt"])


def test_after_a_restore_the_files_of_the_last_save_are_known(scene: Scene) -> None:
    for name in ("model.pt", "optimizer.pt", "config.json"):
        scene.write(name, content=b"{}" if name == "config.json" else b"")
    os.utime(scene.folder / "config.json", (0, 0))
    restored = {path: node for path, node in look(scene.folder).items()}
    scene.saves, scene.committed, scene.writes = Saves(scene.folder, 0.5, restored), restored, {}
    assert scene.commit() is None
    scene.now += 1
    scene.write("model.pt")
    assert scene.commit(5, ended=True) is None, "the optimizer is missing"
    scene.write("optimizer.pt")
    assert scene.commit(ended=True) is not None


def test_a_file_that_the_last_save_alone_had_is_not_waited_for_long(scene: Scene) -> None:
    for name in ("last.pt", "best.pt"):
        scene.write(name)
    scene.commit(3)
    for _ in range(2):
        scene.write("last.pt")
        scene.now += 3
    assert scene.commit(11) == ["best.pt", "last.pt"]


def test_files_of_new_names_each_second_are_stored(scene: Scene) -> None:
    found = []
    for number in range(12):
        scene.write(f"step_{number}.pt")
        found.append(scene.commit(0.2))
        scene.now += 0.7
    assert found[:5] == [None] * 5 and all(found[7:]), "each, once it is known that it saves so often"
    scene.write("step_90.pt", content=b"PK\x03\x04 cut off")
    stored = scene.commit(0.1, ended=True) or sorted(scene.committed)
    assert "step_11.pt" in stored and "step_90.pt" not in stored


def test_a_new_folder_is_whole_once_it_has_the_files_of_the_one_before(scene: Scene) -> None:
    names = ("model.safetensors", "optimizer.pt", "trainer_state.json")
    for name in names:
        scene.write(f"checkpoint-1/{name}")
    assert scene.commit() is None
    assert scene.commit(2.5) == [f"checkpoint-1/{name}" for name in names]
    for name in names:
        assert scene.commit(0.1, ended=True) is None
        scene.write(f"checkpoint-2/{name}")
    (scene.folder / "checkpoint-3").mkdir()
    assert scene.commit() is not None
    assert "checkpoint-2/optimizer.pt" in scene.committed and "checkpoint-3" not in scene.committed
    scene.write("checkpoint-3/model.safetensors")
    assert scene.judge(100).why == "checkpoint-3 lacks files that others of its kind have"
    for name in names:
        scene.write(f"checkpoint-4/{name}")
    assert scene.commit() is not None and "checkpoint-4/optimizer.pt" in scene.committed


def test_no_save_waits_for_a_log(scene: Scene) -> None:
    scene.write("train.log", content=b"step 1\n", closed=False)
    scene.write("events.out.tfevents.1", content=b"\x18\0\0\0", closed=False)
    for number in range(4):
        scene.append("train.log", b"step %d\n" % number)
        scene.judge(1)
    scene.write("ckpt.pt")
    for _ in range(3):
        scene.append("train.log", b"more\n")
        verdict = scene.judge(1)
    assert verdict.logs == {"train.log", "events.out.tfevents.1"}
    scene.append("train.log", b"more\n")
    scene.judge()
    assert scene.saves.same(verdict), "it may grow while it is read"
    scene.write("ckpt.pt")
    scene.judge()
    assert not scene.saves.same(verdict)


def test_lines_of_json_are_a_log_and_a_state_that_grows_is_none(scene: Scene) -> None:
    scene.write("log.json", content=b'{"step": 0}\n')
    scene.write("state.json", content=b'{"steps": [0]}')
    for number in range(1, 6):
        scene.append("log.json", b'{"step": %d}\n' % number)
        scene.write("state.json", content=json.dumps({"steps": list(range(number + 1))}).encode())
        verdict = scene.judge(1)
    assert verdict.logs == {"log.json"}


def test_a_file_that_was_open_before_a_save_is_left_as_it_was(scene: Scene) -> None:
    scene.write("index.db", content=b"\0\1\2")
    assert scene.commit(3) == ["index.db"]
    before = scene.committed["index.db"]
    scene.write("index.db", content=b"\0\1\2\3", closed=False)
    scene.write("ckpt.pt")
    assert scene.commit(50) is None, "it may be of this save"
    scene.write("ckpt.pt")
    assert scene.judge(3).left_out == {"index.db"}
    assert scene.commit() == ["ckpt.pt", "index.db"]
    assert scene.committed["index.db"] == before


def test_a_file_that_was_cut_off_long_ago_holds_nothing_up(scene: Scene) -> None:
    scene.write("tmp.pt", content=b"PK\x03\x04 cut off")
    scene.write("ckpt.pt")
    assert scene.commit(70) is None, "it may be of this save, which is stopped"
    scene.write("ckpt.pt")
    assert scene.commit(11) == ["ckpt.pt"]


def test_files_that_are_gone_are_no_reason_for_a_commit(scene: Scene) -> None:
    for name in ("ckpt.pt", "config.json"):
        scene.write(name)
    scene.commit(3)
    scene.remove("ckpt.pt")
    assert scene.judge(60) == Judgement()
    assert scene.saves.unstored(scene.committed) == []


def test_numbered_files_of_two_kinds_are_of_one_save(scene: Scene) -> None:
    for number in range(3):
        scene.write(f"model_{number}.pt")
        assert scene.commit(0.1, ended=True) is None, "the optimizer of that step is not there yet"
        scene.write(f"optimizer_{number}.pt")
        assert scene.commit(2.5) is not None


def test_what_lay_there_before_is_no_save_of_now(scene: Scene) -> None:
    scene.write("ckpt.pt", told=False)
    scene.write("model.bin", content=b"\x80\x02 1", told=False)
    scene.saves = Saves(scene.folder, reaction=0.5)
    assert scene.commit() is None
    assert scene.commit(31) == ["ckpt.pt", "model.bin"]
