"""A pod of a scene, from the zygote: alone, or as a gang under the launcher; or a fresh process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support import pid1
from tests.support.zygote import ALONE, Zygote

ROOT: Final = Path(__file__).parents[2]


def start_zygote(hash_seed: int, **env: str) -> Zygote:
    """`hash_seed`: of Python's hashes; another one in another zygote, as in real processes."""
    return Zygote(PYTHONHASHSEED=str(hash_seed), PYTHONPATH=_path(), **env)


class Pod:
    """The processes of one attempt; `pid` is the first one, and the session's number."""

    def __init__(
        self, zygote: Zygote, script: Path, env: Mapping[str, str], *, folder: Path, log: Path, nproc: int
    ) -> None:
        self.pid = zygote.start(["run", "--nproc", str(nproc), str(script)], env, folder=folder, log=log)
        self.log = log
        self.code: int | None = None
        self._zygote = zygote
        self._end = os.pidfd_open(self.pid)

    def wait(self, seconds: float, bell: int | None = None) -> bytes | None:
        """What the bell rang; empty when the time is over, None when the pod has ended."""
        if self.code is not None:
            return None
        both = [self._end] if bell is None else [bell, self._end]
        ready, _, _ = select.select(both, [], [], max(seconds, 0.0))
        if bell in ready and bell is not None:
            return os.read(bell, 4096)
        if self._end in ready:
            self.code = self._reap()
            os.close(self._end)
            return None
        return b""

    def _reap(self) -> int | None:
        return self._zygote.poll(self.pid)

    @property
    def ranks(self) -> list[int]:
        """Processes of the ranks: the first process itself, or the launcher's children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        with contextlib.suppress(OSError):
            found = [int(word) for word in children.read_text().split()]
            return [pid for pid in found if _is_rank(pid)] or [self.pid]
        return [self.pid]

    def processes(self) -> list[int]:
        """All that are left of the session."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdecimal() and _session_of(entry) == self.pid:
                found.append(int(entry))
        return found

    def send(self, signum: signal.Signals, target: str) -> None:
        """`target`: pod (its first process), rank0, rank1, ranks, group (of each rank as well) or node."""
        pids = [self.pid]
        groups: list[int] = []
        if target.startswith("rank"):
            ranks = self.ranks
            pids = ranks if target == "ranks" else ranks[int(target[4:]) :][:1]
        elif target == "group":
            groups = sorted({self.pid, *self.ranks})
            pids = []
        elif target == "node":
            pids = self.processes()
        for act, numbers in ((os.kill, pids), (os.killpg, groups)):
            for pid in numbers:
                with contextlib.suppress(ProcessLookupError):
                    act(pid, signum)

    def clear(self) -> None:
        """As when the first process of a pod has ended: nothing of it is left."""
        while left := [pid for pid in self.processes() if pid != self.pid or self.code is None]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)


class FreshPod(Pod):
    """One attempt as a process of its own from its first instruction on: PID 1 of a namespace where this user
    may make one. Takes signals to the pod alone."""

    def __init__(self, script: Path, env: Mapping[str, str], *, folder: Path, log: Path) -> None:
        namespace = pid1.NAMESPACE if pid1.can_be_pid_1() else []
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*namespace, "env", *pid1.HELD, "-m", "spottrain", "run", str(script)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": _path(), **ALONE} | dict(env),
            )
        self.pid, self.log, self.code = self._process.pid, log, None
        self._end = os.pidfd_open(self.pid)
        self._first = pid1.pid_1_below(self.pid) if namespace else self.pid
        pid1.once(lambda: pid1.holds_signals(self._first), "held SIGTERM")

    def _reap(self) -> int:
        return self._process.wait()

    def send(self, signum: signal.Signals, target: str) -> None:
        assert target == "pod"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first, signum)


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def _stat(pid: int | str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return []


def _session_of(pid: str) -> int | None:
    """None of one that has ended, though nobody has waited for it."""
    words = _stat(pid)
    return int(words[3]) if words and words[0] != "Z" else None


def _is_rank(pid: int) -> bool:
    """Each has a group of its own; an uploader or a loader has its rank's."""
    words = _stat(pid)
    return bool(words) and int(words[2]) == pid
