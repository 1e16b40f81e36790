"""Counts the work of a step: floating-point operations, and the least time they take; from them the MFU.

    with counted(device) as work:
        ...the whole step: forward, backward, optimizer...
    mfu(work, seconds_of_a_step, device)

It counts operations that PyTorch dispatches, so it works for any model. The formulas are those of torch's
FlopCounterMode (`torch.utils.flop_counter.flop_registry`). That class itself counts neither bytes nor number
formats, and hooks every module of the process, for which torch 2.15 warns with compiled ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spottrain.core import log
from spottrain.core.device import float32_matmul
from spottrain.core.gpu_catalogue import known_gpu

FORMATS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAUNCH_SECONDS: Final = 6e-6
"""Seconds for Python and torch to dispatch one small operation; an assumption."""
CORE_FLOPS, CPU_BANDWIDTH, CACHE_BANDWIDTH, CACHE_BYTES = 4e10, 1e10, 5e10, 32 * 2**20
"""A CPU: FLOP/s of a core, bytes/s of the memory and of the last-level cache, and its bytes. An assumption
that is right within a factor of a few, which a verdict needs, and no MFU is calculated from."""
_NO_WRITES: Final = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Limits of a machine."""

    peaks: Mapping[str, float]
    """Peak FLOP/s by number format, `fp32` included."""
    bandwidth: float
    """Bytes/s of the memory."""
    cache_bytes: int = 0
    """An operation on at most this many bytes runs from the cache, with CACHE_BANDWIDTH."""


def machine(device: torch.device) -> Machine | None:
    """Returns the limits of a device; None for an unknown GPU."""
    if device.type == "cpu":
        peaks = dict.fromkeys(FORMATS, CORE_FLOPS * torch.get_num_threads())
        return Machine(peaks=peaks, bandwidth=CPU_BANDWIDTH, cache_bytes=CACHE_BYTES)
    name = torch.cuda.get_device_name(device)
    if (gpu := known_gpu(name)) is None:
        log.event("peak-unknown", device=name, next="MFU and rooflines are not reported")
        return None
    return Machine(peaks=peaks_of(name, tf32=uses_tf32()), bandwidth=gpu.bandwidth)


def peaks_of(name: str, *, tf32: bool = False) -> dict[str, float]:
    """Returns peak FLOP/s of the GPU with that name by number format; empty if unknown.

    A format that it lacks is missing (a T4 emulates bf16). `tf32`: whether fp32 products use TF32.
    """
    peaks = dict(gpu.flops) if (gpu := known_gpu(name)) is not None else {}
    if tf32 and "tf32" in peaks:
        peaks["fp32"] = peaks["tf32"]
    return peaks


def uses_tf32() -> bool:
    """Whether torch multiplies fp32 matrices in TF32; by default it does not."""
    return float32_matmul() == "tf32"


@dataclass(kw_only=True, slots=True)
class Roofline:
    """Least time of the counted operations in seconds, by limiting resource.

    The least time of an operation is the greatest of three: FLOPs at the machine's peak, bytes at its memory
    bandwidth, and one launch. It counts for that resource. This is the roofline model of Williams, Waterman
    and Patterson (2009), for each operation.
    """

    arithmetic: float = 0.0
    memory: float = 0.0
    launch: float = 0.0

    @property
    def total(self) -> float:
        return self.arithmetic + self.memory + self.launch

    def add(self, machine: Machine, flops: int, size: int, kind: str = "") -> None:
        """Adds an operation. `size`: bytes read and written; `kind`: number format, for the peak FLOP/s."""
        arithmetic = flops / machine.peaks.get(kind, machine.peaks["fp32"])
        memory = size / (CACHE_BANDWIDTH if size <= machine.cache_bytes else machine.bandwidth)
        if max(arithmetic, memory) <= LAUNCH_SECONDS:
            self.launch += LAUNCH_SECONDS
        elif memory > arithmetic:
            self.memory += memory
        else:
            self.arithmetic += arithmetic


@dataclass(kw_only=True, slots=True)
class Work:
    """Counted work, usually of one optimizer step of one rank."""

    formats: dict[str, int] = field(default_factory=dict)
    """FLOPs of the model by number format: autocast may use another one than the weights have.

    Without recomputation by activation checkpointing, which must not raise the MFU."""
    roofline: Roofline | None = None
    """Of all operations; None without a known machine."""

    @property
    def flops(self) -> int:
        return sum(self.formats.values())

    @property
    def format(self) -> str | None:
        """Number format with most of the FLOPs; None without FLOPs."""
        return max(self.formats, key=self.formats.__getitem__, default=None)

    def times(self, count: int) -> Work:
        """Returns the work of `count` repetitions."""
        found = Work(formats={name: flops * count for name, flops in self.formats.items()})
        if (roof := self.roofline) is not None:
            times = {each.name: getattr(roof, each.name) * count for each in fields(roof)}
            found.roofline = Roofline(**times)
        return found


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, work: Work, machine: Machine | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work, self._machine = work, machine
        # Lazy: the module imports Triton, which is slow, and many runs count nothing.
        from torch.utils.flop_counter import flop_registry

        self._formulas = flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self._formulas.get(func._overloadpacket)
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
        work, kind = self._work, _format(out) if flops else ""
        if flops and not _recomputing():
            work.formats[kind] = work.formats.get(kind, 0) + flops
        if self._machine is not None and work.roofline is not None:
            work.roofline.add(self._machine, flops, _bytes_of(func, args, kwargs, out), kind)
        return out


def _format(out: Any) -> str:
    """Returns the number format of an operation's result; "" if it is not in FORMATS."""
    dtype = next((each.dtype for each in tree_leaves(out) if isinstance(each, torch.Tensor)), None)
    return next((name for name, each in FORMATS.items() if each is dtype), "")


def _recomputing() -> bool:
    """Whether activation checkpointing repeats a forward pass: within backward, with saved-tensor hooks set.

    torch has no public API for it.
    """
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(torch._C._current_graph_task_id() != -1 and saving is not None)


def _bytes_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Returns bytes read and written. A view moves none; an in-place write also counts as a read."""
    returns = func._schema.returns
    if any(each.alias_info is not None and not each.alias_info.is_write for each in returns):
        return 0
    if func._schema.name.partition("::")[2] in _NO_WRITES:
        return 0
    tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
    return sum(each.numel() * each.element_size() for each in tensors)


@contextmanager
def counted(device: torch.device | None = None) -> Iterator[Work]:
    """Counts the operations in a `with` block: of this thread, and of backward passes that it starts.

    Results do not change. The step takes several times as long: count one, and exclude its time
    (`StepTimer.restart`). A compiled model runs uncompiled: FLOPs are the same, the roofline is that before
    fusion. A custom kernel counts no FLOPs, unless it is registered with
    `torch.utils.flop_counter.register_flop_formula`.

    Args:
        device: the device that trains, for the roofline; None: no roofline.

    Yields:
        The work, complete at the end of the block.
    """
    limits = None if device is None else machine(device)
    work = Work(roofline=None if limits is None else Roofline())
    # Without Dynamo nothing is compiled, and importing it takes seconds.
    compiled = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext(), _Counting(work, limits):
        yield work


def mfu(work: Work, seconds: float, device: torch.device) -> float | None:
    """Returns the model FLOPs utilisation, from 0 to 1: the step's time at peak FLOP/s over its real time.

    Each number format counts with its own peak.

    Args:
        work: counted work of one step.
        seconds: measured time of one step.
        device: the device that it ran on.

    Returns:
        None on a CPU, on a GPU with unknown peak, without FLOPs, or if `seconds` is 0.
    """
    if device.type != "cuda":
        return None
    return mfu_of(work.formats, seconds, peaks_of(torch.cuda.get_device_name(device), tf32=uses_tf32()))


def mfu_of(flops: Mapping[str, float], seconds: float, peaks: Mapping[str, float]) -> float | None:
    """Returns the MFU from FLOPs and peak FLOP/s by number format; None if a peak is unknown."""
    if not flops or not flops.keys() <= peaks.keys() or seconds <= 0:
        return None
    return sum(each / peaks[kind] for kind, each in flops.items()) / seconds
