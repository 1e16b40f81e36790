"""How much work a step is: floating-point operations, bytes, launches; and from that MFU and a roofline.

Called by the loop, which counts one real step:

    with counted(machine(device, "fp32")) as work:
        ...the whole step: forward, backward, optimizer...
    mfu(work, seconds_of_a_step, device)

What is counted is what PyTorch dispatches, so it holds for any model. The formulas are those of torch's
FlopCounterMode (`torch.utils.flop_counter.flop_registry`); that class itself hooks every module of the
process, at which torch 2.15 warns for compiled ones, and does not tell bytes.
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
    """Of what was counted, usually one optimizer step of one rank."""

    flops: int = 0
    """Of the model: without what activation checkpointing computes again, so MFU is no better for it."""
    recomputed: int = 0
    """FLOPs of that."""
    formats: dict[str, int] = field(default_factory=dict)
    """`flops` by number format: autocast may compute in another one than the weights have."""
    bytes: int = 0
    """Read and written, if each operation had to fetch what it needs: an upper bound of the memory's."""
    launches: int = 0
    """Operations that Python dispatched, views included; on a GPU the kernels are somewhat fewer."""
    roofline: Roofline | None = None
    """Of all that was done; None without a machine."""
    products: Roofline | None = None
    """Of matrix products and the like alone, which no compiler can do away with by fusing operations."""

    @property
    def format(self) -> str | None:
        """In which most of the FLOPs are; None where there are none."""
        return max(self.formats, key=self.formats.__getitem__, default=None)

    def times(self, count: int) -> Work:
        """So often the same."""
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
    """Least seconds of the counted operations, each put to what binds it.

    An operation takes at least its FLOPs at the machine's peak, its bytes at the memory's rate, and one
    launch: it is put down to the greatest of the three (the roofline model of Williams, Waterman and
    Patterson, 2009, by operation).
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
        """kind: the number format, where the machine's peaks differ by it."""
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
        # Not above: that module imports Triton, which is slow, and most runs are over before a count.
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
    """Of what an operation gives; "" for one that is not among ours."""
    dtype = next((each.dtype for each in tree_leaves(out) if isinstance(each, torch.Tensor)), None)
    return next((name for name, each in FORMATS.items() if each is dtype), "")


def _recomputing() -> bool:
    """Whether activation checkpointing does a forward pass again: autograd works, and somebody keeps what a
    forward pass saves for it. torch says so to nobody but itself."""
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(torch._C._current_graph_task_id() != -1 and saving is not None)


def _bytes_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """That it reads and writes. A view moves none; what is written in place counts as read as well."""
    returns = func._schema.returns
    if any(each.alias_info is not None and not each.alias_info.is_write for each in returns):
        return 0
    if func._schema.name.partition("::")[2] in _NO_WRITES:
        return 0
    tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
    return sum(each.numel() * each.element_size() for each in tensors)


@contextmanager
def counted(machine: Machine | None = None) -> Iterator[Work]:
    """Counts what is done inside, in this thread and in the backward passes that it starts.

    It changes no result. The step takes several times as long, so count one, and leave its time out
    (`Split.restart`). A compiled model runs uncompiled here: FLOPs are the same, launches and bytes are
    those before fusion. Only what autograd sees is counted: a kernel of one's own, not registered with
    `torch.utils.flop_counter.register_flop_formula`, counts no FLOPs.
    """
    known = machine is not None
    work = Work(roofline=Roofline() if known else None, products=Roofline() if known else None)
    # Nothing is compiled where Dynamo was never imported, and that import takes seconds.
    compiled = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext(), _Counting(work, machine):
        yield work


def transformer_flops(
    *, parameters: int, layers: int, heads: int, head_dim: int, context: int, tokens: int
) -> float:
    """FLOPs of forward and backward of a decoder by the formula 6N + 12 L H Q T for each token.

    parameters: those of matrices that are multiplied, without embedding tables that are looked up.
    context: tokens of one sequence; tokens: all of the step. Source: PaLM (Chowdhery et al., 2022,
    appendix B), which counts attention in full; a causal kernel does half of it. A cross-check of `counted`.
    """
    return float(tokens) * (6 * parameters + 12 * layers * heads * head_dim * context)


def mfu(work: Work, seconds: float, device: torch.device) -> float | None:
    """Model FLOPs utilisation: what the device would need for the step's FLOPs at its peak, of `seconds`.

    By the peak of each number format that was used, of 1. None on a CPU and on a GPU that is not in the
    table, whose peak is not known, where nothing was counted, and where seconds is 0.
    """
    if device.type != "cuda":
        return None
    name, tf32 = torch.cuda.get_device_name(device), uses_tf32()
    return mfu_of(work.formats, seconds, {each: peak_flops(name, each, tf32=tf32) for each in work.formats})


def mfu_of(flops: Mapping[str, float], seconds: float, peaks: Mapping[str, float | None]) -> float | None:
    """The same by format; peaks: FLOP/s, None where not known."""
    least = 0.0
    for kind, each in flops.items():
        peak = peaks.get(kind)
        if peak is None:
            return None
        least += each / peak
    return least / seconds if seconds > 0 and least > 0 else None
