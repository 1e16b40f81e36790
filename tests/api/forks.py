"""Starts operator processes without paying for the imports each time.

Run as a program it imports the operator once, and forks a child per command. The child then is
`python -m spottrain_operator`: a process of its own, with its own environment, log, signals and exit code.
Its clock may be ahead, as if it had been started later.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

PR_SET_PDEATHSIG: Final = 1
PRELOADED: Final = ("spottrain_operator.__main__", "aiohttp.web", "kubernetes.aio")


class Forks:
    """The test's side. Usable from several threads."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._turn = threading.Lock()

    def start(self, env: Mapping[str, str], log: Path, *, ahead: float = 0) -> int:
        """Starts an operator whose clock is so many seconds ahead. Returns its process ID."""
        pid: int = self._ask(env=dict(env), log=str(log), ahead=ahead)
        return pid

    def poll(self, pid: int) -> int | None:
        """The exit code, -N when signal N killed it; None while it runs. Ask no more after the end."""
        code: int | None = self._ask(poll=pid)
        return code

    def _ask(self, **command: Any) -> Any:
        with self._turn:
            assert self._process.stdin and self._process.stdout
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the program that forks operators has died; its words are on standard error")
        return json.loads(answer)


# --- the program --------------------------------------------------------------------------------------
def _serve() -> None:
    del sys.path[0]  # this folder
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what the collector does not touch needs not be copied for each child
    for line in sys.stdin:
        command = json.loads(line)
        answer: int | None = None
        if "poll" in command:
            done, status = os.waitpid(command["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        elif (answer := os.fork()) == 0:
            _operate(**command)
        print(json.dumps(answer), flush=True)


def _operate(env: dict[str, str], log: str, ahead: float) -> NoReturn:
    from kubernetes.aio.config import kube_config
    from spottrain_operator.__main__ import main

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for number, target in enumerate((os.open(os.devnull, os.O_RDONLY), file, file)):
        os.dup2(target, number)
    os.environ.clear()
    os.environ.update(env)
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = env["KUBECONFIG"]  # it is read at the import
    code = 1
    try:
        code = main(now=lambda: datetime.now(UTC) + timedelta(seconds=ahead))
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # to take all modules down would copy all memory


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve()
    os._exit(0)
