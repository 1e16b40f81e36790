"""Resumes Hugging Face's Trainer at its position in the data.

The Trainer works its position out of the number of steps and the length of the loader. A stream has no
length, and a callback may end an epoch early, so the epoch and its steps are kept in the checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import transformers
from torch.utils.data import DataLoader

from spottrain.core import log, patches
from spottrain.errors import ConfigurationError
from spottrain.integrations.generators import is_sized
from spottrain.integrations.pass_position import PassPosition

METHOD: Final = "_init_training_state"
"""Of the Trainer of transformers 5: returns the epoch, and its used batches."""
NO_SKIP: Final = (
    "TrainingArguments(ignore_data_skip=True) begins an epoch's data again after each interruption, so that "
    "some samples are trained on twice and others are left out; remove it"
)


class TrainerPosition(PassPosition):
    """The epoch, its finished steps, and the pass over the data. `follow` makes the Trainer resume there."""

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Any = None
        self._epoch = self._steps = self._steps_per_epoch = 0
        self._begun = False
        """Whether this attempt has begun an epoch."""
        self._sized = False
        """Whether the loader has a length."""
        self._saved: Mapping[str, Any] | None = None

    def follow(self, trainer: Any) -> None:
        """Makes the training that begins next resume at the position of the checkpoint, if there is one."""
        if not hasattr(type(trainer), METHOD):
            raise ConfigurationError(
                f"transformers {transformers.__version__} is too old for TransformersCallback: install 5.10 "
                "or newer"
            )
        self._trainer = trainer
        usual = functools.partial(getattr(type(trainer), METHOD), trainer)

        def place(max_steps: int, steps_per_epoch: int, *more: Any) -> tuple[int, int]:
            epoch, batches = usual(max_steps, steps_per_epoch, *more)
            accumulation = trainer.args.gradient_accumulation_steps
            if self._saved is not None and self._saved.get("steps_per_epoch") not in (None, steps_per_epoch):
                self._saved = None  # other batches, or another number of ranks: as the Trainer counts them
            if self._saved is not None and not trainer.args.ignore_data_skip:
                epoch, batches = self._saved["epoch"], self._saved["steps"] * accumulation
            self._epoch, self._steps, self._steps_per_epoch = epoch, batches // accumulation, steps_per_epoch
            self._begun = False  # it may begin again, with smaller batches
            return epoch, batches

        patches.replace(trainer, METHOD, place)

    def load(self, saved: Mapping[str, Any] | None) -> None:
        self._saved = saved

    def require_known(self, loader: Any, *, skips: bool) -> None:
        """Raises ConfigurationError for data that cannot be resumed. `skips`: unless ignore_data_skip."""
        if not skips:
            log.event("advice", about="resume", text=NO_SKIP)
        elif loader is not None and not isinstance(loader, DataLoader):
            raise ConfigurationError(
                f"the Trainer's loader is a {type(loader).__name__}, in which it cannot skip used batches, "
                "so no attempt could go on in the middle of an epoch: let get_train_dataloader() return a "
                "torch DataLoader"
            )

    def begin_epoch(self, loader: Any) -> None:
        saved = None
        if self._begun:
            self._epoch, self._steps = self._epoch + 1, 0
        elif self._saved is not None and not self._trainer.args.ignore_data_skip:
            saved = {**self._saved, "batches": self._used}
        self._begun, self._sized = True, is_sized(loader)
        self.expect(loader, first=self._epoch == 0, saved=saved)

    def step_over(self) -> None:
        self._steps += 1
        self.step_done(self._used)

    def state_after(self, *, epoch_stops: bool) -> dict[str, Any]:
        """Returns the position after the last step. `epoch_stops`: whether a callback has ended the epoch."""
        over = epoch_stops or self._steps >= self._steps_per_epoch
        return {
            **self.state(),
            "epoch": self._epoch + over,
            "steps": 0 if over else self._steps,
            "steps_per_epoch": self._steps_per_epoch if self._sized else None,
        }

    @property
    def _used(self) -> int:
        return self._steps * int(self._trainer.args.gradient_accumulation_steps)
