"""Counts the compilations of torch.compile in this process, at the cost of a dictionary look-up.

Dynamo keeps the counters (torch 2.15: `torch._dynamo.utils.counters`, "stats" -> "unique_graphs", and
`compilation_time_metrics`, seconds by phase). Without a compilation nothing is imported.

The first change of a shape compiles once more; then Dynamo treats that size as dynamic (`dynamic=None`, the
default). With `dynamic=False`, or a guard on a Python number, each new value compiles again, up to eight
times (`torch._dynamo.config.recompile_limit`). After that the frame silently runs uncompiled.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilations:
    """Number and seconds of compilations in this process so far."""

    count: int = 0
    seconds: float = 0.0

    def since(self, before: Compilations) -> Compilations:
        return Compilations(count=self.count - before.count, seconds=self.seconds - before.seconds)


def compilations() -> Compilations:
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return Compilations()
    seconds = utils.compilation_time_metrics.get("_compile.compile_inner", [])
    return Compilations(count=int(utils.counters["stats"]["unique_graphs"]), seconds=float(sum(seconds)))
