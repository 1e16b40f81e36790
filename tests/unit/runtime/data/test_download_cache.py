"""`spottrain.cached`: filled once, never half, whoever is killed; real processes on a real folder."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import spottrain
from spottrain.contract import Env, ExitCode, Reason
from spottrain.core.run_config import data_cache_folder, use_data_cache
from spottrain.data import download_cache
from spottrain.errors import DataCacheFull

from tests.support.sentences import Told

PATIENCE = 20.0
SCRIPT = """
import os, sys, time
from pathlib import Path
import spottrain

def make(folder):
    with open("made", "a") as made: made.write(f"{os.getpid()}\\n")
    (folder / "one").write_text("1")
    print("half", flush=True)
    while not Path("go").exists(): time.sleep(0.02)
    (folder / "two").write_text("2")

folder = spottrain.cached("set", make)
print("have", sorted(path.name for path in folder.iterdir()), flush=True)
assert "torch" not in sys.modules
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(Env.DATA_CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(download_cache, "POLL_SECONDS", 0.01)
    return tmp_path / "cache"


def _wait(what: str, look: Callable[[], Any], seen: Callable[[], str] = str) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited in vain for {what}{seen()}")


class Process:
    """A script that fills the cache, by default in two halves, the second when it is let."""

    def __init__(self, folder: Path, number: int, script: str = SCRIPT, **more: str) -> None:
        self._log = folder / f"log-{number}"
        env = os.environ | {Env.DATA_CACHE: str(folder / "cache")} | more
        with self._log.open("wb") as log:
            command = [sys.executable, "-c", script]
            self._popen = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def until(self, words: str) -> Process:
        _wait(f"{words!r} in\n", lambda: words in self.log, lambda: self.log)
        return self

    def end(self) -> int:
        return self._popen.wait(PATIENCE)

    def tell(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def send(self, number: signal.Signals) -> int:
        self.tell(number)
        return self.end()


def _fill(text: str = "x") -> Callable[[Path], object]:
    return lambda folder: (folder / "file").write_text(text)


def _never(folder: Path) -> None:
    raise AssertionError("it is there already")


def _private(root: Path) -> list[str]:
    """What is left of fillers."""
    return [path.name for path in (root / ".spottrain").iterdir() if path.suffix != ".lock"]


# --- one process --------------------------------------------------------------------------------------
def test_the_first_call_fills_the_folder_and_the_next_finds_it(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = spottrain.cached("set", _fill("abc"))
    assert folder == root / "set" and (folder / "file").read_text() == "abc"
    assert spottrain.cached("set", _never) == folder
    filled, hit = capsys.readouterr().out.splitlines()
    assert re.search(r"event=data-cache-filled name=set seconds=[0-9.]+ bytes=3 files=1 ", filled)
    assert "event=data-cache-hit name=set " in hit


def test_what_make_raises_passes_and_nothing_is_left(root: Path, told: Told) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ValueError("the mirror is down")

    told(lambda: spottrain.cached("set", fails))
    assert not (root / "set").exists() and _private(root) == []
    assert spottrain.cached("set", _fill()).is_dir()


def test_a_folder_that_somebody_has_put_there_by_hand_is_whole(root: Path) -> None:
    (root / "set").mkdir(parents=True)
    assert spottrain.cached("set", _never) == root / "set"


def test_a_folder_of_a_volume_that_is_only_read_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    (root / "set").mkdir(parents=True)
    monkeypatch.setattr(Path, "mkdir", _read_only)
    assert spottrain.cached("set", _never) == root / "set"
    told(lambda: spottrain.cached("other", _fill()))


def _read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize("name", ["", "..", "../x", "/abs", "a/b", ".hidden", "-x", "a b", "x" * 129])
def test_a_name_that_is_no_folder_name_is_refused(root: Path, name: str, told: Told) -> None:
    told(lambda: spottrain.cached(name, _never))
    assert not root.exists()


@pytest.mark.parametrize("name", ["huggingface", "torch"])
def test_the_folders_of_other_libraries_are_not_ours(root: Path, name: str, told: Told) -> None:
    told(lambda: spottrain.cached(name, _never))


def test_a_file_in_the_way_is_named(root: Path, told: Told) -> None:
    root.mkdir()
    (root / "set").touch()
    told(lambda: spottrain.cached("set", _never))


def _full(name: str | None, wrapped: bool = False) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        where = str(folder / "file") if name == "file" else name
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), where)
        if wrapped:
            raise RuntimeError("the download failed") from error
        raise error

    return make


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_volume_is_named_with_its_size(root: Path, wrapped: bool) -> None:
    with pytest.raises(DataCacheFull) as raised:
        spottrain.cached("set", _full("file", wrapped))
    assert re.search(
        rf"the volume at {root} has [0-9.]+ GiB, of which [0-9.]+ GiB were free", str(raised.value)
    )
    assert raised.value.reason == Reason.DATA_CACHE_FULL and _private(root) == []


@pytest.mark.parametrize("name", ["/tmp/elsewhere", None])
def test_another_volume_that_is_full_is_not_taken_for_the_caches(
    root: Path, name: str | None, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    monkeypatch.setattr(download_cache, "ALMOST_NOTHING", 0)
    with pytest.raises(OSError) as raised:
        spottrain.cached("set", _full(name))
    told(raised)
    assert raised.value.errno == errno.ENOSPC and _private(root) == []


def test_a_write_that_names_no_file_is_the_caches_where_next_to_nothing_is_free_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_cache, "ALMOST_NOTHING", 2**63)
    with pytest.raises(DataCacheFull):
        spottrain.cached("set", _full(None))


def test_a_make_that_leaves_no_file_is_told_and_nothing_is_published(root: Path, told: Told) -> None:
    told(lambda: spottrain.cached("set", lambda folder: (folder / "empty").mkdir()))
    assert not (root / "set").exists() and _private(root) == []


def test_what_another_has_put_there_first_is_taken_and_ours_is_dropped(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(folder: Path) -> None:
        (root / "set").mkdir()
        (root / "set" / "theirs").touch()
        (folder / "ours").touch()

    assert [p.name for p in spottrain.cached("set", late).iterdir()] == ["theirs"]
    assert "event=data-cache-discarded" in capsys.readouterr().out and _private(root) == []


# --- where it lies ------------------------------------------------------------------------------------
def test_on_a_laptop_it_is_the_users_cache_folder() -> None:
    assert data_cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/spottrain/data")
    home = Path.home() / ".cache" / "spottrain" / "data"
    assert data_cache_folder({}) == data_cache_folder({"XDG_CACHE_HOME": "relative"}) == home


def test_a_path_that_is_not_absolute_is_a_bad_configuration(told: Told) -> None:
    told(lambda: data_cache_folder({Env.DATA_CACHE: "cache"}))


def test_libraries_are_pointed_into_the_volume_unless_the_user_has_pointed_them_elsewhere(
    tmp_path: Path,
) -> None:
    environ = {"HF_HOME": "/own"}
    use_data_cache({Env.DATA_CACHE: str(tmp_path)}, environ)
    assert environ == {"HF_HOME": "/own", "TORCH_HOME": f"{tmp_path}/torch"}
    before = dict(environ)
    use_data_cache({}, environ)
    assert environ == before


def test_on_a_volume_that_is_only_read_libraries_keep_their_own_folders_unless_something_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    environ = {"HF_HOME": f"{tmp_path}/huggingface"}  # as the operator sets it
    use_data_cache({Env.DATA_CACHE: str(tmp_path)}, environ)
    assert environ == {}
    assert capsys.readouterr().out.count("event=data-cache-not-writable") == 2
    (tmp_path / "torch" / "hub").mkdir(parents=True)
    own = {"HF_HOME": "/own"}
    use_data_cache({Env.DATA_CACHE: str(tmp_path)}, own)
    assert own == {"HF_HOME": "/own", "TORCH_HOME": f"{tmp_path}/torch"}


# --- several processes --------------------------------------------------------------------------------
def _leftover(root: Path) -> Path:
    half = root / ".spottrain" / "set.0123456789abcdef"
    half.mkdir(parents=True)
    return half


def test_leftovers_of_other_names_stay(root: Path) -> None:
    half = _leftover(root)
    spottrain.cached("se", _fill())
    assert half.exists()
    spottrain.cached("set", _fill())
    assert not half.exists()


def test_a_process_that_is_killed_midway_leaves_nothing_that_seems_whole(tmp_path: Path) -> None:
    first = Process(tmp_path, 1).until("half")
    assert first.send(signal.SIGKILL) == -signal.SIGKILL
    assert not (tmp_path / "cache" / "set").exists() and len(_private(tmp_path / "cache")) == 1
    (tmp_path / "go").touch()
    second = Process(tmp_path, 2)
    assert second.end() == 0 and "have ['one', 'two']" in second.log
    assert "event=data-cache-leftover name=set" in second.log and _private(tmp_path / "cache") == []


def test_of_several_processes_one_fills_and_the_others_wait(tmp_path: Path) -> None:
    first = Process(tmp_path, 1).until("half")
    others = [Process(tmp_path, number).until("event=data-cache-waiting") for number in (2, 3)]
    assert len(_private(tmp_path / "cache")) == 1, "the living one's is left alone"
    (tmp_path / "go").touch()
    assert [p.end() for p in (first, *others)] == [0, 0, 0]
    assert all("have ['one', 'two']" in p.log for p in (first, *others))
    assert len((tmp_path / "made").read_text().splitlines()) == 1
    assert all("event=data-cache-hit" in p.log for p in others)


def test_when_the_one_that_fills_is_killed_another_goes_on(tmp_path: Path) -> None:
    first = Process(tmp_path, 1).until("half")
    second = Process(tmp_path, 2).until("event=data-cache-waiting")
    first.send(signal.SIGKILL)
    second.until("half")
    (tmp_path / "go").touch()
    assert second.end() == 0 and "have ['one', 'two']" in second.log
    assert len((tmp_path / "made").read_text().splitlines()) == 2


def test_one_that_waits_without_a_session_ends_at_sigterm(tmp_path: Path) -> None:
    first = Process(tmp_path, 1).until("half")
    second = Process(tmp_path, 2).until("event=data-cache-waiting")
    assert second.send(signal.SIGTERM) == -signal.SIGTERM
    (tmp_path / "go").touch()
    assert first.end() == 0


def test_one_that_waits_in_a_pod_without_our_launcher_ends_as_interrupted(tmp_path: Path) -> None:
    first = Process(tmp_path, 1).until("half")
    pod = {Env.JOB_UID: "uid", Env.ATTEMPT: "1", Env.LOGS: "off", Env.CHECKPOINT_URI: str(tmp_path)}
    env = {str(name): value for name, value in pod.items()}
    second = Process(tmp_path, 2, **env).until("event=data-cache-waiting")
    assert second.send(signal.SIGTERM) == ExitCode.INTERRUPTED
    assert "event=end outcome=interrupted" in second.log
    (tmp_path / "go").touch()
    assert first.end() == 0
