"""What ranks report to their launcher, through a file: their outcome.

The interpreter needs seconds to shut torch down. A signal or a crash in these seconds does not change an
outcome that was reported.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping

from spottrain.contract import OUTCOMES_FILE, Outcome
from spottrain.core import log


class RankReports:
    """The launcher's side. Without a writable folder for the file only the exit codes count."""

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
