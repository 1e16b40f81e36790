"""Counts the work of a step: floating-point operations, and the least time they take; from them the MFU.

    with counted(device) as work:
        ...the whole step: forward, backward, optimizer...
    work.mfu(seconds_of_a_step)

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
    peaks = dict(gpu.flops)  # a format that it lacks is missing: a T4 emulates bf16
    if float32_matmul() == "tf32":
        peaks["fp32"] = peaks.get("tf32", peaks["fp32"])
    return Machine(peaks=peaks, bandwidth=gpu.bandwidth)


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
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Peak FLOP/s of the GPU by number format; empty for a CPU, whose peaks are assumed."""

    @property
    def flops(self) -> int:
        return sum(self.formats.values())

    @property
    def format(self) -> str | None:
        """Number format with most of the FLOPs; None without FLOPs."""
        return max(self.formats, key=self.formats.__getitem__, default=None)

    def times(self, count: int) -> Work:
        """Returns the work of `count` repetitions."""
        formats = {name: flops * count for name, flops in self.formats.items()}
        found = Work(formats=formats, peaks=self.peaks)
        if (roof := self.roofline) is not None:
            times = {each.name: getattr(roof, each.name) * count for each in fields(roof)}
            found.roofline = Roofline(**times)
        return found

    def mfu(self, seconds: float) -> float | None:
        """Returns the model FLOPs utilisation, 0 to 1: the time at peak FLOP/s over the real `seconds`.

        Each number format counts with its own peak. None if a peak is unknown, without FLOPs, or in no time.
        """
        if not self.formats or not self.formats.keys() <= self.peaks.keys() or seconds <= 0:
            return None
        return sum(flops / self.peaks[kind] for kind, flops in self.formats.items()) / seconds


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
        device: the device that trains, for roofline and MFU; None: neither.

    Yields:
        The work, complete at the end of the block.
    """
    limits = None if device is None else machine(device)
    work = Work() if limits is None else Work(roofline=Roofline())
    if limits is not None and device is not None and device.type == "cuda":
        work.peaks = limits.peaks
    # Without Dynamo nothing is compiled, and importing it takes seconds.
    compiled = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext(), _Counting(work, limits):
        yield work
