"""Counts the work of a step: floating-point operations, bytes and launches; from them MFU and a roofline.

    with counted(machine(device, "fp32")) as work:
        ...the whole step: forward, backward, optimizer...
    mfu(work, seconds_of_a_step, device)

It counts operations that PyTorch dispatches, so it works for any model. The formulas are those of torch's
FlopCounterMode (`torch.utils.flop_counter.flop_registry`). That class itself counts no bytes, and hooks
every module of the process, for which torch 2.15 warns with compiled ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spottrain.diagnostics.hardware import FORMATS, Machine, peak_flops, uses_tf32

_NO_WRITES: Final = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


@dataclass(kw_only=True, slots=True)
class Work:
    """Counted work, usually of one optimizer step of one rank."""

    flops: int = 0
    """FLOPs of the model, without recomputation by activation checkpointing, which must not raise MFU."""
    recomputed: int = 0
    """FLOPs of that recomputation."""
    formats: dict[str, int] = field(default_factory=dict)
    """`flops` by number format: autocast may use another one than the weights have."""
    bytes: int = 0
    """Bytes read and written if nothing were cached: an upper bound of the memory traffic."""
    launches: int = 0
    """Operations that Python dispatched, views included; on a GPU the kernels are somewhat fewer."""
    roofline: Roofline | None = None
    """Roofline of all operations; None without a machine."""
    products: Roofline | None = None
    """Roofline of matrix products and similar operations, which a compiler cannot fuse away."""

    @property
    def format(self) -> str | None:
        """Number format with most of the FLOPs; None without FLOPs."""
        return max(self.formats, key=self.formats.__getitem__, default=None)

    def times(self, count: int) -> Work:
        """Returns the work of `count` repetitions."""
        return Work(
            flops=self.flops * count,
            recomputed=self.recomputed * count,
            formats={name: flops * count for name, flops in self.formats.items()},
            bytes=self.bytes * count,
            launches=self.launches * count,
            roofline=None if self.roofline is None else self.roofline.times(count),
            products=None if self.products is None else self.products.times(count),
        )


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

    def times(self, count: int) -> Roofline:
        return Roofline(
            arithmetic=self.arithmetic * count, memory=self.memory * count, launch=self.launch * count
        )

    def add(self, machine: Machine, flops: int, size: int, kind: str = "") -> None:
        """Adds an operation. `size`: bytes read and written; `kind`: number format, for the peak FLOP/s."""
        arithmetic, memory = flops / machine.peaks.get(kind, machine.flops), size / machine.rate(size)
        if machine.launch >= max(arithmetic, memory):
            self.launch += machine.launch
        elif memory > arithmetic:
            self.memory += memory
        else:
            self.arithmetic += arithmetic


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
        work, size, kind = self._work, _bytes_of(func, args, kwargs, out), _format(out) if flops else ""
        if flops and _recomputing():
            work.recomputed += flops
        elif flops:
            work.flops += flops
            work.formats[kind] = work.formats.get(kind, 0) + flops
        work.bytes += size
        work.launches += 1
        for line in (work.roofline, work.products if flops else None):
            if self._machine is not None and line is not None:
                line.add(self._machine, flops, size, kind)
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
def counted(machine: Machine | None = None) -> Iterator[Work]:
    """Counts the operations in a `with` block: of this thread, and of backward passes that it starts.

    Results do not change. The step takes several times as long: count one, and exclude its time
    (`StepTimer.restart`). A compiled model runs uncompiled: FLOPs are the same, launches and bytes are those
    before fusion. A custom kernel counts no FLOPs, unless it is registered with
    `torch.utils.flop_counter.register_flop_formula`.

    Args:
        machine: peak performance, for the rooflines; None: no rooflines.

    Yields:
        The work, complete at the end of the block.
    """
    known = machine is not None
    work = Work(roofline=Roofline() if known else None, products=Roofline() if known else None)
    # Without Dynamo nothing is compiled, and importing it takes seconds.
    compiled = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext(), _Counting(work, machine):
        yield work


def mfu(work: Work, seconds: float, device: torch.device) -> float | None:
    """Returns the model FLOPs utilisation, from 0 to 1: the step's time at peak FLOP/s over its real time.

    Each number format counts with its own peak.

    Args:
        work: counted work of one step.
        seconds: measured time of one step.
        device: the device that it ran on.

    Returns:
        None on a CPU, on a GPU with unknown peak (`hardware.GPUS`), without FLOPs, or if `seconds` is 0.
    """
    if device.type != "cuda":
        return None
    name, tf32 = torch.cuda.get_device_name(device), uses_tf32()
    return mfu_of(work.formats, seconds, {each: peak_flops(name, each, tf32=tf32) for each in work.formats})


def mfu_of(flops: Mapping[str, float], seconds: float, peaks: Mapping[str, float | None]) -> float | None:
    """Returns the MFU from FLOPs and peak FLOP/s by number format; None if a peak is unknown."""
    least = 0.0
    for kind, each in flops.items():
        peak = peaks.get(kind)
        if peak is None:
            return None
        least += each / peak
    return least / seconds if seconds > 0 and least > 0 else None
