"""torch's process group: joining and leaving it, this rank's GPU, sums over ranks, errors of lost peers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError, PeerLost

N = TypeVar("N", int, float)
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
"""Timeout of one collective. Ranks wait at the gate outside of collectives, so this covers only work."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
LOST: Final = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "socket closed",
    "remote process exited",
    "ncclremoteerror",
)
"""What gloo, NCCL and torch's store report when a rank is gone (torch 2.15)."""
GLOO: Final = re.compile(r"\bgloo/")
"""Path of gloo's source files in its exceptions, which are plain RuntimeErrors."""
HEARSAY_SECONDS: Final = 8.0
"""Seconds to wait for rank 0's news that a rank is gone; rank 0 ends 5 s after it."""


def join(world: World, device: torch.device) -> None:
    """Creates the process group (torch's `env://`) unless the script has. Every rank must call it."""
    if not world.distributed or dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Both backends: with the CPU's, ranks exchange single numbers and names without waiting for a GPU.
    # Checkpoints and stop orders use no collective, but `control_channel`.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)


def default_device(world: World) -> str | None:
    """Returns the device name of this rank's own GPU; None if there is no GPU or only one rank."""
    if not world.distributed or not torch.cuda.is_available():
        return None
    return f"cuda:{gpu_of(world, torch.cuda.device_count(), os.environ.get(VISIBLE, ''))}"


def gpu_of(world: World, count: int, visible: str) -> int:
    """Returns which of the `count` visible GPUs belongs to this rank. Raises ConfigurationError.

    visible: CUDA_VISIBLE_DEVICES. A scheduler such as Slurm or MPI may show each rank only its own GPU; NCCL
    refuses two ranks on the same one.
    """
    if count >= world.local_size:
        return world.local_rank
    if count == 1 and visible:
        return 0
    raise ConfigurationError(
        f"{world.local_size} processes share {count} GPU(s): NCCL wants one for each; set spottrain run "
        f"--nproc to the number of GPUs, or {VISIBLE} of each process to a GPU of its own"
    )


def all_reduce_sum(value: torch.Tensor, world: World) -> torch.Tensor:
    """Sums `value` over all ranks in place, and returns it; every rank must call it."""
    if world.distributed:
        dist.all_reduce(value)
    return value


def give_buffers(model: torch.nn.Module, world: World) -> None:
    """Broadcasts rank 0's buffers, as DDP does before a forward pass; every rank must call it.

    For an evaluation: so it uses buffers that are also saved, and gives the same result after a resume.
    """
    if world.distributed:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def broadcast_from_rank0(value: torch.Tensor, world: World) -> torch.Tensor:
    """Replaces `value` in place by that of rank 0, and returns it; every rank must call it."""
    if world.distributed:
        dist.broadcast(value, 0)
    return value


def from_rank0(value: N, world: World) -> N:
    """Returns rank 0's number; before the process group exists, this rank's own."""
    if not (world.distributed and dist.is_initialized()):
        return value
    # No broadcast_object_list, which needs NumPy: an image may have torch without it.
    kind = torch.float64 if isinstance(value, float) else torch.int64
    held = torch.tensor(value, dtype=kind, device=default_device(world))
    return type(value)(broadcast_from_rank0(held, world).item())


def earliest(moment: float, world: World, device: torch.device) -> float:
    """Returns the minimum over all ranks; every rank must call it."""
    held = torch.tensor(moment, dtype=torch.float64, device=device)
    if world.distributed:
        dist.all_reduce(held, op=dist.ReduceOp.MIN)
    return float(held)


def peer_lost(
    error: BaseException, world: World, known: Callable[[float], bool] = lambda seconds: False
) -> PeerLost | None:
    """Returns a PeerLost if the exception means that another rank is gone, else None.

    An exception of torch.distributed, gloo or NCCL counts if its text says so. Any other RuntimeError, or
    another text, counts only if the control channel knows of a lost rank: `known(seconds)` waits for it.
    """
    if isinstance(error, PeerLost):
        return error
    if not world.distributed or not isinstance(error, RuntimeError):
        return None  # a network error of the script itself is an OSError
    text = str(error)
    collective = isinstance(error, dist.DistError) or GLOO.search(text) is not None
    said = collective and any(word in text.lower() for word in LOST)
    if not said and not known(HEARSAY_SECONDS if collective else 0.0):
        return None
    return PeerLost(
        f"rank {world.rank} of {world.size} cannot go on, because another rank is gone "
        f"({text.splitlines()[0][:200] if text else type(error).__name__}); see what ended that one"
    )


def leave() -> None:
    """Destroys the process group before a normal exit, without waiting for other ranks."""
    if dist.is_initialized() and os.environ.get("TORCHELASTIC_RUN_ID") is None:
        dist.destroy_process_group()
