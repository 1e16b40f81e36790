"""`LoopEpochs`: the epochs of a custom loop, as `Run.epochs` counts them."""

from __future__ import annotations

from typing import Any

from spottrain.core import device as devices
from spottrain.errors import ConfigurationError
from spottrain.training.position import DrawnBy, LoopPosition


class LoopEpochs:
    """Counts epochs, and raises ConfigurationError where a resume would not find its place."""

    def __init__(self, position: LoopPosition) -> None:
        self._position = position
        self.count: int | None = None
        """Epochs of the whole training; None: the loop does not iterate over `Run.epochs`."""
        self.steps: int | None = None
        """Steps per epoch, if an epoch is not a pass over the data."""
        self.passed = False
        """Whether a pass over `Run.batches` has ended in this epoch."""
        self._position_read = False
        """Whether the loop has read how many steps of the epoch are done, or iterates over `Run.batches`."""
        self._step_random: dict[str, Any] | None = None
        """Random state of the last step, in a resumed epoch whose loop has not skipped yet what is done."""

    @property
    def counted(self) -> bool:
        return self.count is not None

    @property
    def done(self) -> bool:
        """Whether all of them are done."""
        return self.count is not None and self._position.epoch >= self.count

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the present epoch."""
        return self._position.step - self._position.epoch_began

    @property
    def full(self) -> bool:
        """Whether the present epoch has all of its `steps`."""
        return self.steps is not None and self.steps_done >= self.steps

    @property
    def _cursor(self) -> Any:
        """The position that must be in the present epoch, if one is known."""
        return None if self.steps is not None else self._position.cursor

    def begin(self) -> None:
        position = self._position
        self.passed = False
        if self._cursor is not None:
            self._cursor.epoch_of_loop = position.epoch
        if position.given:
            return
        if self.steps_done and position.epoch_random is not None:  # resumed within it
            self._step_random = devices.random_state()
            devices.set_random_state(position.epoch_random)
        else:
            position.epoch_random = devices.random_state()

    def read_position(self) -> None:
        """Restores the random state of the last step: the order of a resumed epoch is drawn by now."""
        self._position_read = True
        if self._step_random is not None:
            devices.set_random_state(self._step_random)
            self._step_random = None

    def end(self) -> None:
        """Moves on to the next epoch. Raises ConfigurationError if the loop has left this one early."""
        position, left, cursor = self._position, "", self._cursor
        if self.steps is not None:
            if self.steps_done != self.steps:
                left = f"{self.steps_done} of its {self.steps} steps"
        elif cursor is not None and not cursor.over:
            left = f"{cursor.position.sample} of its {cursor.plan.samples_per_epoch} samples"
        elif position.of_loader and not self.passed:
            left = f"{self.steps_done} steps, before its pass over run.batches(loader) ended"
        if left:
            raise ConfigurationError(
                f"the loop over epoch {position.epoch} was left after {left}: an attempt that resumes at "
                "that step would do the rest of them. Iterate `for epoch in run.epochs(n, steps=...)` and "
                "`for batch in run.batches(loader)`, which ends each epoch after so many steps, without break"
            )
        if cursor is not None:
            cursor.begin_epoch()
        position.epoch, position.epoch_began = position.epoch + 1, position.step

    def end_all(self) -> None:
        if self._cursor is not None:
            self._cursor.epoch_of_loop = None

    def require_enough(self, max_steps: int | None) -> None:
        """Raises ConfigurationError if all epochs have fewer than `max_steps` steps, as far as is known."""
        assert self.count is not None
        done, each, cursor = self.steps_done, self.steps, self._cursor
        if cursor is not None:
            each = cursor.plan.steps_per_epoch
            done = min(each, -(-cursor.position.sample // cursor.plan.global_batch_size))
        if max_steps is None or each is None:
            return
        last = self._position.step - done + (self.count - self._position.epoch) * each
        if last < max_steps:
            raise ConfigurationError(
                f"run.epochs({self.count}) ends at step {last}, before max_steps={max_steps}, so the "
                "training would be shorter than it is asked for: give more epochs, or a smaller max_steps "
                "(spec.training.maxSteps), or none"
            )

    def begin_batches(self) -> None:
        """Raises ConfigurationError if `Run.batches` has made a pass over the loader in this epoch."""
        self.read_position()
        if self._position.of_loader and self.steps is None and self.passed:
            raise ConfigurationError(
                f"a second pass over run.batches(loader) begins within epoch {self._position.epoch} of "
                "run.epochs(...), so an attempt that resumes there would not know which one to go on with: "
                "write `for each in run.epochs(2 * n)` and `epoch = each // 2` for two passes an epoch, or "
                "run.epochs(n, steps=...) and run.batches(loader)"
            )

    def require_position(self, max_steps: int | None) -> None:
        """Raises ConfigurationError for a loop whose position is not what the Run counts.

        After an interruption it would train other samples, or another number of steps. Raised at its first
        step, or in its second pass.
        """
        position = self._position
        if self.counted:
            self._require_position_in_epoch()
        elif max_steps is None and position.counts_epochs:
            raise ConfigurationError(
                "the loop counts its epochs by itself, as range(run.epoch, n) does, so how many passes it "
                "makes in each is not known: iterate `for epoch in run.epochs(n)`"
            )
        elif max_steps is None and not position.reads and (not position.given or position.epoch_of_data):
            raise ConfigurationError(
                "the loop does not read its position from the Run, so after an interruption it would "
                "start at step 0 again: iterate `for epoch in run.epochs(n)`, or until run.global_step "
                "is what you want, or give Run(max_steps=...)"
            )
        if position.of_loader and position.drawn_by is DrawnBy.SCRIPT:
            raise ConfigurationError(
                "the loop does not iterate over run.batches(...), so the Run does not know the passes over "
                "the loader that is given as data=, and a resume would draw other random numbers: write `for "
                "batch in run.batches(loader)`"
            )

    def _require_position_in_epoch(self) -> None:
        if self.steps is None:
            if not (self._position.given or self._position_read):
                raise ConfigurationError(
                    "Run has no data=, and the loop does not read run.epoch_step, so an attempt that resumes "
                    "in the middle of an epoch would repeat its beginning: give Run(data="
                    "spottrain.data.loader(...)), or skip what run.epoch_step optimizer steps have used, as "
                    "`for i in range(run.epoch_step, n)` does"
                )
        elif not self._position_read:
            raise ConfigurationError(
                "the loop neither iterates over run.batches(...) nor reads run.epoch_step, so an attempt "
                f"that resumes in the middle of an epoch would do all of its {self.steps} steps again: write "
                "`for batch in run.batches(loader)`, which ends with the epoch"
            )
        elif self.full:
            raise ConfigurationError(
                f"epoch {self._position.epoch} has its {self.steps} steps, and the loop goes on in it: write "
                "`for batch in run.batches(loader)`, which ends with the epoch"
            )
