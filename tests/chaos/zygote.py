"""Starts `spottrain run` as real processes, alone or as a gang, without paying for `import torch` each time.

Run as a program it imports what a trainer needs once and forks a child per command, which then is a pod:
a session of processes, its own output, environment, signals and exit code. A gang is led by the real
launcher, whose ranks are forked as well. `Zygote` is the player's side.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from tests.support import pid1

ROOT: Final = Path(__file__).parents[2]
PR_SET_PDEATHSIG: Final = 1
ALONE: Final = {
    # Two threads of OpenMP spin against each other on busy cores; one is faster, and sums in one order.
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compilers would not outlive the fork
}


class Zygote:
    """`hash_seed`: of Python's hashes; another one in another zygote, as in real processes."""

    def __init__(self, hash_seed: int = 0, **env: str) -> None:
        more = {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": _path(), **ALONE, **env}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | more,
        )
        self._turn = threading.Lock()

    def start(self, script: Path, env: Mapping[str, str], *, folder: Path, log: Path, nproc: int = 1) -> Pod:
        command = {"script": str(script), "env": dict(env), "folder": str(folder), "log": str(log)}
        return Pod(self, self.ask(start=command | {"nproc": nproc}), log)

    def ask(self, **command: Any) -> Any:
        with self._turn:
            assert self._process.stdin and self._process.stdout
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the zygote has died; its words are on standard error")
        return json.loads(answer)

    def close(self) -> None:
        with self._process:
            assert self._process.stdin
            self._process.stdin.close()


class Pod:
    """The processes of one attempt; `pid` is the first one, and the session's number."""

    def __init__(self, zygote: Zygote, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.code: int | None = None
        self._zygote = zygote
        self._end = os.pidfd_open(pid)

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

    def _reap(self) -> int:
        code: int = self._zygote.ask(wait=self.pid)
        return code

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


# --- the program --------------------------------------------------------------------------------------
def _serve(preload: Sequence[str]) -> None:
    import importlib

    for name in ("spottrain.training.trainer", "torch._dynamo", "spottrain.storage.s3", *preload):
        importlib.import_module(name)
    # As at PID 1, whom a signal before the handlers does not end: held from birth until they are there.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    gc.collect()
    gc.freeze()  # what the collector does not touch needs not be copied for each child
    for line in sys.stdin:
        command = json.loads(line)
        answer: object
        if "preload" in command:
            answer = importlib.import_module(command["preload"]).__name__
        elif "wait" in command:
            _, status = os.waitpid(command["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        elif (answer := os.fork()) == 0:
            return _be_pod(command["start"])
        print(json.dumps(answer), flush=True)


def _be_pod(command: dict[str, Any]) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.chdir(command["folder"])
    log = os.open(command["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(command["env"])
    if command["nproc"] == 1:
        _run(command["script"])
    from spottrain.core.process_start import process_start
    from spottrain.core.startup_signals import hold_signals
    from spottrain.lifecycle.topology import LOOPBACK, Gang

    hold_signals()
    gang = Gang(nproc=command["nproc"], host=LOOPBACK)
    os._exit(_forking()(gang, [command["script"]], os.environ, born=process_start()).run())


def _run(script: str) -> NoReturn:
    """Ends as the interpreter would, but for taking all modules down, which in a fork copies all memory."""
    from spottrain.cli.main import main

    code = main(["run", script])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _forking() -> Any:
    """The launcher but for how it starts a rank: here that has imported torch already."""
    from spottrain.core.preemption import SIGNALS
    from spottrain.lifecycle.launcher import Launcher

    class Forking(Launcher):
        def _start(self, local_rank: int, port: int) -> int:
            env = {**self._env, **self._gang.env_of(local_rank, port)}
            launcher = os.getpid()
            pid = os.fork()
            if pid:
                return pid
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != launcher:
                os._exit(127)
            signal.pthread_sigmask(signal.SIG_SETMASK, SIGNALS)
            os.environ.update(env)
            _run(self._command[0])

    return Forking


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve(sys.argv[1:])
