"""Tells how the training goes: a line per `log_every` steps on stdout, and the board at every step.

Called by `trainer` after each optimizer step. The loss stays on its device until it is logged: reading it
makes the host wait for the device.
"""

from __future__ import annotations

import time

import torch

from spottrain import log
from spottrain.data import Step
from spottrain.progress import Board


class Meter:
    """`born`: Unix seconds at which the process started."""

    def __init__(self, board: Board, *, born: float, total_steps: int, log_every: int) -> None:
        self._board = board
        self._born = born
        self._total = total_steps
        self._every = log_every
        self._restored = time.time()
        self._first = True
        self._since = time.perf_counter()
        self._samples = 0
        self._steps = 0

    @property
    def began(self) -> bool:
        """Whether a step was done."""
        return not self._first

    def restart(self) -> None:
        """Forgets the time since the last line: it went into something other than steps."""
        self._since, self._samples, self._steps = time.perf_counter(), 0, 0

    def tell(self, step: int, plan: Step, loss: torch.Tensor, rate: float) -> None:
        """`step`: number of steps done, this one included."""
        self._samples += plan.samples
        self._steps += 1
        if self._first or step % self._every == 0 or step == self._total:
            value = loss.item()  # waits for the device, so what follows measures work and not queueing
            seconds = max(time.perf_counter() - self._since, 1e-9)
            speed = self._samples / seconds
            self._board.update(loss=value, samples_per_second=speed, steps_per_second=self._steps / seconds)
            log.line(
                f"step={step}/{self._total}",
                loss=f"{value:.9g}",  # nine digits tell any two fp32 numbers apart
                lr=f"{rate:.6g}",
                **{"samples/s": f"{speed:.1f}"},
                epoch=plan.epoch,
            )
            self.restart()
        if self._first:
            self._first = False
            now = time.time()
            self._board.update(first_step_seconds=now - self._restored, startup_seconds=now - self._born)
            log.event("first-step", step=step, seconds=now - self._restored, startup=now - self._born)
        self._board.update(step=step, state="Training")
