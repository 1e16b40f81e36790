"""Exponential moving average (EMA) of the weights, to evaluate and to ship. Called after each optimizer step.

    ema = EMA(model, decay=0.999)
    ...
    optimizer.step(); ema.update(step)    # with a Run: run.global_step + 1, before run.step_completed()
    with ema.applied():
        evaluate(model)

The average is one list of tensors, moved by torch's foreach kernels, each rank its own part: FSDP2's DTensors
work, and a checkpoint holds them like the weights, for any number of ranks. Weights of 16 bits are averaged
in fp32, for a step of 0.001 of bf16 is mostly no step at all.

Buffers are not averaged: BatchNorm's running means are averages by themselves, and counters are none. An
evaluation uses the model's buffers as they are, which is also what torch's AveragedModel does by default.
To average weights goes back to Polyak and Juditsky 1992, who weigh all steps alike; decay and warm-up are
those of TensorFlow's ExponentialMovingAverage. Costs memory of the weights once more (twice, while applied,
for 16-bit weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from spottrain.checkpoint import plain_state
from spottrain.distributed.dtensor import box_of, is_sharded, like, local
from spottrain.errors import ConfigurationError


class EMA:
    """The average of `model`'s trainable parameters; begins as a copy of what they are now.

    model: wrapped or not; on its device already, and sharded already where it is.
    decay: share of the average that is kept at each optimizer step, such as 0.999: it looks back over about
        1 / (1 - decay) steps.
    every: optimizer steps between updates; the share kept is then decay ** every, so the average looks back
        as far as with every=1, and costs less.
    warm_up: keeps at most (1 + step) / (10 + step), so that the first weights are soon forgotten.

    Raises ConfigurationError.
    """

    def __init__(
        self, model: torch.nn.Module, *, decay: float = 0.999, every: int = 1, warm_up: bool = True
    ) -> None:
        if not 0.0 < decay < 1.0:
            raise ConfigurationError(f"EMA(decay={decay}): must be above 0 and below 1, such as 0.999")
        if every < 1:
            raise ConfigurationError(f"EMA(every={every}): must be at least 1 optimizer step")
        self.decay, self.every, self.warm_up = decay, every, warm_up
        self._model = plain_state.plain(model)
        named = {plain_state.clean(name): p for name, p in self._model.named_parameters() if p.requires_grad}
        if not named:
            raise ConfigurationError("EMA(model=...): the model has no trainable parameters to average")
        self._weights = named
        self._applied = False
        self.begin()

    def begin(self) -> None:
        """Anew, with the weights as they are now: those of a checkpoint without an average, for one."""
        self._average = {name: _copy(weight) for name, weight in self._weights.items()}
        self._updated = 0

    @property
    def updated(self) -> int:
        """The last step that is in it; 0: none."""
        return self._updated

    def update(self, step: int) -> None:
        """After optimizer step `step`, counted from 1. A step that was counted already changes nothing."""
        self._require_own()
        if step <= self._updated or step % self.every:
            return
        self._updated = step
        lerp(self._locals(self._average), self._locals(self._weights), 1 - self._kept(step))

    def _kept(self, step: int) -> float:
        decay = min(self.decay, (1 + step) / (10 + step)) if self.warm_up else self.decay
        return float(decay**self.every)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the average while inside, and afterwards bit for bit what it had before.

        With FSDP2 every rank must enter. Inside, neither `update` nor `state_dict` works: what would be the
        weights of a checkpoint are the average's.
        """
        self._require_own()
        _reshard(self._model)
        undo = [_exchange(local(self._weights[n].detach()), local(self._average[n])) for n in self._weights]
        self._applied = True
        try:
            yield
        finally:
            _reshard(self._model)
            for back in undo:
                back()
            self._applied = False

    # --- state --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Tensors by the plain names of the parameters (of FSDP2: DTensors, each rank its part), and a
        count."""
        self._require_own()
        return {"average": dict(self._average), "updated": self._updated}

    def by_weight(self) -> dict[int, torch.Tensor]:
        """The averages by the `id` of the parameter that each is of."""
        self._require_own()
        return {id(weight): self._average[name] for name, weight in self._weights.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Whole tensors, this rank's part of them, or DTensors. Raises ValueError where it does not fit."""
        self._require_own()
        saved = state["average"]
        if mismatch := _mismatch(saved, self._average):
            raise ValueError(mismatch)
        for name, here in self._average.items():
            local(here).copy_(local(_part(here, saved[name])))
        self._updated = int(state["updated"])

    def copy_to(self, model: torch.nn.Module) -> None:
        """Writes the average into another model of the same kind and layout, such as one to ship."""
        self._require_own()
        theirs = dict(plain_state.plain(model).named_parameters())
        with torch.no_grad():
            for name, weight in theirs.items():
                if (average := self._average.get(plain_state.clean(name))) is not None:
                    local(weight).copy_(local(average))

    @staticmethod
    def _locals(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [local(tensor.detach()) for tensor in tensors.values()]

    def _require_own(self) -> None:
        if self._applied:
            raise RuntimeError(
                "the model has the average of its weights now; leave `with ema.applied()` first"
            )


@torch.no_grad()
def lerp(average: list[torch.Tensor], weights: list[torch.Tensor], share: float) -> None:
    """average += share * (weights - average), in as few kernels as there are devices and dtypes."""
    alike = [weight.to(mean.dtype) for mean, weight in zip(average, weights, strict=True)]
    full = [n for n, mean in enumerate(average) if mean.numel()]  # a rank may hold no part of a small tensor
    if full:
        torch._foreach_lerp_([average[n] for n in full], [alike[n] for n in full], share)


def _copy(weight: torch.Tensor) -> torch.Tensor:
    small = weight.is_floating_point() and weight.dtype.itemsize < 4
    return weight.detach().clone().float() if small else weight.detach().clone()


def _exchange(weight: torch.Tensor, average: torch.Tensor) -> Callable[[], None]:
    """Puts the average into the weight; what it answers puts the weight back.

    Of one dtype they change places, with memory for one tensor at a time. Of two, the weight is kept beside.
    """
    before = weight.clone()
    with torch.no_grad():
        weight.copy_(average)
        if weight.dtype == average.dtype:
            average.copy_(before)
            return lambda: _swap(weight, average)
    return lambda: _restore(weight, before)


@torch.no_grad()
def _swap(weight: torch.Tensor, average: torch.Tensor) -> None:
    inside = weight.clone()
    weight.copy_(average)
    average.copy_(inside)


@torch.no_grad()
def _restore(weight: torch.Tensor, before: torch.Tensor) -> None:
    weight.copy_(before)


def _reshard(model: torch.nn.Module) -> None:
    """FSDP2 keeps what its root has gathered until the next backward pass (torch 2.15): an evaluation would
    go on with the weights of the last one."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync"):  # an FSDPModule, without importing it
            module.reshard()  # type: ignore[operator]


def _mismatch(saved: Mapping[str, Any], here: Mapping[str, torch.Tensor]) -> str | None:
    if odd := sorted(set(saved) ^ set(here)):
        return f"the average in the checkpoint and the one here differ in {odd[0]}"
    for name, tensor in here.items():
        if tuple(saved[name].shape) not in (tuple(tensor.shape), box_of(tensor).shape):
            before, now = tuple(saved[name].shape), tuple(tensor.shape)
            return f"{name} has shape {before} in the checkpoint and {now} here"
    return None


def _part(here: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """Of `saved` what this rank holds, laid out as `here`."""
    if not is_sharded(here) or is_sharded(saved):
        return saved
    box = box_of(here)
    if tuple(saved.shape) == tuple(here.shape) != box.shape:
        saved = saved[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]
    return like(here, saved)
