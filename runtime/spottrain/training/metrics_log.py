"""Log lines of steps, and what they leave on the progress board and in the series."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from spottrain.core import garbage, log
from spottrain.core.series import Point
from spottrain.errors import TrainingFailed
from spottrain.lifecycle.series_writer import SeriesWriter
from spottrain.lifecycle.session import Session

LINE_SECONDS: Final = 5.0
"""Least time between two logged lines of steps, unless the script asks for a line of every step."""


class MetricsLog:
    """Logs a line every `log_every` steps, and puts its figures on the progress board.

    The loss stays on its device until it is logged: reading it makes the host wait for the device.
    """

    def __init__(
        self,
        session: Session,
        *,
        total_steps: int | None,
        log_every: int,
        on_line: Callable[[int, dict[str, float | None]], None],
        series: SeriesWriter | None = None,
    ) -> None:
        self._session, self._on_line, self._series = session, on_line, series
        self._total, self._every = total_steps, log_every
        self._logged = float("-inf")
        self._restored = time.time()
        self.began = False
        """Whether this attempt has done a step."""
        self.restart()

    def restart(self) -> None:
        """Excludes the time since the last line, which was not spent on steps."""
        self._since, self._samples, self._steps = time.perf_counter(), 0, 0

    def note(
        self,
        step: int,
        loss: Callable[[], float | None] | None,
        *,
        rate: float | None,
        samples: int,
        epoch: int | None,
    ) -> None:
        """Counts a step; see `Engine.count`."""
        self._samples += samples
        self._steps += 1
        due = not self.began or step % self._every == 0 or step == self._total
        if loss is not None and due:
            self.line(step, loss(), rate=rate, epoch=epoch)
        if not self.began:
            self.began, now = True, time.time()
            garbage.collect_as_usual()
            seconds, startup = now - self._restored, now - self._session.born
            self._session.board.update(first_step_seconds=seconds, startup_seconds=startup)
            log.event("first-step", step=step, seconds=seconds, startup=startup)

    def line(self, step: int, loss: float | None, *, rate: float | None, epoch: int | None) -> None:
        """Logs the steps since the last line. Raises TrainingFailed if the loss is NaN or infinite."""
        if loss is not None:
            require_finite(loss, step)
        seconds = max(time.perf_counter() - self._since, 1e-9)
        speed = self._samples / seconds if self._samples else None
        self._on_line(step, {"loss": loss, "lr": rate, "samples_per_second": speed})
        self._session.board.update(
            loss=loss, samples_per_second=speed, steps_per_second=self._steps / seconds
        )
        if self._session.world.first and self._wanted(step):
            eta = None if step == self._total else self._session.board.facts.eta_seconds
            log.step(
                step,
                self._total,
                loss=loss,
                lr=rate,
                samples_per_second=speed,
                epoch=epoch,
                eta_seconds=eta,
            )
        if self._series is not None:
            self._series.add(self._point(step, loss, rate, seconds))
        self.restart()

    def _point(self, step: int, loss: float | None, rate: float | None, seconds: float) -> Point:
        facts = self._session.board.facts
        return Point(
            step=step,
            time=time.time(),
            loss=loss,
            steps=self._steps,
            seconds=seconds,
            samples=self._samples,
            learningRate=rate,
            mfu=facts.mfu,
            gpuUtilisation=facts.gpu_utilisation,
            gpuMemory=facts.gpu_memory,
        )

    def _wanted(self, step: int) -> bool:
        """Whether to log the line: short steps would fill the log. A script that wants every step gets it."""
        now = time.monotonic()
        soon = now - self._logged < LINE_SECONDS
        if soon and self._every > 1 and step != self._total:
            return False
        self._logged = now
        return True


def require_finite(loss: float, step: int) -> None:
    """Raises TrainingFailed if the loss is NaN or infinite: the state after it is not worth saving."""
    if not math.isfinite(loss):
        raise TrainingFailed(
            f"the loss is {loss} at step {step}; nothing was saved since. Lower the learning rate, clip the "
            "gradients (clipGradNorm), use bf16 instead of fp16, or look at the samples of this step; the "
            "checkpoints before it are whole"
        )
