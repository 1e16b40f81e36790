"""Finding and ending processes by a mark in their environment, which children inherit.

A process group is not enough: a script may start a session of its own. A process that clears its
environment is missed, unless it is in the group of its container.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

CLUSTER: Final = "SPOTTRAIN_PROCESS_CLUSTER"
"""Holds the run folder of the cluster that a process belongs to."""
CONTAINER: Final = "SPOTTRAIN_PROCESS_CONTAINER"
"""Holds the pod's UID and the container's name."""
_KILL_SECONDS: Final = 10.0


def marked(name: str, value: str) -> Iterator[int]:
    """Process ids whose environment has NAME=value."""
    wanted = f"{name}={value}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def kill_marked(name: str, value: str) -> int:
    """SIGKILL to all of them, until there are none; how many there were. A large one takes a while to end."""
    killed: set[int] = set()
    end = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < end:  # one that forks while we look is found by the next look
        found = [pid for pid in marked(name, value) if pid != os.getpid()]
        if not found:
            break
        killed.update(found)
        for pid in found:
            kill(pid)
        time.sleep(0.01)
    return len(killed)


def kill(pid: int, *, group: bool = False) -> None:
    with suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)


def memory_bytes(root: int) -> int:
    """Anonymous and shared memory of a process and its descendants: what they hold and cannot give back."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    total, todo = 0, [root]
    while todo:
        pid = todo.pop()
        todo += children.get(pid, [])
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(("RssAnon:", "RssShmem:")):
                    total += int(line.split()[1]) * 1024
    return total


def quantity(text: str) -> float:
    """A Kubernetes quantity: 512Mi, 1.5, 250m."""
    for suffix, factor in _SUFFIXES.items():
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)


_SUFFIXES: Final = {
    **{f"{letter}i": 1024.0 ** (power + 1) for power, letter in enumerate("KMGTPE")},
    **{letter: 1000.0 ** (power + 1) for power, letter in enumerate("kMGTPE")},
    "m": 0.001,
}
