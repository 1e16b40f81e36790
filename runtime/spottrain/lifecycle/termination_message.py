"""The termination message as a file that all ranks of a pod share: the gravest one stays.

Written by `session` (each rank's own end) and by `launcher` (what became of the ranks). The kubelet mounts
the file alone, so nothing can be renamed over it: a lock on the file itself orders the writers.

A second file, of the launcher alone, holds the outcome of each rank's process (`Outcomes`). The interpreter
needs seconds to take torch down; a signal or a crash in these seconds does not change how the run ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from spottrain.contract import OUTCOMES_FILE, Outcome, Reason, TerminationMessage
from spottrain.core import log

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
    """`message`, unless one that is as grave was there first. A failed GPU explains its peers' failures."""

    def change(found: TerminationMessage | None) -> TerminationMessage | None:
        if found is None or graver(message.outcome, found.outcome):
            return message
        same = message.outcome is found.outcome is Outcome.FAILED
        return message if same and message.reason == Reason.NODE_FAULT != found.reason else None

    return change


class Outcomes:
    """The outcomes that a launcher's ranks have told.

    Without a writable folder for the file there are none, and the exit codes alone count.
    """

    def __init__(self) -> None:
        self._file, self._path, self._owner = -1, "", os.getpid()
        try:
            self._file, self._path = tempfile.mkstemp(prefix="spottrain-outcomes-")
        except OSError as error:
            log.event("outcomes-not-kept", why=error)

    @property
    def env(self) -> dict[str, str]:
        """For the ranks."""
        return {OUTCOMES_FILE: self._path} if self._path else {}

    def of(self, pid: int) -> Outcome | None:
        """Of the rank with this process; None where it has told none."""
        if self._file < 0:
            return None
        lines = os.pread(self._file, 2**16, 0).decode(errors="replace").splitlines()
        told = (line.partition(" ") for line in lines)
        return next(
            (Outcome(word) for who, _, word in told if who == str(pid) and word in set(Outcome)), None
        )

    def close(self) -> None:
        """By the process that has made it; does nothing in a fork."""
        if self._file >= 0 and self._owner == os.getpid():
            os.close(self._file)
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def tell_launcher(env: Mapping[str, str], outcome: Outcome) -> None:
    """In a rank, once it knows how it ends."""
    if path := env.get(OUTCOMES_FILE):
        try:
            with open(path, "a") as file:
                file.write(f"{os.getpid()} {outcome}\n")
        except OSError as error:
            log.event("outcome-not-told", path=path, error=str(error))


def _lock(file: int) -> None:
    give_up = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < give_up:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.01)
