"""`spottrain run` as PID 1 of a process namespace, started as the image starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
HELD: Final = [
    *set(re.findall(r"#!/usr/bin/env -S (\S+) /opt", (ROOT / "Dockerfile").read_text())),
    sys.executable,
]
"""Arguments of `env` by which all images start the interpreter of `spottrain`, with the signals blocked."""
NAMESPACE: Final = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
SIGTERM_BIT: Final = 1 << (signal.SIGTERM - 1)


def can_be_pid_1() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], check=False).returncode == 0
    except OSError:
        return False


NO_PID_1: Final = "needs the right to make a process namespace (root)"
needs_root = pytest.mark.skipif(not can_be_pid_1(), reason=NO_PID_1)


def once(find: Callable[[], int | None], what: str, seconds: float = 20) -> int:
    give_up = time.monotonic() + seconds
    while (found := find()) is None:
        assert time.monotonic() < give_up, f"no {what} within {seconds} s"
        time.sleep(0.001)
    return found


def pid_1_below(unshare: int) -> int:
    """The process that is PID 1 of the namespace that `unshare` has made."""
    children = Path(f"/proc/{unshare}/task/{unshare}/children")
    return int(
        once(lambda: int(children.read_text().split()[0]) if children.read_text().split() else None, "PID 1")
    )


def holds_signals(pid: int) -> int | None:
    """Whether it blocks SIGTERM or has a handler. `unshare` blocks it too, before it starts the command."""
    if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "unshare":
        return None
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    masks = int(lines["SigBlk"], 16) | int(lines["SigCgt"], 16)
    return pid if masks & SIGTERM_BIT else None
