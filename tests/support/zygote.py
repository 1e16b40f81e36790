"""Starts `spottrain run` as real processes without paying for `import torch` each time.

Run as a program it imports torch once and forks a child per command. The child then is a pod: a session of
processes with its own output, environment, signals and exit code. A launcher's ranks are forked as well.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NoReturn, Self

PR_SET_PDEATHSIG: Final = 1
ALONE: Final = {
    # Two threads of OpenMP spin against each other on busy cores; one is faster, and sums in one order.
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compilers would not outlive the fork
}
PRELOADED: Final = (
    "spottrain.training.trainer",
    "spottrain.distributed.process_group",
    "spottrain.storage.s3",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
)
NUMBERS: Final = itertools.count()
BROKEN_OUTPUT: Final = 120
"""Python's exit code where the last of its output could not be written."""


class Zygote:
    """`env` is that of the program and so of all it starts."""

    def __init__(self, **env: str) -> None:
        process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ALONE | env,
        )
        assert process.stdin and process.stdout
        self._begin(process.stdout, process.stdin)
        self._open.enter_context(process)

    def _begin(self, answers: IO[str], commands: IO[str]) -> None:
        self._turn = threading.Lock()
        self._answers, self._commands = answers, commands
        self._open = contextlib.ExitStack()

    def child(self, *modules: str) -> Self:
        """A fork that has imported these too: it saves the import of torch."""
        name = f"\0zygote-{os.getpid()}-{next(NUMBERS)}"  # of Linux's abstract namespace: it leaves no file
        child = object.__new__(type(self))
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
            server.listen(1)
            self._ask(child=name)
            connection, _ = server.accept()
        with connection:
            files = connection.makefile("r"), connection.makefile("w")
        child._begin(*files)
        for each in files:
            child._open.enter_context(each)
        child.preload(*modules)
        return child

    def start(self, argv: Sequence[str], env: Mapping[str, str], *, folder: Path, log: Path) -> int:
        """`spottrain ARGV...` in `folder`. Returns its process ID."""
        pid: int = self._ask(start=list(argv), env=dict(env), folder=str(folder), log=str(log))
        return pid

    def preload(self, *modules: str) -> None:
        """Imports more for all that is started later."""
        self._ask(preload=modules)

    def poll(self, pid: int) -> int | None:
        """The exit code, -N when signal N killed it; None while it runs."""
        code: int | None = self._ask(poll=pid)
        return code

    def _ask(self, **command: Any) -> Any:
        with self._turn:
            self._commands.write(json.dumps(command) + "\n")
            self._commands.flush()
            answer = self._answers.readline()
        if not answer:
            raise RuntimeError("the zygote has died; its words are on standard error")
        return json.loads(answer)

    def close(self) -> None:
        self._commands.close()
        self._open.close()


# --- the program --------------------------------------------------------------------------------------
def _serve() -> None:
    del sys.path[0]  # this folder
    # As at PID 1, whom a signal before the handlers does not end: held from birth until they are there.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # to write all of its memory takes a core for seconds
    _preload(PRELOADED)
    _obey(sys.stdin, sys.stdout)


def _obey(commands: IO[str], answers: IO[str]) -> None:
    for line in commands:
        command = json.loads(line)
        answer: int | None = None
        if "preload" in command:
            _preload(command["preload"])
        elif "poll" in command:
            done, status = os.waitpid(command["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        elif (answer := os.fork()) == 0:
            if "child" in command:
                _be_child(command["child"])
            _be_pod(command)
        print(json.dumps(answer), file=answers, flush=True)


def _be_child(name: str) -> NoReturn:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(name)
        _obey(connection.makefile("r"), connection.makefile("w"))
    os._exit(0)


def _preload(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what the collector does not touch needs not be copied for each child


def _be_pod(command: dict[str, Any]) -> NoReturn:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.chdir(command["folder"])
    log = os.open(command["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(command["env"])
    os.execve = _become_rank  # type: ignore[assignment]
    _run(command["start"])


def _become_rank(program: str, argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replaces os.execve, by which the launcher starts a rank: here that has imported torch already."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not os.get_inheritable(fd):
                os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    _run(argv[argv.index("run") :])


def _run(words: Sequence[str]) -> NoReturn:
    """Ends as the interpreter would, but for taking all modules down, which in a fork copies all memory."""
    from spottrain.cli.entry import main

    # PYTHONUNBUFFERED writes a line in pieces, between which the other ranks' lines come.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    sys.argv = ["spottrain", *words]
    code = main()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = BROKEN_OUTPUT
    os._exit(code)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve()
    os._exit(0)  # to take all modules down would take seconds
