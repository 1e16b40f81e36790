"""Seconds of a gradient all-reduce, and how much of the added GPUs' work it leaves.

Bandwidths are in bytes per second and direction. Data sheets name NVLink's sum of both directions (600 GB/s
for an A100 is 300 GB/s each way) and networks in bits. A ring needs n - 1 steps twice, in each of which every
rank sends S / n bytes (Patarasuk and Yuan 2009; nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GRADIENT_BYTES: Final = 4
"""Per parameter: weights and gradients are fp32, also where the step computes in bf16."""
BACKWARD_SHARE: Final = 2 / 3
"""Share of a step's compute in the backward pass, beside which gradients can be sent."""
OVERLAP: Final = 0.9
"""Share of the backward pass beside which DistributedDataParallel sends: all but the last bucket. Li et al.
2020 (arXiv:2006.15704) overlap all buckets but the last; an assumption, not measured here."""
LATENCY: Final = 10e-6
"""Seconds of one ring step within a node: an assumption, which matters only for small models."""
NETWORK_LATENCY: Final = 30e-6
"""The same between nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """How ranks are connected.

    nodes, gpus_per_node: counts. link: bytes/s from one GPU to another in a node, one direction. network:
    bytes/s of a whole node, one direction.
    """

    nodes: int
    gpus_per_node: int
    link: float
    network: float

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


def ring_seconds(size: float, ranks: int, bandwidth: float, latency: float = 0.0) -> float:
    """Returns seconds of a ring all-reduce of `size` bytes."""
    steps = 2 * (ranks - 1)
    return steps * latency + steps / ranks * size / bandwidth


def all_reduce_seconds(size: float, topology: Topology) -> float:
    """Returns seconds of the all-reduce of `size` bytes: a ring in a node, hierarchical over several.

    Hierarchical: reduce-scatter within each node, a ring between nodes of the part of each GPU (all at the
    same time over the node's network), all-gather within each node.
    """
    here = ring_seconds(size, topology.gpus_per_node, topology.link, LATENCY)
    return here + ring_seconds(size, topology.nodes, topology.network, NETWORK_LATENCY)


def step_exchange(
    parameters: float,
    topology: Topology,
    *,
    mode: str,
    accumulation: int,
    gradient_bytes: int = GRADIENT_BYTES,
) -> tuple[float, float]:
    """Returns seconds of the exchange of one step, and the share of the compute that it can hide behind.

    DDP sends fp32 gradients once, beside the last backward pass. FSDP, as spottrain uses it, gathers the fp32
    weights before the forward and the backward pass of each micro-batch, which together send as much as one
    all-reduce, and divides the gradients among the ranks once, which is half of one (Zhao et al. 2023,
    arXiv:2304.11277). It sends beside the whole step.
    """
    once = all_reduce_seconds(gradient_bytes * parameters, topology)
    if mode.startswith("fsdp"):
        return (accumulation + 0.5) * once, OVERLAP
    return once, OVERLAP * BACKWARD_SHARE / accumulation


def efficiency(compute_seconds: float, exchange_seconds: float, *, hidden_share: float) -> float:
    """Returns throughput beside ideal, 0 to 1: what is not hidden behind compute is waited for.

    Args:
        compute_seconds: of one optimizer step on one rank, all micro-batches.
        exchange_seconds: of the same step.
        hidden_share: share of the compute beside which the exchange runs, 0 to 1; see `step_exchange`.
    """
    hidden = hidden_share * compute_seconds
    return compute_seconds / (compute_seconds + max(0.0, exchange_seconds - hidden))


def advice(*, efficiency: float, topology: Topology, gradient_bytes: int, accumulation: int) -> list[str]:
    """Returns what reduces the communication, the greatest effect first; empty at 90 % and more."""
    if efficiency >= 0.9:
        return []
    found = []
    if gradient_bytes > 2:
        found.append("send gradients as bf16 (a communication hook of DDP): half of the bytes")
    found.append(
        f"accumulate more micro-batches than {accumulation} per step (a greater globalBatchSize): the "
        "exchange happens once per step"
    )
    if topology.nodes > 1:
        found.append("use fewer nodes with more GPUs each, or instances with a faster network")
    elif topology.link < 100e9:
        found.append("use GPUs with NVLink, or fewer GPUs")
    found.append("run several smaller jobs side by side, if there are several")
    return found
