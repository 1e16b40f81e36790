"""torch's process group: join and leave it, this rank's GPU, sums over ranks, errors of lost peers."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError, PeerLost

COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
"""Of one collective. Ranks wait for each other at the gate outside of collectives, so this is work only."""
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
"""What gloo, NCCL and torch's store say when a rank is gone (torch 2.15)."""
GLOO: Final = re.compile(r"\bgloo/")
"""In what gloo raises, which is a plain RuntimeError: the path of its source file."""
HEARSAY_SECONDS: Final = 8.0
"""For the news that a rank is gone to come by way of rank 0, which ends 5 s after it."""


def join(world: World, device: torch.device) -> None:
    """Makes the process group unless the script has; torch's `env://`. All ranks must come."""
    if not world.distributed or dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Both: checkpoints and stop orders of a GPU run go over the CPU's backend.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    if device.type == "cuda" and torch.cuda.device_count() < world.local_size:
        found: list[Any] = [None] * world.size
        gpu = f"{torch.cuda.get_device_properties(device).uuid} of {socket.gethostname()}"
        dist.all_gather_object(found, gpu)  # over gloo
        require_own_gpus(found)


def default_device(world: World) -> str | None:
    """A GPU of this rank's own, where there is one."""
    if not world.distributed or not torch.cuda.is_available():
        return None
    return f"cuda:{gpu_of(world, torch.cuda.device_count(), os.environ.get(VISIBLE, ''))}"


def gpu_of(world: World, count: int, visible: str) -> int:
    """Which of the `count` GPUs that this rank sees is its own. Raises ConfigurationError.

    visible: CUDA_VISIBLE_DEVICES. A scheduler, such as Slurm's or MPI's, may let each rank see one GPU, its
    own: `join` looks whether no two see the same.
    """
    if count >= world.local_size:
        return world.local_rank
    if count == 1 and visible:
        return 0
    raise ConfigurationError(
        f"{world.local_size} processes share {count} GPU(s): NCCL wants one for each; set spottrain run "
        f"--nproc to the number of GPUs, or {VISIBLE} of each process to a GPU of its own"
    )


def require_own_gpus(gpus: Sequence[str]) -> None:
    """`gpus`: of each rank, by its machine. Raises ConfigurationError."""
    for rank, gpu in enumerate(gpus):
        if (other := gpus.index(gpu)) != rank:
            raise ConfigurationError(
                f"ranks {other} and {rank} see the same GPU alone ({gpu}): NCCL wants one for each; set "
                f"{VISIBLE} of each process to a GPU of its own, or leave it out and set spottrain run "
                "--nproc to the number of GPUs"
            )


def total(value: torch.Tensor, world: World) -> torch.Tensor:
    """Sum over all ranks; every rank must call it."""
    if world.distributed:
        dist.all_reduce(value)
    return value


def give_buffers(model: torch.nn.Module, world: World) -> None:
    """Rank 0's buffers to all ranks, as DDP does before a forward pass; every rank must call it.

    For an evaluation: so it is one of what is saved, and equal when it is done again after a resume.
    """
    if world.distributed:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def of_first(value: torch.Tensor, world: World) -> torch.Tensor:
    """What rank 0 has; every rank must call it."""
    if world.distributed:
        dist.broadcast(value, 0)
    return value


def number_of_first(value: float, world: World) -> float:
    """The same of a number. Without a process group, as before the loop has made one, it is one's own."""
    if not (world.distributed and dist.is_initialized()):
        return value
    held = torch.tensor(value, dtype=torch.float64, device=default_device(world))
    return float(of_first(held, world))


def earliest(moment: float, world: World, device: torch.device) -> float:
    """The least of all ranks'; every rank must call it."""
    return Earliest(moment, device).result() if world.distributed else moment


class Earliest:
    """The least of all ranks', on its way; every rank must make one, and ask it for the result.

    Over the CPU's backend where there is one (`join` makes one): then no GPU is waited for.
    """

    def __init__(self, moment: float, device: torch.device) -> None:
        kinds = dist.distributed_c10d._get_default_group()._device_types
        at = torch.device("cpu") if torch.device("cpu") in kinds else device
        self._value = torch.tensor(moment, dtype=torch.float64, device=at)
        self._work = dist.all_reduce(self._value, op=dist.ReduceOp.MIN, async_op=True)

    def result(self) -> float:
        if self._work is not None:
            self._work.wait()
        return float(self._value)


def peer_lost(
    error: BaseException, world: World, known: Callable[[float], bool] = lambda seconds: False
) -> PeerLost | None:
    """What an exception means, where it means that another rank is gone.

    It must come from torch.distributed, gloo or NCCL, and say so. Where they say something else, and for any
    other RuntimeError, it counts if the control channel knows of a rank that is gone: `known` waits so many
    seconds for the news.
    """
    if not world.distributed or not isinstance(error, RuntimeError):
        return None  # a network error of the script's own is an OSError
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
    """Before the process ends by itself: destroying the group waits for no one."""
    if dist.is_initialized() and os.environ.get("TORCHELASTIC_RUN_ID") is None:
        dist.destroy_process_group()
