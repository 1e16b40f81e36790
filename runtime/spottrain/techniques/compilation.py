"""torch.compile: what it refuses, a first batch before ranks wait for each other, and what recompiles.

    model = compiled(model, "max-autotune")
    warm_up(lambda: loss_of(model, batch).backward(), model)

Called by `trainer`. What was compiled is kept over restarts by `compilecache`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from spottrain.core import log
from spottrain.errors import ConfigurationError
from spottrain.techniques.dry_run import rehearsal
from spottrain.techniques.recompilations import compilations

MODES: Final = ("default", "reduce-overhead", "max-autotune")
DATA_BOUND: Final = 0.2
"""Share of a step spent waiting for data from which on a faster model mostly waits longer."""


def compiled(
    model: torch.nn.Module, mode: str = "default", *, dynamic: bool | None = None, fullgraph: bool = False
) -> torch.nn.Module:
    """`torch.compile(model)`; nothing is compiled before the first batch, or `warm_up`.

    mode: "reduce-overhead" records CUDA graphs, "max-autotune" tries kernels for minutes; both are for a GPU.
    dynamic: True where shapes change with each batch; None lets torch find out, at the price of a
        recompilation. fullgraph: an error where Python code of the model cannot be compiled as one graph.
    DDP's model is compiled with its wrapper on, so that the graph is cut where its buckets are; FSDP2's after
    `shard`. Names of the state get `_orig_mod.`, which checkpoints of ours leave out.
    Raises ConfigurationError.
    """
    if isinstance(model, DataParallel):
        raise ConfigurationError(
            "torch.compile does not work with torch.nn.DataParallel: use DistributedDataParallel, which "
            "spottrain run --nproc auto starts a process for each GPU for; give Trainer the plain model"
        )
    if mode not in MODES:
        raise ConfigurationError(f"compile mode {mode!r} is not known: use {', '.join(MODES)}")
    if mode != "default" and not any(parameter.is_cuda for parameter in model.parameters()):
        log.event(
            "advice", about="compile", text=f"mode {mode} is for CUDA devices, and this model is on none"
        )
    log.event("compile", mode=mode, dynamic=dynamic)
    outer: Any = torch.compile(model, mode=mode, dynamic=dynamic, fullgraph=fullgraph)
    return outer  # type: ignore[no-any-return]


def warm_up(step: Callable[[], Any], model: torch.nn.Module) -> int:
    """Runs `step`, one forward and backward pass, so that this rank has compiled before others wait for it.

    Leaves no trace (see `rehearsal`), so `step` may use the training's first batch, taken with `dataset[i]`,
    and calls neither an optimizer nor a GradScaler. model: as the loop calls it; DDP exchanges neither
    gradients nor buffers in here, so the slowest rank keeps none in a collective, which would time out.
    FSDP2 gathers weights in each forward pass and cannot be kept apart: there ranks wait for the slowest.
    Returns how many pieces of code were compiled; 0 where they were already. Raises what `step` raises.
    """
    before = compilations()
    with rehearsal(model), _alone(model):
        step()
    count = compilations().since(before).count
    log.event("compiled", graphs=count)
    return count


@contextmanager
def _alone(model: torch.nn.Module) -> Iterator[None]:
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, DistributedDataParallel):
        yield
        return
    before = ddp.require_forward_param_sync
    ddp.require_forward_param_sync = False  # else forward broadcasts rank 0's buffers (torch 2.15)
    try:
        with ddp.no_sync():
            yield
    finally:
        ddp.require_forward_param_sync = before


def recompiles() -> int:
    """How often this process compiled code anew that it had compiled already, since it began.

    A few at the start are usual: another shape of the last batch, evaluation beside training. One that grows
    with the steps is a fault, and after 8 for one piece of code torch runs it uncompiled;
    TORCH_LOGS=recompiles says why. Counted by torch's own numbers, of which `0/1` is the second compilation
    of code 0 (torch 2.15).
    """
    from torch._dynamo import convert_frame

    return sum(count - 1 for count in convert_frame.FRAME_COMPILE_COUNTER.values() if count > 1)


def doubt(data_wait: float) -> str | None:
    """Why compiling buys nothing, as a sentence without its full stop; None where it may.

    `data_wait`: share of the time of a step, 0 to 1. Told by a verdict that is data-bound.
    """
    if data_wait < DATA_BOUND:
        return None
    return (
        f"{data_wait:.0%} of each step is waiting for data, which torch.compile does not shorten: mend that "
        "first, or compiling buys nothing"
    )
