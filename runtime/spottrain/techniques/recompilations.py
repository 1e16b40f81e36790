"""How often torch.compile has compiled in this process. Called by the loop at each line; costs a look-up.

Dynamo counts by itself (torch 2.15: `torch._dynamo.utils.counters`, "stats" -> "unique_graphs", and
`compilation_time_metrics`, seconds by part). Nothing is imported where nothing was compiled.

A first change of a shape is one more compilation, after which Dynamo takes that size as a variable
(`dynamic=None`, the default): that is no recompiling. With `dynamic=False`, or where a guard is on a Python
number, each value compiles anew, eight times by default (`torch._dynamo.config.recompile_limit`); from then
on the frame quietly runs uncompiled.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilations:
    """So far, in this process."""

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
