"""Mixed precision: chooses the number format for a device, and does what each format needs in a step.

For a custom loop:

    amp = Amp("auto", device)
    with amp.autocast():
        loss = loss_of(model, batch)
    amp.backward(loss)
    amp.step(optimizer, clip_grad_norm=1.0, scheduler=scheduler)

`spottrain.Run(..., scaler=amp)` checkpoints its state.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler

from spottrain.core import log
from spottrain.core.device import float32_matmul
from spottrain.distributed import process_group
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError, TrainingFailed
from spottrain.techniques.accumulation import joined

AUTO: Final = "auto"
MIN_SCALE: Final = 2.0**-14
"""Smallest loss scale: thirty halvings of torch's initial scale, 2^16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """Hardware capabilities of a device; a CPU has none here, so that auto is the same on any."""

    type: str
    name: str
    bf16: bool = False


def facts_of(device: torch.device) -> DeviceFacts:
    """Queries torch for the capabilities of `device`."""
    if device.type != "cuda":
        return DeviceFacts(type=device.type, name=device.type)
    with torch.cuda.device(device):  # torch checks the current one
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return DeviceFacts(type="cuda", name=torch.cuda.get_device_name(device), bf16=bf16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """A number format. Weights, gradients and optimizer state are fp32 in each of them."""

    name: str
    dtype: torch.dtype | None = None
    """What the forward pass computes in, where `torch.autocast` considers it safe; None: fp32."""
    needs_scaler: bool = False
    """Whether the loss must be scaled. fp16 has 5 exponent bits: its smallest number is 6e-8, so gradients
    below 3e-8 become 0."""

    def apply(self) -> None:
        """Sets for the process whether fp32 matrix products and convolutions may use TF32.

        "fp32" forbids it for both, although cuDNN convolutions use TF32 by default in torch. "tf32" allows it
        for both. bf16 and fp16 change nothing. If this overrides a setting of the script, it logs that.
        """
        if self.dtype is not None:
            return
        tf32 = self.name == "tf32"
        before = float32_matmul()
        if before not in ("none", "tf32" if tf32 else "ieee"):  # none: not set by the script
            log.event("override", setting="float32 matmul", ours=self.name, script=before)
        # It sets old and new flags alike; with the new ones alone, reading the old ones raises RuntimeError
        # (torch 2.15).
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        for name in ("conv", "rnn"):  # since torch 2.9
            each = getattr(torch.backends.cudnn, name, None)
            if not tf32 and each and each.fp32_precision == "tf32":  # from a setting that allow_tf32 keeps
                each.fp32_precision = "ieee"
        log.event("precision", name=self.name, matmul=torch.get_float32_matmul_precision(), conv_tf32=tf32)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Returns the autocast context for forward pass and loss; backward stays outside."""
        return nullcontext() if self.dtype is None else torch.autocast(device.type, dtype=self.dtype)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Returns a GradScaler, disabled and without state unless the format needs it."""
        return torch.amp.GradScaler(device.type, enabled=self.needs_scaler)


_KINDS: Final = {
    "bf16": Precision(name="bf16", dtype=torch.bfloat16),
    "fp16": Precision(name="fp16", dtype=torch.float16, needs_scaler=True),
    "fp32": Precision(name="fp32"),
    "tf32": Precision(name="tf32"),
}


def choose(
    wanted: str,
    device: torch.device,
    facts: DeviceFacts | None = None,
    *,
    world: World | None = None,
) -> Precision:
    """Chooses a format. With "auto" and several ranks, all must call it.

    "auto" is bf16 if all ranks have GPUs with bf16, else fp16 if all have GPUs, else fp32: the same on any
    CPU. All ranks get the same format, because otherwise scaled and unscaled gradients would be averaged.

    facts: capabilities of the device; None: queried. world: None: that of torch's process group, if there is
    one. Raises ConfigurationError if `wanted` is not known.
    """
    if wanted not in (AUTO, *_KINDS):
        raise ConfigurationError(f"precision {wanted!r} is not known: use auto, {', '.join(_KINDS)}")
    if wanted != AUTO:
        return _KINDS[wanted]
    facts, world = facts or facts_of(device), joined() if world is None else world
    own = facts.bf16, facts.type == "cuda"
    bf16, gpu = (bool(process_group.earliest(float(each), world, device)) for each in own)
    name = "bf16" if bf16 else "fp16" if gpu else "fp32"
    why = None if (bf16, gpu) == own else "not all ranks have the same hardware"
    log.event("precision", wanted=AUTO, chosen=name, device=facts.name, why=why)
    return _KINDS[name]


def step(scaler: torch.amp.GradScaler, *optimizers: torch.optim.Optimizer) -> bool:
    """Steps the optimizers, and updates the loss scale once for all of them. Returns whether all stepped.

    fp16 skips a step whose gradients overflowed; then skip schedulers and weight averages too. Only with fp16
    it waits for the device. Raises TrainingFailed if gradients overflow even at the smallest loss scale.
    """
    if not scaler.is_enabled():
        for optimizer in optimizers:
            optimizer.step()
        return True
    before = scaler.get_scale()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    after = scaler.get_scale()
    if after >= before:  # only an overflow lowers it
        return True
    log.event("step-skipped", why="gradients overflowed in fp16", scale=after)
    if after < MIN_SCALE:
        raise TrainingFailed(
            f"fp16: gradients overflow at every loss scale down to {after:g}, so the weights no "
            "longer change: lower the learning rate, check the samples, or set precision to bf16 or "
            "fp32"
        )
    return False


class Amp:
    """Mixed precision for a custom loop; the loop is the same for every format.

    Its state is the loss scale: pass it to `spottrain.Run(scaler=...)`.

    Args:
        precision: "auto", "bf16", "fp16", "fp32", "tf32", or a `Precision`. "auto" is a collective: make it
            on all ranks, after torch's process group is initialised.
        device: where the model is.

    Raises:
        ConfigurationError: the format is not known, or "auto" comes before the process group.
    """

    def __init__(self, precision: Precision | str, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if precision == AUTO and World.from_env(os.environ).distributed and not joined().distributed:
            raise ConfigurationError(  # each rank would choose for itself
                'Amp("auto") compares the hardware of all ranks, but the process group is not '
                "initialised: make it after torch.distributed.init_process_group(), or name a format"
            )
        self.precision = choose(precision, self.device) if isinstance(precision, str) else precision
        self.precision.apply()
        self.scaler = self.precision.scaler(self.device)
        self._stepped: bool | None = None
        """Whether `step` was called since the last `backward`; None: the loop does not call `backward`."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the autocast context for forward pass and loss; `backward` stays outside."""
        return self.precision.autocast(self.device)

    def backward(self, loss: torch.Tensor) -> None:
        """Scales the loss and runs the backward pass.

        Args:
            loss: scalar tensor, already divided by the number of micro-batches.
        """
        self._stepped = False
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        parameters: Iterable[torch.Tensor] | None = None,
        *,
        clip_grad_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    ) -> bool:
        """Unscales and clips the gradients, steps, clears the gradients, and steps the schedulers.

        fp16 skips the step of an optimizer whose gradients overflowed, and then all schedulers. Only with
        fp16 it waits for the device.

        Args:
            optimizer: all optimizers that the backward pass made gradients for, in one call, because it also
                updates the loss scale: `amp.step([a, b], scheduler=[c, d])`.
            parameters: parameters whose gradients are clipped together; None: those of the optimizers.
            clip_grad_norm: maximum norm of the gradients; None: no clipping.
            scheduler: schedulers to step after the optimizers.

        Returns:
            Whether all optimizers stepped.

        Raises:
            ConfigurationError: the second call after one `backward`, with a scaler.
            TrainingFailed: gradients overflow even at the smallest loss scale.
        """
        if self._stepped and self.scaler.is_enabled():
            raise ConfigurationError(
                "Amp.step() was called twice after one Amp.backward(), and the first call may have "
                "changed the loss scale: pass all optimizers in one call, amp.step([a, b])"
            )
        self._stepped = None if self._stepped is None else True
        optimizers = _listed(optimizer)
        if clip_grad_norm is not None:
            for each in optimizers:
                self.scaler.unscale_(each)  # else the limit applies to scaled gradients
            if parameters is None:
                groups = [group for each in optimizers for group in each.param_groups]
                parameters = [parameter for group in groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
        moved = step(self.scaler, *optimizers)
        for each in optimizers:
            each.zero_grad(set_to_none=True)
        for follows in _listed(scheduler) if moved else []:
            follows.step()
        return moved

    def state_dict(self) -> dict[str, Any]:
        """Returns the scaler's state; empty if the format needs no scaler."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the scaler. With an empty state it keeps the initial scale, and logs that."""
        if self.precision.needs_scaler and not state:
            log.event("loss-scale", source="initial", scale=self.scaler.get_scale())
            return
        self.scaler.load_state_dict(state)


def _listed(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, Sequence) else [given]
