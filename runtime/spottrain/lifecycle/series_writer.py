"""Writes the series of steps of this attempt (`core.series`) beside its checkpoints, on rank 0.

    add, at each log line -> save, after each commit -> close, at the end

Its thread replaces one small object each time. The training waits for it nowhere but at its very end, when
the checkpoint is durable and HEAD is released. The object's key has this claim's term: a process that is
superseded meanwhile writes only its own. An error is logged once, and the next save tries again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from spottrain.contract import Outcome, series_key
from spottrain.core import log
from spottrain.core.series import Attempt, Point, Series, SeriesBuilder
from spottrain.lifecycle.session import Session
from spottrain.storage.base import Store

LAST_SECONDS: Final = 5.0
"""Longest wait of `close`."""
SPARE_SECONDS: Final = 1.0
"""Rest of a notice that `close` leaves to the process."""


class SeriesWriter:
    """The series of one claim. `attempt` returns what is known of the attempt now, without its outcome."""

    def __init__(self, store: Store, term: int, attempt: Callable[[Outcome | None], Attempt]) -> None:
        self._store, self._key, self._attempt = store, series_key(term), attempt
        self._builder, self._lock = SeriesBuilder(), threading.Lock()
        self._due, self._written = threading.Event(), threading.Event()
        self._outcome: Outcome | None = None
        self._closing = self._failed = False
        # Started here: at the interpreter's exit, where `close` may be called, no thread can start.
        self._thread = threading.Thread(target=self._work, name="spottrain-series", daemon=True)
        self._thread.start()

    def add(self, point: Point) -> None:
        with self._lock:
            self._builder.add(point)

    def save(self) -> None:
        """Has the series written soon, and returns at once."""
        self._due.set()

    def close(self, outcome: Outcome, within: float) -> None:
        """Writes it for the last time. `within`: seconds left. Further calls do nothing."""
        if self._closing:
            return
        self._outcome, self._closing = outcome, True
        self._due.set()
        self._written.wait(min(LAST_SECONDS, max(within - SPARE_SECONDS, 0.0)))

    def _work(self) -> None:
        closing = False
        while not closing:
            self._due.wait()
            self._due.clear()
            closing = self._closing  # before the write, which then has all
            try:
                self._write()
            except Exception as error:  # a chart is no reason to end a training
                self._note(error)
        self._written.set()

    def _write(self) -> None:
        with self._lock:
            points = self._builder.points()
        if points and self._outcome is not Outcome.SUPERSEDED:
            self._store.put(self._key, Series(attempt=self._attempt(self._outcome), points=points).to_bytes())

    def _note(self, error: Exception) -> None:
        if not self._failed:
            why = f"{type(error).__name__}: {error}"
            log.unhindered("series-not-written", why=why, then="training goes on; spottrain report lacks it")
        self._failed = True


def attempt_of(session: Session, term: int, outcome: Outcome | None) -> Attempt:
    """Returns what the series of steps says of this attempt."""
    facts = session.board.facts
    return Attempt(
        term=term,
        job=session.run.job,
        jobUID=session.run.job_uid,
        number=session.attempt,
        bornTime=session.born,
        writtenTime=time.time(),
        startStep=facts.start_step or 0,
        totalSteps=facts.total_steps,
        step=facts.step,
        durableStep=facts.durable_step,
        outcome=outcome or "",
        diagnosis=facts.diagnosis,
        timeSplit=session.board.time_split,
    )
