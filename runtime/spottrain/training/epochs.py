"""`LoopEpochs`: the epochs of a custom loop, as `Run.epochs` counts them."""

from __future__ import annotations

from typing import Any

from spottrain.core import device as devices
from spottrain.errors import ConfigurationError
from spottrain.training.position import LoopPosition

_TWO_PASSES = (
    "write `for each in run.epochs(2 * n)` and `epoch = each // 2` for two passes an epoch, or run.epochs(n, "
    "steps=...) and run.batches(loader)"
)


class LoopEpochs:
    """Counts epochs, and raises ConfigurationError where a resume would not find its place in one."""

    def __init__(self, data: LoopPosition) -> None:
        self._data = data
        self.counted = self.done = False
        """Whether the loop iterates over `Run.epochs`; whether it has done all of them."""
        self.number = self.began = 0
        """The present epoch, and the step at which it began."""
        self.steps: int | None = None
        """Steps per epoch, if an epoch is not a pass over the data."""
        self.position_read = False
        """Whether the loop has read how many steps of the epoch are done, or iterates over `Run.batches`."""
        self.skipped = False
        """Whether the loop itself has read it, to leave out what is done."""
        self.passes = 0
        """Passes over `Run.batches` that have ended in this epoch."""
        self.random: dict[str, Any] | None = None
        """Without `data`: the random state with which the epoch began."""
        self._step_random: dict[str, Any] | None = None
        """That of the last step, in a resumed epoch whose loop has not skipped yet what is done."""

    @property
    def _cursor(self) -> Any:
        """The position that must be in the present epoch, if one is known."""
        return None if self.steps is not None else self._data.cursor

    def full(self, step: int) -> bool:
        """Whether the present epoch has all of its `steps`."""
        return self.steps is not None and step - self.began >= self.steps

    def begin(self, step: int) -> None:
        self.passes = 0
        if self._cursor is not None:
            self._cursor.epoch_of_loop = self.number
        if self._data.given:
            return
        if step > self.began and self.random is not None:  # resumed within it
            self._step_random = devices.random_state()
            devices.set_random_state(self.random)
        else:
            self.random = devices.random_state()

    def read_position(self) -> None:
        """Restores the random state of the last step: the order of a resumed epoch is drawn by now."""
        self.position_read = True
        if self._step_random is not None:
            devices.set_random_state(self._step_random)
            self._step_random = None

    def end(self, step: int) -> None:
        """Moves on to the next epoch. Raises ConfigurationError if the loop has left this one early."""
        left, cursor = "", self._cursor
        if self.steps is not None:
            if step - self.began != self.steps:
                left = f"{step - self.began} of its {self.steps} steps"
        elif cursor is not None and not cursor.over:
            left = f"{cursor.position.sample} of its {cursor.plan.samples_per_epoch} samples"
        elif self._data.of_loader and not self.passes:
            left = f"{step - self.began} steps, before its pass over run.batches(loader) ended"
        if left:
            raise ConfigurationError(
                f"the loop over epoch {self.number} was left after {left}: an attempt that resumes at that "
                "step would do the rest of them. Iterate `for epoch in run.epochs(n, steps=...)` and `for "
                "batch in run.batches(loader)`, which ends each epoch after so many steps, without break"
            )
        if cursor is not None:
            cursor.begin_epoch()
        self.number, self.began = self.number + 1, step

    def end_all(self) -> None:
        self.done = True
        if self._cursor is not None:
            self._cursor.epoch_of_loop = None

    def require_enough(self, count: int, step: int, max_steps: int) -> None:
        """Raises ConfigurationError if all epochs have fewer than `max_steps` steps, as far as is known."""
        done, each, cursor = step - self.began, self.steps, self._cursor
        if cursor is not None:
            each = cursor.plan.steps_per_epoch
            done = min(each, -(-cursor.position.sample // cursor.plan.global_batch_size))
        if each is None:
            return
        last = step - done + (count - self.number) * each
        if last < max_steps:
            raise ConfigurationError(
                f"run.epochs({count}) ends at step {last}, before max_steps={max_steps}, so the training "
                "would be shorter than it is asked for: give more epochs, or a smaller max_steps "
                "(spec.training.maxSteps), or none"
            )

    def require_one_pass(self) -> None:
        """Raises ConfigurationError if `Run.batches` has made a pass over the loader in this epoch."""
        if self._data.of_loader and self.steps is None and self.passes:
            raise ConfigurationError(
                f"a second pass over run.batches(loader) begins within epoch {self.number} of "
                "run.epochs(...), so an attempt that resumes there would not know which one to go on with: "
                f"{_TWO_PASSES}"
            )

    def require_position(self, step: int) -> None:
        """Raises ConfigurationError if a step is done that a resume would not find again."""
        if self.steps is None:
            if not (self._data.given or self.position_read):
                raise ConfigurationError(
                    "Run has no data=, and the loop does not read run.epoch_step, so an attempt that resumes "
                    "in the middle of an epoch would repeat its beginning: give Run(data="
                    "spottrain.data.loader(...)), or skip what run.epoch_step optimizer steps have used, as "
                    "`for i in range(run.epoch_step, n)` does"
                )
        elif not self.position_read:
            raise ConfigurationError(
                "the loop neither iterates over run.batches(...) nor reads run.epoch_step, so an attempt "
                f"that resumes in the middle of an epoch would do all of its {self.steps} steps again: write "
                "`for batch in run.batches(loader)`, which ends with the epoch"
            )
        elif self.full(step):
            raise ConfigurationError(
                f"epoch {self.number} has its {self.steps} steps, and the loop goes on in it: write `for "
                "batch in run.batches(loader)`, which ends with the epoch"
            )
