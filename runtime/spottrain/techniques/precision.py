"""Number formats of a step: which one a device is good at, and the loop's part of it. Called by `trainer`.

For a loop of one's own, with the order of things that each format needs in one place:

    amp = Amp("auto", device)
    with amp.autocast():
        loss = loss_of(model, batch)
    amp.backward(loss)
    amp.step(optimizer, clip_grad_norm=1.0, scheduler=scheduler)

Its state is kept by `spottrain.Run(..., scaler=amp)`.
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
from spottrain.distributed import process_group
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError, TrainingFailed
from spottrain.techniques.accumulation import joined

AUTO: Final = "auto"
NAMES: Final = ("bf16", "fp16", "fp32", "tf32")
CPU_BF16: Final = ("avx512_bf16", "amx_bf16", "sve_bf16")
"""Of `torch.cpu.get_capabilities()`; a name that a platform does not have is absent there (torch 2.15)."""
LEAST_SCALE: Final = 2.0**-14
"""Thirty overflows in a row from torch's first scale, 2^16, on."""
AMPERE: Final = (8, 0)
"""CUDA compute capability with bf16 and TF32 in hardware. Below, torch emulates bf16 by fp32, and
`torch.cuda.is_bf16_supported()` says True all the same (torch 2.15)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """What a device has in hardware."""

    type: str
    name: str
    bf16: bool
    tf32: bool


def facts_of(device: torch.device) -> DeviceFacts:
    """Read from torch. ROCm: bf16 on all that torch supports, TF32 from the MI300 on."""
    if device.type == "cuda":
        ampere = torch.cuda.get_device_capability(device) >= AMPERE
        rocm = torch.version.hip is not None
        name = torch.cuda.get_device_name(device)
        with torch.cuda.device(device):  # torch answers for the current one (torch 2.15)
            tf32 = torch.cuda.is_tf32_supported()
        return DeviceFacts(type="cuda", name=name, bf16=ampere or rocm, tf32=tf32)
    has = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    name = str(has.get("cpu_name", device.type))
    return DeviceFacts(type=device.type, name=name, bf16=any(has.get(each) for each in CPU_BF16), tf32=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Weights, their gradients and the optimizer's state are fp32 in each; `dtype` is what a forward pass
    computes in where `torch.autocast` holds it safe."""

    name: str
    dtype: torch.dtype | None = None
    needs_scaler: bool = False
    """fp16 has 5 exponent bits: its smallest number is 6e-8, and a gradient below 3e-8 becomes 0 unless the
    loss is scaled up."""

    def apply(self) -> None:
        """Sets, for the process, whether fp32 matrix products and convolutions may be done in TF32.

        With "fp32" neither may; torch leaves convolutions of cuDNN in TF32 unless told otherwise. With
        "tf32" both may. bf16 and fp16 leave both as they are. A script's setting that this changes is told.

        `torch.set_float32_matmul_precision` is used because it sets the old flags and the new ones alike:
        after "tf32" was assigned to `torch.backends.cuda.matmul.fp32_precision` or
        `torch.backends.fp32_precision` alone, reading `torch.backends.cuda.matmul.allow_tf32` or calling
        `torch.get_float32_matmul_precision()` raises RuntimeError, here and in libraries (torch 2.15).
        """
        if self.dtype is not None:
            return
        tf32 = self.name == "tf32"
        before = torch.backends.cuda.matmul.fp32_precision
        if before not in ("none", "tf32" if tf32 else "ieee"):  # none: the script has said nothing
            log.event("override", setting="float32 matmul", ours=self.name, script=before)
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        cudnn: Any = torch.backends.cudnn  # its kinds of operations are not in its annotations
        for each in (cudnn.conv, cudnn.rnn):
            if not tf32 and each.fp32_precision == "tf32":  # by a setting above it, which allow_tf32 leaves
                each.fp32_precision = "ieee"
        log.event("precision", name=self.name, matmul=torch.get_float32_matmul_precision(), conv_tf32=tf32)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Around forward pass and loss, not around backward."""
        return nullcontext() if self.dtype is None else torch.autocast(device.type, dtype=self.dtype)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """One that does nothing, and has no state, unless it is needed."""
        return torch.amp.GradScaler(device.type, enabled=self.needs_scaler)


_KINDS: Final = {
    "bf16": Precision(name="bf16", dtype=torch.bfloat16),
    "fp16": Precision(name="fp16", dtype=torch.float16, needs_scaler=True),
    "fp32": Precision(name="fp32"),
    "tf32": Precision(name="tf32"),
}


def choose(
    wanted: str, device: torch.device, facts: DeviceFacts | None = None, *, world: World | None = None
) -> Precision:
    """What is wanted; "auto" is bf16 where the hardware of all ranks has it, else fp16 where all are GPUs,
    else fp32: ranks in different formats would average scaled gradients with others.

    With "auto" and several ranks all must call it. world: None: of torch's process group, where there is one.
    `facts`: of the device, where they are known. What the device is bad at is told as advice, and done; what
    fp16 needs of the loop is told too. Raises ConfigurationError.
    """
    if wanted not in (AUTO, *NAMES):
        raise ConfigurationError(f"precision {wanted!r} is not known: use auto, {', '.join(NAMES)}")
    facts = facts or facts_of(device)
    if wanted == AUTO:
        own = _best(bf16=facts.bf16, gpu=facts.type == "cuda")
        name = _of_all(facts, device, joined() if world is None else world)
        why = None if name == own else f"{own} is good here, and not on another rank"
        log.event("precision", wanted=AUTO, chosen=name, device=facts.name, bf16=facts.bf16, why=why)
    else:
        name = wanted
        if (sentence := doubt(wanted, facts)) is not None:
            log.event("advice", about="precision", text=sentence)
    chosen = _KINDS[name]
    if (sentence := doubt_without_scaler(chosen)) is not None:
        log.event("loss-scale", text=sentence)
    return chosen


def agreed(wanted: str, device: torch.device, world: World) -> Precision:
    """As `choose`, for ranks that all call it: where a script wants a format by rank it is refused."""
    if wanted in (AUTO, *NAMES):
        mine = (AUTO, *NAMES).index(wanted)
        first, last = (each * round(process_group.earliest(each * mine, world, device)) for each in (1, -1))
        if first != last:
            names = " and ".join(sorted({(AUTO, *NAMES)[each] for each in (first, mine, last)}))
            raise ConfigurationError(
                f"rank {world.rank} wants precision {wanted!r}, and not all ranks do ({names}): they would "
                "average scaled gradients with others; give all the same, or auto"
            )
    return choose(wanted, device, world=world)


def _best(*, bf16: bool, gpu: bool) -> str:
    return "bf16" if bf16 else "fp16" if gpu else "fp32"


def _of_all(facts: DeviceFacts, device: torch.device, world: World) -> str:
    least = [
        process_group.earliest(float(each), world, device) for each in (facts.bf16, facts.type == "cuda")
    ]
    return _best(bf16=bool(least[0]), gpu=bool(least[1]))


def doubt(name: str, facts: DeviceFacts) -> str | None:
    """Why this format is not the one for that device, as a sentence; None where it is."""
    match name:
        case "fp16" if facts.bf16:
            return (
                f"{facts.name} has bf16, which costs as much memory as fp16, needs no loss scaling and does "
                "not overflow: set precision to bf16 or auto"
            )
        case "bf16" if not facts.bf16:
            other = "fp16" if facts.type == "cuda" else "fp32"
            return (
                f"{facts.name} has no bf16 in hardware and emulates it, which saves memory but no time: set "
                f"precision to {other} or auto"
            )
        case "fp16" if facts.type == "cpu":
            return f"{facts.name} is a CPU, which is many times slower in fp16: set precision to fp32 or auto"
        case "tf32" if not facts.tf32:
            return f"{facts.name} has no TF32, so tf32 is fp32 here: set precision to auto"
    return None


def doubt_without_scaler(precision: Precision) -> str | None:
    """What fp16 needs, and who sees to it. None where nothing is needed."""
    if not precision.needs_scaler:
        return None
    return (
        "fp16 needs loss scaling, or small gradients become 0: Trainer does it by itself; in a loop of your "
        "own use spottrain.techniques.Amp for backward and step, or torch.amp.GradScaler, and give it to "
        "Run as scaler="
    )


def step(scaler: torch.amp.GradScaler, *optimizers: torch.optim.Optimizer) -> bool:
    """The optimizers' step, and the next loss scale, once for all of them; whether all weights moved.

    fp16 leaves a step out whose gradients overflowed: what follows the weights, as a torch schedule and an
    average do, is then left out too. To know it costs a wait for the device, with fp16 alone.
    Raises TrainingFailed where no scale is small enough.
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
    if after >= before:  # lowered by an overflow alone
        return True
    log.event("step-skipped", why="gradients overflowed in fp16", scale=after)
    if after < LEAST_SCALE:
        raise TrainingFailed(
            f"fp16: gradients overflow at every loss scale down to {after:g}, so no step moves the weights: "
            "lower the learning rate, look at the samples, or set precision to bf16 or fp32"
        )
    return False


class Amp:
    """Mixed precision for a loop of one's own; with each format the loop is the same.

    precision: a name, or what `choose` gave; "auto" is what all ranks are good at, so with several all must
    make it, at the same place, after torch's process group is there. device: where the model is.
    Its state is the loss scale: give it to `spottrain.Run(scaler=...)`. Raises ConfigurationError.
    """

    def __init__(self, precision: Precision | str, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if precision == AUTO:
            _require_group()
        self.precision = choose(precision, self.device) if isinstance(precision, str) else precision
        self.precision.apply()
        self.scaler = self.precision.scaler(self.device)
        self._stepped: bool | None = None
        """Since the last `backward`; None: the loop calls another one."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Around forward pass and loss, not around `backward`."""
        return self.precision.autocast(self.device)

    def backward(self, loss: torch.Tensor) -> None:
        """`loss`: scalar; divided by the number of micro-batches, where there are several."""
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
        """Unscales, clips, steps, and clears the gradients: in this order, and the scheduler last.

        optimizer: all whose gradients the backward pass has made, in one call, for the next loss scale is
        found by it: `amp.step([a, b], scheduler=[c, d])`. parameters: whose gradients are clipped together;
        those of the optimizers if None.
        Whether the weights moved: fp16 leaves the step of an optimizer out whose gradients overflowed, and
        every scheduler then stays too. To know it costs a wait for the device, with fp16 alone.
        Raises ConfigurationError at a second call after one `backward`, with a scaler.
        """
        if self._stepped and self.scaler.is_enabled():
            raise ConfigurationError(
                "Amp.step() was called twice after one Amp.backward(): the first call has found another loss "
                "scale than the gradients have; give one call all optimizers: amp.step([a, b])"
            )
        self._stepped = None if self._stepped is None else True
        optimizers = _listed(optimizer)
        if clip_grad_norm is not None:
            for each in optimizers:
                self.scaler.unscale_(each)  # else the limit would be on gradients times the scale
            torch.nn.utils.clip_grad_norm_(_all(optimizers, parameters), clip_grad_norm)
        moved = step(self.scaler, *optimizers)
        for each in optimizers:
            each.zero_grad(set_to_none=True)
        for follows in _listed(scheduler) if moved else []:
            follows.step()
        return moved

    def state_dict(self) -> dict[str, Any]:
        """Empty where no scaler is needed."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A state saved in a format without scaler leaves the initial scale, and says so."""
        if self.precision.needs_scaler and not state:
            log.event("loss-scale", source="initial", scale=self.scaler.get_scale())
            return
        self.scaler.load_state_dict(state)


def _require_group() -> None:
    """Where there are ranks that have not joined yet, each would choose alone. Raises ConfigurationError."""
    if World.from_env(os.environ).distributed and not joined().distributed:
        raise ConfigurationError(
            'Amp("auto") asks all ranks what they are good at, and they have not joined: make it after '
            "torch.distributed.init_process_group(), or name a format"
        )


def _listed(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, Sequence) else [given]


def _all(
    optimizers: list[torch.optim.Optimizer], parameters: Iterable[torch.Tensor] | None
) -> list[torch.Tensor]:
    if parameters is not None:
        return list(parameters)
    return [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]
