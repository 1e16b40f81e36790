"""Real processes that are watched: `spottrain run` from the zygote, and other launchers from a command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from spottrain.contract import Env, ExitCode, TerminationMessage

from tests.support.zygote import Zygote

OURS = (sys.executable, "-m", "spottrain", "run")
BASE = """\
import os, signal, sys, time
from spottrain.contract import Outcome
from spottrain.lifecycle.endings import Ending
from spottrain.lifecycle.life import Phase
from spottrain.lifecycle.session import current

session = current()
rank = session.world.rank
stopping = session.preemption
session.enter(Phase.CLAIMING)  # a stop leaves it to the script


def ready():
    print(f"ready-{rank} pid={os.getpid()}.", flush=True)


def wait():
    ready()
    while not stopping.stopping:
        time.sleep(0.01)
"""
WAITS = BASE + 'wait()\nsession.end(Ending(Outcome.INTERRUPTED, f"Saved by rank {rank}."))\n'


class Watched:
    """A process with its log and termination message. All waits are bounded and name what they waited for."""

    def __init__(self, pid: int, poll: Callable[[], int | None], log: Path, message: Path) -> None:
        self.pid = pid
        self._poll = poll
        self._log = log
        self._message = message
        self._code: int | None = None

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    @property
    def words(self) -> str:
        """The termination message as it lies there; "" where none was written."""
        return self._message.read_text() if self._message.exists() else ""

    @property
    def message(self) -> TerminationMessage:
        found = TerminationMessage.from_json(self.words)
        assert found is not None, self.words
        return found

    @property
    def code(self) -> int | None:
        """The exit code; -N when signal N killed it; None while it runs."""
        if self._code is None:
            self._code = self._poll()
        return self._code

    def until(self, *texts: str, seconds: float = 120) -> Self:
        """Waits until all of `texts` are in the log."""
        give_up = time.monotonic() + seconds
        while missing := [text for text in texts if text not in self.log]:
            assert self.code is None, f"it ended ({self.code}) before {missing}:\n{self.log}"
            assert time.monotonic() < give_up, f"no {missing} within {seconds} s:\n{self.log}"
            time.sleep(0.01)
        return self

    def send(self, signum: signal.Signals = signal.SIGTERM) -> Self:
        os.kill(self.pid, signum)
        return self

    def pid_of(self, rank: int) -> int:
        return int(self.until(f"ready-{rank} ").log.split(f"ready-{rank} pid=")[1].split(".")[0])

    def send_group(self, signum: signal.Signals = signal.SIGTERM) -> Self:
        os.killpg(self.pid, signum)
        return self

    def end(self, seconds: float = 120) -> int:
        """Waits for the exit code."""
        give_up = time.monotonic() + seconds
        while self.code is None:
            if time.monotonic() >= give_up:
                self.send(signal.SIGKILL)
                raise AssertionError(f"it did not end within {seconds} s:\n{self.log}")
            time.sleep(0.01)
        return self._code  # type: ignore[return-value]

    def ends(self, code: int, seconds: float = 120) -> Self:
        """Waits for the end, which must have this exit code."""
        assert self.end(seconds) == code, self.log
        return self

    def done(self, seconds: float = 120) -> Self:
        return self.ends(ExitCode.DONE, seconds)

    def stopped(self) -> Self:
        """Sends SIGTERM, at which it saves and ends."""
        return self.send().ends(ExitCode.INTERRUPTED)

    def killed(self) -> Self:
        return self.send(signal.SIGKILL).ends(-signal.SIGKILL)


class Run(Watched):
    """`spottrain ARGV...` as a child of the zygote."""

    def __init__(
        self, zygote: Zygote, folder: Path, argv: list[str], env: dict[str, str], number: int
    ) -> None:
        log, message = folder / f"run-{number}.log", folder / f"message-{number}.json"
        env = env | {Env.TERMINATION_MESSAGE: str(message)}
        pid = zygote.start(argv, env, folder=folder, log=log)
        super().__init__(pid, lambda: zygote.poll(pid), log, message)

    @property
    def losses(self) -> dict[int, str]:
        """The logged loss of each step, as written."""
        words = [line.split() for line in self.log.splitlines() if " step=" in line and "event=" not in line]
        return {int(w[1][5:].split("/")[0]): next(x for x in w if x.startswith("loss=")) for w in words}

    @property
    def digest(self) -> str:
        return self.log.rsplit("digest=", 1)[1].split()[0]

    @property
    def trainer(self) -> int:
        """The process that trains: a child with a group of its own, where the output is kept."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if os.getpgid(int(pid)) == int(pid)]
        return ranks[0] if ranks else self.pid


class Launched(Watched):
    """`command` in `folder`, as a process in a session of its own."""

    def __init__(self, folder: Path, command: Sequence[str], **env: str) -> None:
        log, message = folder / "log.txt", folder / "message.json"
        basic = {
            Env.TERMINATION_MESSAGE: str(message),
            Env.CHECKPOINT_URI: str(folder / "store"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **basic, **env},
                start_new_session=True,
            )
        super().__init__(self._process.pid, self._process.poll, log, message)

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
