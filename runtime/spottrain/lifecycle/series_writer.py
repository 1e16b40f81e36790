"""Writes the series of steps of this attempt (`core.series`) beside its checkpoints, on rank 0.

    add, at each log line -> save, after each commit -> close, at the end

Its thread replaces one small object each time. The training waits for it nowhere but at its very end, when
the checkpoint is durable and HEAD is released. The object's key has this claim's term: a process that is
superseded meanwhile writes only its own. An error is logged once, and the next save tries again.
"""

from __future__ import annotations

import threading
import time
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
    """The series of the claim with this term."""

    def __init__(self, session: Session, store: Store, term: int) -> None:
        self._session, self._store, self._term = session, store, term
        self._builder, self._lock = SeriesBuilder(), threading.Lock()
        self._due = threading.Event()
        self._outcome: Outcome | None = None
        self._failed = False
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
        if self._outcome is None:
            self._outcome = outcome
            self._due.set()
            self._thread.join(min(LAST_SECONDS, max(within - SPARE_SECONDS, 0.0)))

    def _work(self) -> None:
        outcome = None
        while outcome is None:
            self._due.wait()
            self._due.clear()
            outcome = self._outcome  # before the write, which then has all
            with self._lock:
                points = self._builder.points()
            if not points or outcome is Outcome.SUPERSEDED:
                continue
            try:
                series = Series(attempt=self._attempt(outcome), points=points)
                self._store.put(series_key(self._term), series.to_bytes())
            except Exception as error:  # a chart is no reason to end a training
                if not self._failed:
                    why, then = (
                        f"{type(error).__name__}: {error}",
                        "training goes on; spottrain report lacks it",
                    )
                    log.unhindered("series-not-written", why=why, then=then)
                self._failed = True

    def _attempt(self, outcome: Outcome | None) -> Attempt:
        session = self._session
        facts = session.board.facts
        return Attempt(
            term=self._term,
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
