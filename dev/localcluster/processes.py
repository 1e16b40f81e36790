"""Finding and ending processes of ours. Used by the host side (up, down) and the supervisor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path
from typing import Final

from localcluster.shell import wait_until

SUPERVISOR_MODULE = "localcluster.supervisor"
_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """In a child before exec: the kernel kills it when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def child_of(parent: int) -> int | None:
    """The first child of a process, from /proc: unshare(1) does not tell the pid that it forked."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent(entry) == parent:
            return int(entry.name)
    return None


def _parent(entry: Path) -> int | None:
    try:
        stat = (entry / "stat").read_text()
    except OSError:  # it ended while we looked
        return None
    return int(stat.rsplit(")", 1)[1].split()[1])


def find_supervisor(state: Path) -> int | None:
    """The supervisor of this state folder, or None.

    No pid file: a file can outlive its process and name a stranger. A process is ours when its command line
    names our module and our state folder and it is the first process of a pid namespace below this one.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _is_supervisor(entry, state):
            return int(entry.name)
    return None


def _is_supervisor(entry: Path, state: Path) -> bool:
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
        if SUPERVISOR_MODULE.encode() not in words or os.fsencode(state) not in words:
            return False
        status = (entry / "status").read_text()
    except OSError:
        return False
    line = next((row for row in status.splitlines() if row.startswith("NSpid:")), "")
    pids = line.split()[1:]
    return len(pids) > 1 and pids[-1] == "1"


def end_supervisor(pid: int, state: Path) -> None:
    """Kills the first process of the cluster's pid namespace: the kernel ends every other one with it."""
    handle = os.pidfd_open(pid)  # a pid can be given to another process; a pidfd cannot
    try:
        if not _is_supervisor(Path(f"/proc/{pid}"), state):
            return
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        wait_until("the end of the cluster's processes", lambda: not _exists(pid), seconds=20)
    finally:
        os.close(handle)


def _exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def kill(pid: int) -> None:
    """SIGKILL to a grandchild found just now; its parent has not collected it, so the pid is still its."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
