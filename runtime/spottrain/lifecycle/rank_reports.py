"""What ranks report to their launcher, through a file: their outcome, or a request to restart all ranks.

The interpreter needs seconds to shut torch down. A signal or a crash in these seconds does not change an
outcome that was reported.

A rank requests a restart if it leaves because the next start will do better, such as after running out of
memory. Its peers wait in a collective that it cannot join any more, and no process group survives that. It
works only if one pod holds all ranks; with several pods, the operator's next attempt restarts all. See
docs/adr/0010-out-of-memory.md.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from typing import Final

from spottrain.contract import AGAIN_FILE, OUTCOMES_FILE, Outcome
from spottrain.core import log

AGAIN: Final = "again"


class RankReports:
    """The launcher's side. `restarts`: whether its ranks can be restarted.

    Without a writable folder for the file there are no reports, and only the exit codes count.
    """

    def __init__(self, *, restarts: bool) -> None:
        self._file, self._owner = -1, os.getpid()
        self.env: dict[str, str] = {}
        """Environment variables for the ranks."""
        try:
            self._file, path = tempfile.mkstemp(prefix="spottrain-ranks-")
        except OSError as error:
            log.event("outcome-not-recorded", why=error)
            return
        self.env = {OUTCOMES_FILE: path} | ({AGAIN_FILE: path} if restarts else {})

    def _lines(self) -> list[str]:
        if self._file < 0:
            return []
        return os.pread(self._file, 2**16, 0).decode(errors="replace").splitlines()

    def outcome_of(self, pid: int) -> Outcome | None:
        """Returns the outcome of the rank with this process ID; None if it has reported none."""
        lines = self._lines()
        return next((outcome for outcome in Outcome if f"{pid} {outcome}" in lines), None)

    @property
    def restart_requested(self) -> bool:
        return AGAIN in self._lines()

    def clear(self) -> None:
        """Forgets the reports of an earlier round."""
        if self._file >= 0:
            os.ftruncate(self._file, 0)

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
            _append(path, f"{os.getpid()} {outcome}")
        except OSError as error:
            log.event("outcome-not-recorded", path=path, error=str(error))


def request_restart(env: Mapping[str, str]) -> bool:
    """Requests a restart, just before this rank ends. Returns False if there will be no automatic restart."""
    path = env.get(AGAIN_FILE)
    if not path:
        return False
    try:
        _append(path, AGAIN)
    except OSError as error:
        log.event("cannot-restart", why=error)
        return False
    return True


def _append(path: str, line: str) -> None:
    with open(path, "a") as file:
        file.write(f"{line}\n")
