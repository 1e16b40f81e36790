"""Instance types of three clouds with their list prices, from `instances.csv`.

Prices age: each has a source and a date, and `spottrain plan` shows both. An empty price is unknown, and is
never taken for free. A spot price is that of one zone; another zone may cost several times as much.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

SOURCES: Final = {
    "karpenter-aws": (
        "2026-07-20",
        "https://github.com/aws/karpenter-provider-aws/blob/1d927085dd81a9df9301e613f371dac5b4d16bfe/"
        "pkg/providers/pricing/zz_generated.pricing_aws.go",
    ),
    "karpenter-gcp": (
        "2026-08-03",
        "https://github.com/cloudpilot-ai/karpenter-provider-gcp/blob/417f047b117521aba6d3ab120dac538a92161bf4/"
        "pkg/providers/pricing/initial-prices.json",
    ),
    "karpenter-azure": (
        "2026-06-18",
        "https://github.com/Azure/karpenter-provider-azure/blob/352646f599290c3a6d2f9710fb535a7b288f88ed/"
        "pkg/providers/pricing/zz_generated.pricing.go",
    ),
    "skypilot": (
        "undated, after mid-2025",
        "https://github.com/skypilot-org/skypilot-catalog, catalogs/v8 @00148f2a and @006059e0",
    ),
    "gcp-billing": (
        "2026-10-13",
        "Google's Billing Catalog API, by https://huggingface.co/datasets/tanod/cloud-gpu-list-prices",
    ),
}
"""Date and place of each source of prices. Where a row names two, its price is a sum of both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What an instance costs."""

    usd_per_hour: float
    where: str
    """Region, or zone of a spot price."""
    date: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """An instance type. Shapes are from the clouds' own pages on instance types."""

    cloud: str
    name: str
    gpu: str | None
    """Key of `gpu_catalogue.GPUS`; None: the CPU computes."""
    gpus: int
    vcpus: int
    memory: float
    """Bytes of the node, not of its GPUs."""
    network: float | None
    """Bytes/s in one direction; None: unknown, so only one node can be planned with."""
    cpu_flops: float
    """Peak fp32 FLOP/s of all vCPUs; 0 with a GPU. An upper bound: 32 FLOPs per vCPU and cycle (AVX-512 with
    two units on half a core, or Zen 4 on a whole one) times the all-core turbo."""
    on_demand: Price | None
    spot: Price | None

    @property
    def devices(self) -> int:
        """How many ranks train on one node: one for each GPU, or one for the whole CPU."""
        return self.gpus or 1


@cache
def instances() -> tuple[Instance, ...]:
    lines = (files(__package__) / "instances.csv").read_text(encoding="utf-8").splitlines()
    return tuple(_instance(row) for row in csv.DictReader(lines))


def _instance(row: dict[str, str]) -> Instance:
    vcpus, network = int(row["vcpus"]), row["network_gbit"]
    return Instance(
        cloud=row["cloud"],
        name=row["name"],
        gpu=row["gpu"] or None,
        gpus=int(row["gpus"]),
        vcpus=vcpus,
        memory=float(row["memory_gib"]) * 2**30,
        network=float(network) * 1e9 / 8 if network else None,
        cpu_flops=float(row["cpu_gflops"] or 0) * 1e9 * vcpus,
        on_demand=_price(row["on_demand"], row["region"], row["on_demand_source"]),
        spot=_price(row["spot"], row["zone"], row["spot_source"]),
    )


def _price(usd: str, where: str, sources: str) -> Price | None:
    if not usd:
        return None
    dates, places = zip(*(SOURCES[name] for name in sources.split("+")), strict=True)
    return Price(usd_per_hour=float(usd), where=where, date=" and ".join(dates), source=" and ".join(places))
