"""Tells when the training gets on no more: one line, and where each thread of this process is. Ends nothing.

Started by `session` in every rank. A hung thread may hold the interpreter lock, and then no Python runs here
any more; so a timer of `faulthandler`, which needs no lock, is set to a little later each time, and writes
the stacks to standard error when nobody has put it off. Step, state and limit are in that dump as well: the
watching thread waits in code that has them as its file name.

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
from spottrain.core.progress import Board

LOOK_SECONDS: Final = 1.0
SLACK_SECONDS: Final = 2.0
"""That the timer comes after the limit: until then this thread may say it in better order."""
STDERR: Final = 2


class Dumps(Protocol):
    """What is needed of `faulthandler`."""

    def later(self, seconds: float) -> None:
        """In place of what was asked for before."""

    def never(self) -> None: ...
    def now(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Armed:
    """The timer: set for the silence since `last`, under `limit`; goes off at `at`."""

    last: float
    limit: float
    at: float


class HangWatchdog:
    """`clock`: that of the board's pulse. `look` is called again and again, by the thread that watches and
    when the first step is done, and tells each hang once."""

    def __init__(self, board: Board, dumps: Dumps, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._dumps = dumps
        self._clock = clock
        self._armed: _Armed | None = None
        self._told: float | None = None
        """Sign of life after which the silence was told."""
        self._turn = threading.Lock()

    def look(self) -> None:
        with self._turn:
            self._look()

    def _look(self) -> None:
        pulse, facts, now = self._board.pulse, self._board.facts, self._clock()
        last, limit = pulse.last, pulse.limit(facts.state)
        if self._armed is not None and now >= self._armed.at:  # nobody could look until now, but the timer
            self._tell_late(self._armed, last, now)
            self._armed = None
        if limit is None:
            self._disarm()
        elif self._told == last:
            return
        elif now - last >= limit:
            self._disarm()
            self._tell(last, now, limit)
            self._dumps.now()
        elif self._armed is None or (self._armed.last, self._armed.limit) != (last, limit):
            self._armed = _Armed(last=last, limit=limit, at=last + limit + SLACK_SECONDS)
            self._dumps.later(self._armed.at - now)

    def words(self) -> str:
        """For a dump that nobody can write a line to, nearly what the line would say."""
        facts = self._board.facts
        limit = self._board.pulse.allowed
        return f"watching for event=stalled: step={facts.step} state={facts.state} limit={limit:.3f}"

    def _tell_late(self, armed: _Armed, last: float, now: float) -> None:
        """The stacks are told already. It may have gone on since, or hang with signs that nobody saw come."""
        if last > armed.at:
            self._tell(armed.last, last, armed.limit)
        elif now - last >= armed.limit:
            self._tell(last, now, armed.limit)

    def _tell(self, since: float, until: float, limit: float) -> None:
        self._told = since
        facts = self._board.facts
        log.event(
            "stalled",
            step=facts.step,
            state=facts.state,
            idle=until - since,
            limit=limit,
            why="the training does not get on; the stacks of this process are on standard error",
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
        """By way of a file, so that the lines of other threads do not come between."""
        try:
            with tempfile.TemporaryFile() as file:
                faulthandler.dump_traceback(file)
                file.seek(0)
                text = file.read()
        except OSError:  # no folder that can be written
            return faulthandler.dump_traceback(STDERR)
        with contextlib.suppress(OSError):  # nobody reads any more
            while text:
                text = text[os.write(STDERR, text) :]


def watch(board: Board) -> None:
    """From now on, in a thread."""
    it = HangWatchdog(board, Faulthandler())
    board.pulse.on_begin = it.look  # the next look may be too late: the second step may hang with the lock
    threading.Thread(target=_watch, args=[it], name="spottrain-stalled", daemon=True).start()


def _watch(it: HangWatchdog) -> None:
    while True:
        it.look()
        exec(compile("wait()", it.words(), "exec"), {"wait": _wait})


def _wait() -> None:
    time.sleep(LOOK_SECONDS)
