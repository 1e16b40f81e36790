"""`AccelerateRun`: `spottrain.Run` for a loop around Hugging Face's Accelerator:

    run = AccelerateRun(accelerator, data=loader, max_steps=1000)   # after accelerator.prepare(...)
    for batch in run.batches(loader):
        ...
        run.step_completed(loss=loss)
    run.finish()

It is a Run of what the Accelerator holds, and knows the position in a loader that Accelerate has prepared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from accelerate import Accelerator, DistributedType

from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.integrations.pass_position import PassPosition
from spottrain.lifecycle.session import Session
from spottrain.training.position import LoopPosition
from spottrain.training.run import Run

FLAT: Final = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""They keep weights and optimizer state in parts of a form of their own."""


class AccelerateRun(Run):
    """Saves and restores a training loop around an Accelerator.

    The constructor claims the checkpoint URI. It restores what `accelerator.prepare` was given, and what was
    registered for checkpointing.

    Args:
        accelerator: create the Run after `accelerator.prepare(...)`.
        data: an unprepared `spottrain.data.loader`, or another object that `spottrain.Run` accepts. Leave
            it out for a loader that Accelerate has prepared, and iterate over `run.batches(loader)`.
        max_steps: optimizer steps of the whole training; None: until `finish`. spec.training.maxSteps wins.
        log_every: steps between two log lines, at least 1.
        session: the process's own session by default.

    Raises:
        RunError: an argument cannot be saved, the checkpoint does not match, or the store fails.
    """

    _position: AcceleratePosition
    _give_scheduler = "accelerator.prepare(model, optimizer, scheduler)"

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        data: Any = None,
        max_steps: int | None = None,
        log_every: int = 10,
        session: Session | None = None,
    ) -> None:
        _require_savable(accelerator, data)
        self._accelerator = accelerator
        self._held = _held(accelerator)
        super().__init__(
            model=_only_or_named(accelerator._models),
            optimizer=_only_or_named(accelerator._optimizers),
            scheduler=_only_or_named([each.scheduler for each in accelerator._schedulers]) or None,
            scaler=accelerator.scaler,
            data=data,
            extra=_named(accelerator._custom_objects),
            max_steps=max_steps,
            log_every=log_every,
            session=session,
        )

    def step_completed(self, loss: torch.Tensor | float | None = None, *, samples: int | None = None) -> bool:
        """See `Run.step_completed`. The position in a prepared loader must be known."""
        self._require_same()
        self._position.require_known_pass()
        return super().step_completed(loss, samples=samples)

    def _require_same(self) -> None:
        """Raises ConfigurationError if the Accelerator holds more than when the run was made."""
        if _held(self._accelerator) != self._held:
            raise ConfigurationError(
                "accelerator.prepare or register_for_checkpointing was called after AccelerateRun(...), and "
                "what it added would not be saved: create the run after it"
            )

    def _position_in(self, data: Any) -> LoopPosition:
        return AcceleratePosition(self._accelerator, data, self.session.world)


class AcceleratePosition(LoopPosition):
    """Knows the position in a loader that Accelerate has prepared, too."""

    def __init__(self, accelerator: Accelerator, given: Any, world: World) -> None:
        super().__init__(given, world, others=None)  # it need not be one of `spottrain.data`
        self._accelerator = accelerator
        self._micro_batches = accelerator.step
        """Accelerate's counter of micro-batches, after the last optimizer step."""
        self._in_pass = PassPosition()
        self.loader: Any = None
        """The prepared loader that `Run.batches` iterates over."""
        self._number, self._used = -1, 0
        """Number of the present pass over it, and the batches that it has given."""
        self._saved_pass: Mapping[str, Any] | None = None
        """The position in it in the checkpoint."""

    def require_known_pass(self) -> None:
        """Raises ConfigurationError if the loop is in a pass over a prepared loader that is not ours."""
        if self.given or self.loader is not None or not self._accelerator.gradient_state.in_dataloader:
            return
        raise ConfigurationError(
            "the loop iterates over a loader that Accelerate has prepared, and AccelerateRun does not see "
            "its position, so after an interruption it would get other samples: write `for batch in "
            "run.batches(loader)`, without accelerator.skip_first_batches, which it calls itself"
        )

    def begin_pass(self, loader: Iterable[Any]) -> Iterator[Any]:
        if not any(loader is each for each in self._accelerator._dataloaders):
            return super().begin_pass(loader)
        if self.given:
            raise ConfigurationError(
                "AccelerateRun(data=...) was given, and run.batches(loader) is over another loader, which "
                "Accelerate has prepared: leave data out"
            )
        if self.loader is not None and self.loader is not loader:
            raise ConfigurationError(
                "run.batches(...) was called with a second prepared loader: it knows the position in one. "
                "Iterate over a loader for evaluation directly"
            )
        if getattr(loader, "use_stateful_dataloader", False):
            raise ConfigurationError(
                "DataLoaderConfiguration(use_stateful_dataloader=True) keeps a position of its own, beside "
                "that of run.batches(loader): leave it out"
            )
        self.loader, self.first_pass_after_resume = loader, False
        return self._prepared_pass(loader)

    def _prepared_pass(self, loader: Any) -> Iterator[Any]:
        """Yields the batches of a pass, or those that are left of it after a resume."""
        saved, self._saved_pass = self._saved_pass, None
        if saved is not None and saved["epoch"] != self.epoch:  # left at its epoch's end
            saved = {**saved, "batches": 0, "number": saved["number"] + 1}
        self._number = self._number + 1 if saved is None else saved["number"]
        self._used = 0 if saved is None else saved["batches"]
        loader.iteration = self._number  # which a seedable sampler makes its order of
        source = self._accelerator.skip_first_batches(loader, self._used) if self._used else loader
        self._in_pass.expect(loader, first=not self._number, saved=saved)
        for batch in source:
            self._in_pass.go_on()
            self._used += 1
            yield batch
        self._in_pass.go_on()

    def advance(self) -> None:
        self._micro_batches = self._accelerator.step
        self._in_pass.step_done(self._used)
        super().advance()

    @property
    def is_cheap(self) -> bool:  # another thread would have to save random states of a prepared loader too
        return super().is_cheap and self.loader is None

    def own(self) -> dict[str, Any]:
        position = self._saved_pass
        if self.loader is not None:
            position = {**self._in_pass.state(), "number": self._number, "epoch": self.epoch}
        return super().own() | {"pass": position, "micro_batches": self._micro_batches}

    def load(self, saved: Mapping[str, Any], own: Mapping[str, Any], new_rank: bool) -> str | None:
        self._saved_pass, self._micro_batches = own.get("pass"), own.get("micro_batches", 0)
        self._accelerator.step = self._micro_batches
        return super().load(saved, own, new_rank)


def _require_savable(accelerator: Accelerator, data: Any) -> None:
    """Raises ConfigurationError for an Accelerator whose state, or position in the data, is not known."""
    if any(data is loader for loader in accelerator._dataloaders):
        raise ConfigurationError(
            "AccelerateRun(data=...) is a loader that Accelerate has prepared, which has no position of "
            "its own: leave data out, and iterate over run.batches(loader), which knows it; or give "
            "spottrain.data.loader(...) unprepared"
        )
    if not (accelerator._models and accelerator._optimizers):
        raise ConfigurationError(
            "AccelerateRun(accelerator) has no model yet, or no optimizer: create it after "
            "accelerator.prepare(model, optimizer)"
        )
    kind = accelerator.distributed_type
    if kind in FLAT or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        raise ConfigurationError(
            f"AccelerateRun cannot save weights that Accelerate has divided by {kind.value}: use "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or keep the folder that accelerator.save_state "
            "writes by `spottrain sync`"
        )


def _held(accelerator: Accelerator) -> list[int]:
    """Returns how many objects of each kind it would save."""
    kinds = accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._custom_objects
    return [len(each) for each in kinds]


def _only_or_named(found: list[Any]) -> Any:
    """Returns the only one, as a Run of it alone is given it; else all by their numbers."""
    return found[0] if len(found) == 1 else _named(found)


def _named(found: list[Any]) -> dict[str, Any]:
    return {str(number): each for number, each in enumerate(found)}
