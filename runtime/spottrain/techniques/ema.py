"""Exponential moving average (EMA) of the weights, for evaluation and for the final model.

    ema = EMA(model, decay=0.999)
    ...
    optimizer.step(); ema.update(step)    # with a Run: run.global_step + 1, before run.step_completed()
    with ema.applied():
        evaluate(model)

torch's foreach kernels update the average, on each rank its own part. FSDP2's DTensors work, and a checkpoint
stores the average like the weights, for any number of ranks. 16-bit weights are averaged in fp32, because a
change of 0.001 is mostly rounded away in bf16.

Buffers are not averaged: BatchNorm's running means are averages already, and counters must not be averaged.
Evaluation uses the model's own buffers, as torch's AveragedModel does by default. Weight averaging goes back
to Polyak and Juditsky 1992, with equal weights of all steps. Decay and warm-up follow TensorFlow's
ExponentialMovingAverage. It takes the memory of the weights once more, in fp32 for 16-bit weights; while
16-bit weights are replaced by the average, another copy of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from spottrain.checkpoint import plain_state
from spottrain.distributed.dtensor import box_of, local
from spottrain.errors import ConfigurationError


class EMA:
    """Average of a model's trainable parameters. It starts as a copy of their current values.

    Args:
        model: wrapped or not; on its device already, and already sharded if it is to be.
        decay: share of the average that is kept at each optimizer step, such as 0.999. The average spans
            about 1 / (1 - decay) steps.
        warm_up: keep at most (1 + step) / (10 + step), so that the first weights are soon forgotten.

    Raises:
        ConfigurationError: an argument is not valid, or no parameter is trainable.
    """

    def __init__(self, model: torch.nn.Module, *, decay: float = 0.999, warm_up: bool = True) -> None:
        if not 0.0 < decay < 1.0:
            raise ConfigurationError(f"EMA(decay={decay}): must be above 0 and below 1, such as 0.999")
        self.decay, self.warm_up = decay, warm_up
        self._model = plain_state.plain(model)
        named = {plain_state.clean(name): p for name, p in self._model.named_parameters() if p.requires_grad}
        if not named:
            raise ConfigurationError("EMA(model=...): the model has no trainable parameters to average")
        self._weights = named
        self.is_applied = False
        """Whether the model has the averaged weights now."""
        self.begin()

    def begin(self) -> None:
        """Restarts the average at the current weights, as after loading a checkpoint without an average."""
        self._average = {name: weight.detach().clone() for name, weight in self._weights.items()}
        for name, weight in self._average.items():
            if weight.is_floating_point() and weight.dtype.itemsize < 4:
                self._average[name] = weight.float()
        self._updated = 0

    @property
    def updated(self) -> int:
        """The last optimizer step that was averaged; 0: none."""
        return self._updated

    def update(self, step: int) -> None:
        """Updates the average after an optimizer step. A step that was averaged already changes nothing.

        Args:
            step: the optimizer step that was just done, counted from 1.

        Raises:
            RuntimeError: inside of `applied`.
        """
        self._require_own()
        if step <= self._updated:
            return
        self._updated = step
        decay = min(self.decay, (1 + step) / (10 + step)) if self.warm_up else self.decay
        means: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        for name, average in self._average.items():
            mean = local(average)
            if mean.numel():  # a rank may hold no part of a small tensor
                means.append(mean)
                weights.append(local(self._weights[name].detach()).to(mean.dtype))
        if means:
            torch._foreach_lerp_(means, weights, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model has the averaged weights; restores its own bit for bit at the end.

        With FSDP2 all ranks must enter. Inside, `update` and `state_dict` raise RuntimeError, because a
        checkpoint would store the average as the weights.
        """
        self._require_own()
        _reshard(self._model)
        undo = [_exchange(local(self._weights[n].detach()), local(self._average[n])) for n in self._weights]
        self.is_applied = True
        try:
            yield
        finally:
            _reshard(self._model)
            for back in undo:
                back()
            self.is_applied = False

    # --- state --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Returns the averages by parameter name (FSDP2: DTensors, each rank its part), and the last step."""
        self._require_own()
        return {"average": dict(self._average), "updated": self._updated}

    def by_weight(self) -> dict[int, torch.Tensor]:
        """Returns the averages by the `id` of their parameter."""
        self._require_own()
        return {id(weight): self._average[name] for name, weight in self._weights.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state, whose tensors are whole ones, this rank's parts, or DTensors.

        Raises:
            ValueError: names or shapes differ.
        """
        self._require_own()
        parts = {name: _part(each, self._average.get(name)) for name, each in state["average"].items()}
        if mismatch := plain_state.explain_mismatch(parts, self._average):
            raise ValueError(f"the average: {mismatch}")
        for name, here in self._average.items():
            local(here).copy_(parts[name])
        self._updated = int(state["updated"])

    def _require_own(self) -> None:
        if self.is_applied:
            raise RuntimeError("the model holds its averaged weights; leave `with ema.applied()` first")


@torch.no_grad()
def _exchange(weight: torch.Tensor, average: torch.Tensor) -> Callable[[], object]:
    """Writes the average into the weight. Returns a function that restores the weight.

    With one dtype they swap, which needs one temporary tensor. With two, the weight is kept in a copy.
    """
    before = weight.clone()
    weight.copy_(average)
    if weight.dtype != average.dtype:
        return lambda: weight.copy_(before)
    average.copy_(before)
    return lambda: _exchange(weight, average)


def _reshard(model: torch.nn.Module) -> None:
    """Frees gathered weights: FSDP2's root keeps them until the next backward pass (torch 2.15), so an
    evaluation would use stale ones."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):  # an FSDPModule, without importing it
            module.reshard()  # type: ignore[operator]


def _part(saved: torch.Tensor, here: torch.Tensor | None) -> torch.Tensor:
    """Returns this rank's part of a saved tensor, laid out like `here`."""
    part = local(saved)
    if here is None or part.shape != here.shape:
        return part
    box = box_of(here)
    return part[tuple(slice(at, at + size) for at, size in zip(box.start, box.shape, strict=True))]
