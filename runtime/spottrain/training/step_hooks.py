"""`StepHooks`: what a script adds to the optimizer step of a `Trainer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepHooks:
    """Functions that `Trainer` calls in each optimizer step, on all ranks, with the steps done before it.

    What they change must be a part of the model, of `extra` or of the optimizer: only that is saved. A step
    that a stop cuts short is made again by the next attempt, and so are its calls.

    Attributes:
        before: called once the first micro-batch is there, before its forward pass.
        gradients: called after the last backward pass, to change the gradients in place: they are averaged
            over ranks, have no loss scale, and are not clipped yet. In fp16 they may be NaN or infinite;
            then the step changes nothing.
        after: called after the optimizer step, before an evaluation, a save or a stop.
    """

    before: Callable[[int], None] | None = None
    gradients: Callable[[int], None] | None = None
    after: Callable[[int], None] | None = None
