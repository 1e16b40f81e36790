"""Size of a checkpoint, and whether it can be saved within a cloud's notice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from spottrain.lifecycle.notice_budget import NoticeBudget

WEIGHT_BYTES: Final = 4
"""Weights are stored in fp32, also where the step computes in bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Seconds between the notice and the end of the node."""

    seconds: float
    source: str


NOTICES: Final = {
    "AWS": Notice(
        seconds=120,
        source="https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html",
    ),
    "Google Cloud": Notice(seconds=30, source="https://cloud.google.com/compute/docs/instances/spot"),
    "GKE pods": Notice(
        seconds=15,
        source="https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms (the other 15 s are for "
        "system pods)",
    ),
    "Azure": Notice(
        seconds=30, source="https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events"
    ),
}


def size(parameters: float, optimizer_bytes: int) -> float:
    """Returns the bytes of a checkpoint: weights and the optimizer's state, no gradients."""
    return parameters * (WEIGHT_BYTES + optimizer_bytes)


def save(size: float, nodes: int, bandwidth: float, step_seconds: float, notice: Notice) -> NoticeBudget:
    """Returns the time that a save at a notice takes, as the runtime estimates it.

    Args:
        size: bytes of the checkpoint.
        nodes: how many nodes upload their part at the same time (with DDP one, with FSDP all).
        bandwidth: bytes per second of one node to the store.
        step_seconds: of one optimizer step, which is finished first.
        notice: what the cloud gives.
    """
    return NoticeBudget(
        bytes=math.ceil(size / nodes),
        bandwidth=bandwidth,
        step_seconds=step_seconds,
        copy_seconds=0.0,
        grace=notice.seconds,
    )
