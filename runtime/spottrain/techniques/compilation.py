"""torch.compile: checks of its settings, a warm-up before ranks wait for each other, and recompilations.

    model = compiled(model, "max-autotune")
    warm_up(lambda: loss_of(model, batch).backward(), model)

`checkpoint.compile_cache` keeps compiled code across restarts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from spottrain.core import garbage, log
from spottrain.errors import ConfigurationError
from spottrain.techniques.dry_run import rehearsal

MODES: Final = ("default", "reduce-overhead", "max-autotune")


def compiled(
    model: torch.nn.Module, mode: str = "default", *, dynamic: bool | None = None, fullgraph: bool = False
) -> torch.nn.Module:
    """Wraps the model by `torch.compile`; compilation happens at the first batch, or in `warm_up`.

    Compile a DDP model with its wrapper, so that the graph is split at its buckets; an FSDP2 model after
    `shard`. State names get the prefix `_orig_mod.`, which spottrain's checkpoints leave out.

    Args:
        model: the model, wrapped by DDP or FSDP2 if it is to be.
        mode: "default"; "reduce-overhead" records CUDA graphs; "max-autotune" benchmarks kernels for minutes.
            The latter two are for GPUs.
        dynamic: True if shapes change with each batch; None: torch finds out, at the cost of a recompilation.
        fullgraph: raise an error if the model cannot be compiled as one graph.

    Raises:
        ConfigurationError: the mode is not known, or the model is a torch.nn.DataParallel.
    """
    if isinstance(model, DataParallel):
        raise ConfigurationError(
            "torch.compile does not work with torch.nn.DataParallel: use DistributedDataParallel "
            "(spottrain run --nproc auto starts one process per GPU), or give Trainer the plain model"
        )
    if mode not in MODES:
        raise ConfigurationError(f"compile mode {mode!r} is not known: use {', '.join(MODES)}")
    log.event("compile", mode=mode, dynamic=dynamic)
    with garbage.no_collection():  # it imports the compiler
        outer: Any = torch.compile(model, mode=mode, dynamic=dynamic, fullgraph=fullgraph)
    return outer  # type: ignore[no-any-return]


class OwnGradients:
    """Copies gradients out of the memory of a CUDA graph, which the graph's next run overwrites.

    Needed where a step has several micro-batches and the mode records CUDA graphs.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._copies: dict[torch.nn.Parameter, torch.Tensor] = {}

    def keep(self) -> None:
        """Call it after each backward pass but the last of a step."""
        for each in self._parameters:
            if each.grad is not None and each.grad is not self._copies.get(each):
                each.grad = self._copies[each] = each.grad.clone()

    def forget(self) -> None:
        """Call it with `zero_grad`, which frees them then."""
        self._copies.clear()


def warm_up(step: Callable[[], Any], model: torch.nn.Module) -> int:
    """Compiles the model by one forward and backward pass, before other ranks wait for this one.

    It leaves no trace (see `rehearsal`). DDP exchanges neither gradients nor buffers here, so no rank times
    out in a collective while the slowest one compiles. FSDP2 gathers weights in each forward pass: there the
    ranks wait for the slowest.

    Args:
        step: one forward and backward pass, without optimizer or GradScaler. It may use the training's first
            batch, taken with `dataset[i]`. Its exceptions propagate.
        model: as the loop calls it.

    Returns:
        Number of graphs that were compiled; 0 if they were compiled before.
    """
    before = compilations()
    with rehearsal(model), _alone(model):
        step()
    count = compilations().since(before).count
    log.event("compiled", graphs=count)
    return count


@contextmanager
def _alone(model: torch.nn.Module) -> Iterator[None]:
    """Keeps DDP from exchanging gradients and buffers."""
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, DistributedDataParallel):
        yield
        return
    before = ddp.require_forward_param_sync
    ddp.require_forward_param_sync = False  # else it broadcasts rank 0's buffers (torch 2.15)
    try:
        with ddp.no_sync():
            yield
    finally:
        ddp.require_forward_param_sync = before


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilations:
    """Number and seconds of compilations in this process so far."""

    count: int = 0
    seconds: float = 0.0

    def since(self, before: Compilations) -> Compilations:
        return Compilations(count=self.count - before.count, seconds=self.seconds - before.seconds)


def compilations() -> Compilations:
    """Reads Dynamo's counters (torch 2.15), at the cost of a dictionary look-up.

    The first change of a shape compiles once more; then Dynamo treats that size as dynamic. With
    `dynamic=False`, or a guard on a Python number, each new value compiles again, up to eight times
    (`torch._dynamo.config.recompile_limit`). After that the code silently runs uncompiled.
    TORCH_LOGS=recompiles shows the reasons.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:  # nothing was compiled yet
        return Compilations()
    seconds = utils.compilation_time_metrics.get("_compile.compile_inner", [])
    return Compilations(count=int(utils.counters["stats"]["unique_graphs"]), seconds=float(sum(seconds)))
