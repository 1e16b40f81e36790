"""The termination message: a file that all ranks of a pod share. The gravest message stays.

Each rank reports its own end; the launcher reports how the ranks' processes ended. The kubelet mounts the
file itself, so nothing can be renamed over it: a lock on the file orders the writers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from spottrain.contract import Outcome, Reason, TerminationMessage

GRAVEST_FIRST: Final = (
    Outcome.BAD_CONFIGURATION,
    Outcome.FAILED,
    Outcome.SUPERSEDED,
    Outcome.STORE_UNREACHABLE,
    Outcome.INTERRUPTED_LOST,
    Outcome.INTERRUPTED,
    Outcome.UNTRAINED,
    Outcome.DONE,
)
LOCK_SECONDS: Final = 1.0
"""Then the file is written without the lock: a stopped peer may hold it, and the notice period is limited."""

Change = Callable[[TerminationMessage | None], TerminationMessage | None]
"""Maps the message in the file to the one to write; None leaves the file unchanged."""


def graver(one: Outcome, other: Outcome) -> bool:
    return GRAVEST_FIRST.index(one) < GRAVEST_FIRST.index(other)


def revise(path: Path, change: Change, *, since: float) -> None:
    """Reads the message, applies `change`, and writes the result under a lock. Raises OSError.

    A message from before `since` (Unix seconds) belongs to an earlier run and is ignored.
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
    """Returns the message in the file; None if there is none or it cannot be read."""
    with contextlib.suppress(OSError):
        return TerminationMessage.from_json(path.read_text(errors="replace"))
    return None


def outranking(message: TerminationMessage) -> Change:
    """Replaces a less grave message. A failed GPU also replaces other failures: it explains them.

    A message that the training is done is replaced at the end of the script, with the final time split.
    """

    def change(found: TerminationMessage | None) -> TerminationMessage | None:
        if found is None or graver(message.outcome, found.outcome):
            return message
        if message.outcome is found.outcome is Outcome.DONE:
            return message
        same = message.outcome is found.outcome is Outcome.FAILED
        return message if same and message.reason == Reason.NODE_FAULT != found.reason else None

    return change


def _lock(file: int) -> None:
    give_up = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < give_up:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.01)
