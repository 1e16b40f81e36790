"""Detects stalled training; logs one line and the stack of each thread of this process. It ends nothing.

A hung thread may hold the interpreter lock, which stops all Python code in the process. So a `faulthandler`
timer, which needs no lock, is postponed again and again. It writes the stacks to standard error if nobody
postpones it; the line follows when Python runs again.

    2026-11-21T12:03:04.123Z event=stalled step=120 state=Training idle=600.114 limit=600.000
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from spottrain.core import log
from spottrain.core.progress import ProgressBoard

LOOK_SECONDS: Final = 1.0
SLACK_SECONDS: Final = 2.0
"""Delay of the timer after the limit, so that this thread can report first."""
STDERR: Final = 2


class HangWatchdog:
    """Reports each hang once. `clock`: that of the board's heartbeat. `timer`: faulthandler."""

    def __init__(
        self, board: ProgressBoard, timer: Any = faulthandler, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._board, self._timer, self._clock = board, timer, clock
        self._armed: tuple[float, float] | None = None
        """Heartbeat and limit for which the timer is set."""
        self._reported: float | None = None
        """Heartbeat after which the silence was reported."""

    def look(self) -> None:
        """Reports a hang, or postpones the timer."""
        heartbeat, now = self._board.heartbeat, self._clock()
        last, limit = heartbeat.last, heartbeat.limit(self._board.facts.state)
        since, allowed = self._armed or (now, 0.0)
        expired = since + allowed + SLACK_SECONDS
        if now >= expired:  # Python was blocked until now; the timer has written the stacks
            self._armed = None
            if last > expired:
                self._report(since, last, allowed)
            elif now - last >= allowed:
                self._report(last, now, allowed)
        if limit is None or now - last >= limit:
            if self._armed is not None:
                self._armed = None
                self._timer.cancel_dump_traceback_later()
            if limit is not None and self._reported != last:
                self._report(last, now, limit)
                self._timer.dump_traceback(file=STDERR)
        elif self._armed != (last, limit):
            self._armed = (last, limit)
            self._timer.dump_traceback_later(last + limit + SLACK_SECONDS - now, file=STDERR)

    def _report(self, since: float, until: float, limit: float) -> None:
        self._reported = since
        log.event(
            "stalled",
            step=self._board.facts.step,
            state=self._board.facts.state,
            idle=until - since,
            limit=limit,
            why="no step has finished; the stacks of this process are on standard error",
        )


def watch(board: ProgressBoard) -> None:
    """Starts the watchdog in a thread."""
    watchdog = HangWatchdog(board)

    def look() -> None:
        while True:
            watchdog.look()
            time.sleep(LOOK_SECONDS)

    threading.Thread(target=look, name="spottrain-stalled", daemon=True).start()
