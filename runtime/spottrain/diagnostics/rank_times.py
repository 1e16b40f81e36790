"""Step times of all ranks, to find the slowest one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from spottrain.diagnostics.step_timer import Shares
from spottrain.distributed.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Mean step time of one rank, in seconds. `own`: without communication, which is waiting for others."""

    own: float
    data: float
    communication: float

    @classmethod
    def of(cls, shares: Shares) -> Rank:
        steps, seconds = max(1, shares.steps), shares.seconds
        communication = seconds.communication / steps
        return cls(own=shares.own_seconds, data=seconds.data / steps, communication=communication)


def gathered(shares: Shares, world: World) -> tuple[Rank, ...]:
    """Returns step times by rank. A CPU collective: all ranks must call it after the same step."""
    mine = Rank.of(shares)
    if not world.distributed:
        return (mine,)
    value = torch.tensor([mine.own, mine.data, mine.communication], dtype=torch.float64)
    found = [torch.empty_like(value) for _ in range(world.size)]
    dist.all_gather(found, value)
    return tuple(
        Rank(own=float(own), data=float(data), communication=float(wait)) for own, data, wait in found
    )
