"""What the operator and the launcher read after a rank has ended: termination message and outcomes.

The termination message is a file that all ranks of a pod share. The gravest message stays.

Each rank reports its own end; the launcher reports how the ranks' processes ended. The kubelet mounts the
file itself, so nothing can be renamed over it: a lock on the file orders the writers.
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
"""Then the file is written without the lock: a stopped peer may hold it, and the notice period is limited."""

Change = Callable[[TerminationMessage | None], TerminationMessage | None]
"""Maps the message in the file to the one to write; None leaves the file unchanged."""


def graver(one: Outcome, other: Outcome) -> bool:
    return GRAVEST_FIRST.index(one) < GRAVEST_FIRST.index(other)


def revise(path: Path, change: Change, *, since: float) -> None:
    """Reads the message, applies `change`, and writes the result under a lock. An error is logged.

    A message from before `since` (Unix seconds) belongs to an earlier run and is ignored.
    """
    try:
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
    except OSError as error:
        log.unhindered("termination-message-not-written", path=str(path), error=str(error))


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


# --- outcomes -------------------------------------------------------------------------------------------
class RankReports:
    """The outcomes of a launcher's ranks, in a file. Without a writable folder only the exit codes count.

    The interpreter needs seconds to shut torch down. A signal or a crash in these seconds does not change an
    outcome that was reported.
    """

    def __init__(self) -> None:
        self._file, self._owner = -1, os.getpid()
        self.env: dict[str, str] = {}
        """Environment variables for the ranks."""
        try:
            self._file, path = tempfile.mkstemp(prefix="spottrain-ranks-")
        except OSError as error:
            log.event("outcome-not-recorded", why=error)
            return
        self.env = {OUTCOMES_FILE: path}

    def outcome_of(self, pid: int) -> Outcome | None:
        """Returns the outcome of the rank with this process ID; None if it has reported none."""
        if self._file < 0:
            return None
        lines = os.pread(self._file, 2**16, 0).decode(errors="replace").splitlines()
        return next((outcome for outcome in Outcome if f"{pid} {outcome}" in lines), None)

    def close(self) -> None:
        """Closes and deletes the file. Does nothing in a forked child."""
        if self._file >= 0 and self._owner == os.getpid():
            os.close(self._file)
            with contextlib.suppress(OSError):
                os.unlink(self.env[OUTCOMES_FILE])


def report_outcome(env: Mapping[str, str], outcome: Outcome) -> None:
    """Reports this rank's outcome, if it has a launcher."""
    if path := env.get(OUTCOMES_FILE):
        try:
            with open(path, "a") as file:
                file.write(f"{os.getpid()} {outcome}\n")
        except OSError as error:
            log.event("outcome-not-recorded", path=path, error=str(error))
