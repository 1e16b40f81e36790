"""Starts a launcher (ours, torchrun, a shell) as a real process in a session of its own, and watches it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from spottrain.contract import Env, TerminationMessage

BASE = """\
import os, signal, sys, time
from spottrain.contract import Outcome
from spottrain.lifecycle.session import current

session = current()
rank = session.world.rank
stopping = session.preemption
stopping.let_end(None)


def ready():
    print(f"ready-{rank} pid={os.getpid()}.", flush=True)


def wait():
    ready()
    while not stopping.stopping:
        time.sleep(0.01)
"""
WAITS = BASE + 'wait()\nsession.end(Outcome.INTERRUPTED, f"Saved by rank {rank}.")\n'


class Launched:
    """`command` in `folder`. All waits are bounded and name what they waited for."""

    def __init__(self, folder: Path, command: Sequence[str], **env: str) -> None:
        self._message = folder / "message.json"
        self._log = folder / "log.txt"
        basic = {
            Env.TERMINATION_MESSAGE: str(self._message),
            Env.CHECKPOINT_URI: str(folder / "store"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **basic, **env},
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def words(self) -> str:
        """The termination message as it lies there; "" where none was written."""
        return self._message.read_text() if self._message.exists() else ""

    @property
    def message(self) -> TerminationMessage:
        found = TerminationMessage.from_json(self._message.read_text())
        assert found is not None, self._message.read_text()
        return found

    def until(self, *texts: str, seconds: float = 30) -> Launched:
        """Waits until all of `texts` are in the log."""
        give_up = time.monotonic() + seconds
        while missing := [text for text in texts if text not in self.log]:
            assert self._process.poll() is None, f"it ended before {missing}:\n{self.log}"
            assert time.monotonic() < give_up, f"no {missing} within {seconds} s:\n{self.log}"
            time.sleep(0.02)
        return self

    def pid_of(self, rank: int) -> int:
        return int(self.until(f"ready-{rank} ").log.split(f"ready-{rank} pid=")[1].split(".")[0])

    def send(self, signum: signal.Signals = signal.SIGTERM) -> Launched:
        os.kill(self.pid, signum)
        return self

    def send_group(self, signum: signal.Signals = signal.SIGTERM) -> Launched:
        os.killpg(self.pid, signum)
        return self

    def end(self, seconds: float = 30) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds} s:\n{self.log}") from None

    def close(self) -> None:
        """Whatever a failed test has left."""
        for pid in [self.pid, *(int(word.split(".")[0]) for word in self.log.split(" pid=")[1:])]:
            if self._process.poll() is None or pid != self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(10)


def alive(pid: int) -> bool:
    """Not ended, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int, seconds: float = 10, *, zombie: bool = True) -> bool:
    """Whether `pid` ends within `seconds`; with `zombie` one that nobody has waited for counts as ended."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if not alive(pid) and (zombie or not Path(f"/proc/{pid}").exists()):
            return True
        time.sleep(0.02)
    return False
