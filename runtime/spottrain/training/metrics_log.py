"""`MetricsLog`: logs a line every `log_every` steps, and updates the progress board at every step.

The loss stays on its device until it is logged: reading it makes the host wait for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from spottrain.core import log
from spottrain.core.progress import ProgressBoard
from spottrain.distributed.world import World
from spottrain.errors import TrainingFailed


class MetricsLog:
    """`born`: start of the process in Unix seconds. `on_line`: called with step and figures of each line."""

    def __init__(
        self,
        board: ProgressBoard,
        *,
        born: float,
        total_steps: int | None,
        log_every: int,
        world: World,
        on_line: Callable[[int, dict[str, float | None]], None] = lambda step, values: None,
    ) -> None:
        self._board = board
        self._world = world
        self._born = born
        self._total = total_steps
        self._every = log_every
        self._on_line = on_line
        self._restored = time.time()
        self._first = True
        self._since = time.perf_counter()
        self._samples = 0
        self._steps = 0

    @property
    def began(self) -> bool:
        """Whether this attempt has done a step."""
        return not self._first

    def restart(self) -> None:
        """Excludes the time since the last line, which was not spent on steps."""
        self._since, self._samples, self._steps = time.perf_counter(), 0, 0

    def note(
        self,
        step: int,
        loss: Callable[[], float | None] | None,
        *,
        rate: float | None = None,
        samples: int = 0,
        epoch: int | None = None,
    ) -> None:
        """Counts a step. `loss` is called only if a line is due; None: no line. 0 samples: unknown."""
        self._samples += samples
        self._steps += 1
        due = self._first or step % self._every == 0 or step == self._total
        if loss is not None and due:
            self.line(step, loss(), rate=rate, epoch=epoch)
        self._update_board(step)

    def _update_board(self, step: int) -> None:
        if self._first:
            self._first = False
            now = time.time()
            self._board.update(first_step_seconds=now - self._restored, startup_seconds=now - self._born)
            log.event("first-step", step=step, seconds=now - self._restored, startup=now - self._born)
        self._board.stepped(step)

    def line(self, step: int, loss: float | None, *, rate: float | None, epoch: int | None) -> None:
        """Logs the steps since the last line. Raises TrainingFailed if the loss is NaN or infinite."""
        if loss is not None:
            require_finite(loss, step)
        seconds = max(time.perf_counter() - self._since, 1e-9)
        speed = self._samples / seconds if self._samples else None
        self._on_line(step, {"loss": loss, "lr": rate, "samples_per_second": speed})
        self._board.update(loss=loss, samples_per_second=speed, steps_per_second=self._steps / seconds)
        if self._world.first:
            log.step(step, self._total, loss=loss, lr=rate, samples_per_second=speed, epoch=epoch)
        self.restart()


def require_finite(loss: float, step: int) -> None:
    """Raises TrainingFailed if the loss is NaN or infinite: the state after it is not worth saving."""
    if not math.isfinite(loss):
        raise TrainingFailed(
            f"the loss is {loss} at step {step}; nothing was saved since. Lower the learning rate, clip the "
            "gradients (clipGradNorm), use bf16 instead of fp16, or look at the samples of this step; the "
            "checkpoints before it are whole"
        )
