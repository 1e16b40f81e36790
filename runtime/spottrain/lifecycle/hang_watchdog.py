"""Detects stalled training; logs one line and the stack of each thread of this process. It ends nothing.

A hung thread may hold the interpreter lock, which stops all Python code in the process. So a `faulthandler`
timer, which needs no lock, is postponed again and again. It writes the stacks to standard error if nobody
postpones it. The dump also contains step, state and limit: the watching thread waits in code that has them as
its file name.

    2026-11-21T12:03:04.123Z event=stalled step=120 state=Training idle=600.114 limit=600.000
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from spottrain.core import log
from spottrain.core.progress import ProgressBoard

LOOK_SECONDS: Final = 1.0
SLACK_SECONDS: Final = 2.0
"""Delay of the timer after the limit, so that this thread can report first, in better order."""
STDERR: Final = 2


class Dumps(Protocol):
    """The part of `faulthandler` that the watchdog needs."""

    def later(self, seconds: float) -> None:
        """Replaces an earlier request."""

    def never(self) -> None: ...
    def now(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Armed:
    """The timer: set for the silence since `last` under `limit`; expires at `at`."""

    last: float
    limit: float
    at: float


class HangWatchdog:
    """Reports each hang once. `clock`: that of the board's heartbeat.

    `look` runs periodically in the watching thread, and once when the first step is done.
    """

    def __init__(
        self, board: ProgressBoard, dumps: Dumps, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._board = board
        self._dumps = dumps
        self._clock = clock
        self._armed: _Armed | None = None
        self._reported: float | None = None
        """Heartbeat after which the silence was reported."""
        self._turn = threading.Lock()

    def look(self) -> None:
        with self._turn:
            self._look()

    def _look(self) -> None:
        heartbeat, facts, now = self._board.heartbeat, self._board.facts, self._clock()
        last, limit = heartbeat.last, heartbeat.limit(facts.state)
        if self._armed is not None and now >= self._armed.at:  # Python was blocked until now
            self._tell_late(self._armed, last, now)
            self._armed = None
        if limit is None:
            self._disarm()
        elif self._reported == last:
            return
        elif now - last >= limit:
            self._disarm()
            self._tell(last, now, limit)
            self._dumps.now()
        elif self._armed is None or (self._armed.last, self._armed.limit) != (last, limit):
            self._armed = _Armed(last=last, limit=limit, at=last + limit + SLACK_SECONDS)
            self._dumps.later(self._armed.at - now)

    def words(self) -> str:
        """Returns nearly the text of the log line, for a stack dump to which no line can be added."""
        facts = self._board.facts
        limit = self._board.heartbeat.allowed
        return f"watching for event=stalled: step={facts.step} state={facts.state} limit={limit:.3f}"

    def _tell_late(self, armed: _Armed, last: float, now: float) -> None:
        """Logs a stall whose stacks the timer has written. Training may have resumed, or hung again since."""
        if last > armed.at:
            self._tell(armed.last, last, armed.limit)
        elif now - last >= armed.limit:
            self._tell(last, now, armed.limit)

    def _tell(self, since: float, until: float, limit: float) -> None:
        self._reported = since
        facts = self._board.facts
        log.event(
            "stalled",
            step=facts.step,
            state=facts.state,
            idle=until - since,
            limit=limit,
            why="no step has finished; the stacks of this process are on standard error",
        )

    def _disarm(self) -> None:
        if self._armed is not None:
            self._armed = None
            self._dumps.never()


class Faulthandler:
    def later(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, file=STDERR)

    def never(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def now(self) -> None:
        """Writes through a file, so that lines of other threads do not come in between."""
        try:
            with tempfile.TemporaryFile() as file:
                faulthandler.dump_traceback(file)
                file.seek(0)
                text = file.read()
        except OSError:  # no writable folder
            return faulthandler.dump_traceback(STDERR)
        with contextlib.suppress(OSError):  # standard error is closed
            while text:
                text = text[os.write(STDERR, text) :]


def watch(board: ProgressBoard) -> None:
    """Starts the watchdog in a thread."""
    it = HangWatchdog(board, Faulthandler())
    board.heartbeat.on_begin = it.look  # the second step may already hang with the lock
    threading.Thread(target=_watch, args=[it], name="spottrain-stalled", daemon=True).start()


def _watch(it: HangWatchdog) -> None:
    while True:
        it.look()
        exec(compile("wait()", it.words(), "exec"), {"wait": _wait})


def _wait() -> None:
    time.sleep(LOOK_SECONDS)
