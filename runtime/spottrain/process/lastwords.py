"""The termination message as a file that all ranks of a pod share: the gravest one stays.

Written by `session` (each rank's own end) and by `launcher` (what became of the ranks). The kubelet mounts
the file alone, so nothing can be renamed over it: a lock on the file itself orders the writers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from spottrain.contract import Outcome, TerminationMessage

GRAVEST_FIRST: Final = (
    Outcome.BAD_CONFIGURATION,
    Outcome.FAILED,
    Outcome.SUPERSEDED,
    Outcome.STORE_UNREACHABLE,
    Outcome.INTERRUPTED_LOST,
    Outcome.INTERRUPTED,
    Outcome.DONE,
)
LOCK_SECONDS: Final = 1.0
"""Then it is written without the lock: a stopped peer may hold it, and the notice does not wait."""

Change = Callable[[TerminationMessage | None], TerminationMessage | None]
"""From the message that is there to the one that shall be; None leaves it."""


def graver(one: Outcome, other: Outcome) -> bool:
    return GRAVEST_FIRST.index(one) < GRAVEST_FIRST.index(other)


def revise(path: Path, change: Change, *, since: float) -> None:
    """Reads, compares, replaces. A message from before `since` (Unix seconds) is an earlier run's.

    Raises OSError.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(file)
        found = None
        if os.fstat(file).st_mtime >= since:
            found = TerminationMessage.from_json(os.pread(file, 2**16, 0).decode(errors="replace"))
        wanted = change(found)
        if wanted is not None:
            os.ftruncate(file, 0)
            os.pwrite(file, wanted.to_json().encode(), 0)
    finally:
        os.close(file)


def read(path: Path) -> TerminationMessage | None:
    """The message that is there; None where there is none, or it cannot be read."""
    with contextlib.suppress(OSError):
        return TerminationMessage.from_json(path.read_text(errors="replace"))
    return None


def outranking(message: TerminationMessage) -> Change:
    """`message`, unless one that is as grave was there first."""
    return lambda found: message if found is None or graver(message.outcome, found.outcome) else None


def _lock(file: int) -> None:
    give_up = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < give_up:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.01)
