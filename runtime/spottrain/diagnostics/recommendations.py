"""Words the advice for each bottleneck; it names only settings that are not made yet. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from spottrain.techniques.compilation import doubt as compiling_doubt

AHEAD: Final = 4
"""Useful micro-batches to prefetch per worker; more only use memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InUse:
    """Current settings of a run, so that advice leaves them out. None: unknown."""

    workers: int | None = None
    """Actual loader processes of this rank, such as those that `auto` found."""
    prefetch: int | None = None
    """Micro-batches that each worker prefetches."""
    pin_memory: bool | None = None
    own_loader: bool = False
    """Whether the loader is the script's own, so `training.data` does not apply."""
    precision: str = "fp32"
    compile: bool = False
    compile_mode: str = "default"
    sharded: bool = False
    """Whether the model uses FSDP2, which has no communication hooks."""
    whole_share: bool = False
    """Whether a micro-batch is the rank's whole share of the global batch, so it cannot grow alone."""
    drop_last: bool = False
    interval_auto: bool = False
    """Whether the checkpoint interval follows the cost of a save."""
    cuda: bool = False
    """Whether the device is a GPU."""
    bf16: bool = True
    """Whether the device supports bf16."""
    cores: int | None = None
    """CPU cores of the container that this rank may use."""


# --- the loader -------------------------------------------------------------------------------------
def of_loader(use: InUse, data: float) -> str:
    """Advice if the device waits for data for a share `data` of the time."""
    if _no_core_left(use):
        return (
            f"No CPU core is free for another worker: {use.workers} worker(s) use all {use.cores} "
            "core(s). Give the container more CPU for each GPU, make dataset[i] cheaper (its "
            f"transforms), or store the samples decoded, or cached.{_pinned(use)}{_compiled(use, data)}"
        )
    # With enough workers a batch is ready when the rest of the step is done.
    now = max(1, use.workers or 0)
    needed = max(now + 1, math.ceil(now * data / max(1 - data, 0.01)) + (1 if use.workers else 0))
    workers = min(needed, max(use.cores or needed, now))
    known = "not known" if use.workers is None else use.workers
    held = f"; {needed} would be needed, but there are {use.cores} cores" if workers < needed else ""
    ahead = ""
    if use.prefetch is None or use.prefetch < AHEAD:
        has = " if it is lower" if use.prefetch is None else f" (now {use.prefetch})"
        ahead = f" and {_name(use, 'prefetchFactor')} to {AHEAD}{has}"
    return (
        f"Set {_name(use, 'numWorkers')} to {workers} (now {known}){ahead}; or make dataset[i] cheaper{held}."
        f"{_pinned(use)}{_compiled(use, data)}"
    )


def of_copy(use: InUse) -> str:
    if use.pin_memory:
        return (
            "Copy less: keep samples in their small type (uint8, token ids) and convert them on the device."
        )
    return (
        f"Set {_name(use, 'pinMemory')} to true: the copy is then faster, and the host does not wait for it."
    )


def of_slow_rank(use: InUse, rank: int) -> str:
    """Advice if one rank is late because it waits for its data."""
    more = "make dataset[i] cheaper" if _no_core_left(use) else f"raise {_name(use, 'numWorkers')}"
    return f"It waits for its data: {more}, or check the storage of rank {rank}."


def too_many_workers(use: InUse) -> str | None:
    """Returns why there are too many workers; None if there are not, or it is unknown."""
    if use.workers is None or use.cores is None or use.workers <= max(1, use.cores):
        return None
    return (
        f"{use.workers} loader workers share {use.cores} core(s), all that this rank has: unless they "
        "mostly wait for storage, they take CPU time and memory from each other and from training; "
        f"set {_name(use, 'numWorkers')} to {use.cores} at most"
    ) + ("" if use.own_loader else ", or to auto")


def _no_core_left(use: InUse) -> bool:
    return use.workers is not None and use.cores is not None and use.workers >= max(1, use.cores)


def _pinned(use: InUse) -> str:
    """Empty if pin_memory is unknown, true, or useless because there is no GPU."""
    return f" Set {_name(use, 'pinMemory')} to true." if use.cuda and use.pin_memory is False else ""


def _compiled(use: InUse, waits: float) -> str:
    sentence = compiling_doubt(waits) if use.compile else None
    return f" {sentence}." if sentence else ""


def _name(use: InUse, setting: str) -> str:
    if not use.own_loader:
        return f"training.data.{setting}"
    theirs = {"numWorkers": "num_workers", "prefetchFactor": "prefetch_factor", "pinMemory": "pin_memory"}
    return f"{theirs[setting]} of the script's loader"


# --- the work itself --------------------------------------------------------------------------------
def half(use: InUse) -> str | None:
    """Returns the 16-bit format for a run in fp32, with a remark on loss scaling; None if there is none.

    bf16 if the device supports it; else fp16 with loss scaling on a GPU (V100, T4).
    """
    if use.precision != "fp32" or not (use.bf16 or use.cuda):
        return None
    remark = "this GPU has no bf16; Trainer scales the loss by itself, techniques.Amp does in a custom loop"
    return "bf16" if use.bf16 else f"fp16 ({remark})"


def of_bytes(use: InUse) -> str:
    """Advice if memory bandwidth is the bottleneck."""
    if (name := half(use)) is not None:
        text = f"Set precision to {name}, which moves half of the bytes"
        return text + ("." if use.compile else "; and compile to true, which joins elementwise operations.")
    if not use.compile:
        return "Set compile to true: it joins elementwise operations, so that values stay in registers."
    return (
        "Lower microBatchSize so that activations fit into the cache, or use fused kernels "
        "(attention, loss, optimizer)."
    )


def of_launches(use: InUse) -> str:
    """Advice for a model that is not compiled and consists of small operations."""
    graphs = " and compileMode to reduce-overhead (CUDA graphs)" if use.cuda else ""
    return f"Set compile to true{graphs}; or raise {_batch(use)}, so that each operation does more."


def _batch(use: InUse) -> str:
    """A micro-batch can only grow within the global batch."""
    return "globalBatchSize and microBatchSize" if use.whole_share else "microBatchSize"


def of_arithmetic(use: InUse) -> str:
    if (name := half(use)) is None:
        return f"This is the goal. A larger {_batch(use)} may use the device even better."
    return f"This is the goal. Even faster: precision {name}, for matrix products in half the time."
