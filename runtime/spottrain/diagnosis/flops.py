"""How much work a step is: floating-point operations, bytes, launches; and from that MFU and a roofline.

Called by the loop, which counts one real step:

    with counted(machine(device, "fp32")) as work:
        ...the whole step: forward, backward, optimizer...
    mfu(work.flops, seconds_of_a_step, device, "fp32")

What is counted is what PyTorch dispatches, so it holds for any model. The formulas are those of torch's
FlopCounterMode (`torch.utils.flop_counter.flop_registry`); that class itself hooks every module of the
process, at which torch 2.15 warns for compiled ones, and does not tell bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spottrain.diagnosis.machine import Machine, peak_flops, uses_tf32

_NO_WRITES: Final = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


@dataclass(kw_only=True, slots=True)
class Work:
    """Of what was counted, usually one optimizer step of one rank."""

    flops: int = 0
    bytes: int = 0
    """Read and written, if each operation had to fetch what it needs: an upper bound of the memory's."""
    launches: int = 0
    """Operations that Python dispatched, views included; on a GPU the kernels are somewhat fewer."""
    roofline: Roofline | None = None
    """None without a machine."""


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

    def add(self, machine: Machine, flops: int, size: int) -> None:
        arithmetic, memory = flops / machine.flops, size / machine.rate(size)
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
        size = _bytes_of(func, args, kwargs, out)
        self._work.flops += flops
        self._work.bytes += size
        self._work.launches += 1
        if self._machine is not None and self._work.roofline is not None:
            self._work.roofline.add(self._machine, flops, size)
        return out


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
    work = Work(roofline=Roofline() if machine is not None else None)
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


def mfu(flops: float, seconds: float, device: torch.device, precision: str) -> float | None:
    """Model FLOPs utilisation: `flops` of a step by what the device could do in its `seconds`, of 1.

    None on a CPU and on a GPU that is not in the table, whose peak is not known, and where seconds is 0.
    """
    if device.type != "cuda" or seconds <= 0:
        return None
    return mfu_of(flops, seconds, peak_flops(torch.cuda.get_device_name(device), precision, tf32=uses_tf32()))


def mfu_of(flops: float, seconds: float, peak: float | None) -> float | None:
    """The same where the peak (FLOP/s) is known or None."""
    return None if peak is None or seconds <= 0 else flops / seconds / peak
