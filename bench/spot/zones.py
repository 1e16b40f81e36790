"""Several zones at once: a job that may move between them, beside one that stays in one zone.

A set is of traces of one instance type that were recorded at the same time. It is cut into windows of 70 h.
All zones have the same price, and a move between them costs a start, of 12 minutes.

    ours                in all zones, one after the other
    uniform_progress    the same with its rule
    single              ours in one zone: the mean over the zones; single_best: the zone that hindsight picks
    optimum             moves between all zones, knows everything, and asks for nothing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final

from bench.spot.baselines import uniform_progress, with_safety_net
from bench.spot.optimum import least_cost
from bench.spot.ours import Ours
from bench.spot.simulate import Job, Replay, Zone
from bench.spot.traces import Trace, TraceError, merged, read_trace

SETS: Final = {
    "V100, 2 zones, 10/2022": ("availability/1-node/aws-10-26-2022", "us-west-2?_v100_1", 1),
    "8 V100, 2 zones, 10/2022": ("availability/1-node/aws-10-26-2022", "us-west-2?_v100_8", 1),
    "K80, 2 zones, 10/2022": ("availability/1-node/aws-10-26-2022", "us-west-2?_k80_1", 1),
    "8 K80, 2 zones, 10/2022": ("availability/1-node/aws-10-26-2022", "us-west-2?_k80_8", 1),
    "V100, 4 zones, 04/2023": ("preemption/1-node/aws-04-22-2023", "us-*_v100_1", 1),
    "16 of 16 nodes, 2 zones, 08/2023": ("availability/16-node/aws-08-27-2023", "us-west-2?_v100_1", 16),
}
"""Folder, files, and nodes. Sets whose traces differ in length are left out: their times may differ."""
DEADLINES: Final = (52, 70)
WINDOW_SECONDS: Final = 70 * 3600.0


def read_set(folder: Path, name: str) -> list[Trace]:
    """Reads the traces of a set.

    Raises:
        TraceError: There are fewer than two, or they differ in length.
    """
    place, files, nodes = SETS[name]
    traces = [
        merged(read_trace(path, nodes=nodes)) for path in sorted((folder / place).glob(f"{files}.json"))
    ]
    if len(traces) < 2 or len({(each.tick_seconds, len(each.available)) for each in traces}) > 1:
        raise TraceError(f"{folder / place}/{files}.json: not two or more traces of one length")
    return traces


def windows_of(traces: Sequence[Trace], price: float) -> list[list[Zone]]:
    """Cuts the traces of a set into windows."""
    ticks = int(WINDOW_SECONDS / traces[0].tick_seconds)
    starts = range(0, len(traces[0].available) - ticks + 1, ticks)
    return [
        [Zone(trace.name, trace.available[start : start + ticks], [(0.0, price)]) for trace in traces]
        for start in starts
    ]


def row(job: Job, windows: Sequence[Sequence[Zone]], tick: float) -> dict[str, Any]:
    """Returns the mean dollars of each way, and their ratios."""
    ours = [Replay(job, zones, tick).run(Ours()) for zones in windows]
    progress = [Replay(job, zones, tick).run(with_safety_net(uniform_progress)) for zones in windows]
    alone = [[Replay(job, [zone], tick).run(Ours()).cost for zone in zones] for zones in windows]
    costs = {
        "ours": mean(each.cost for each in ours),
        "uniform_progress": mean(each.cost for each in progress),
        "single": mean(map(mean, alone)),
        "single_best": min(map(mean, zip(*alone, strict=True))),
        "optimum": mean(least_cost(job, zones, tick) for zones in windows),
    }
    found = {name: round(cost, 2) for name, cost in costs.items()}
    ratios = {
        f"ours_over_{name}": round(costs["ours"] / cost, 4) for name, cost in costs.items() if name != "ours"
    }
    return found | ratios | {"windows": len(windows), "late": sum(each.late for each in ours)}


def figures_of(folder: Path, jobs: Callable[[int], Job], price: float) -> dict[str, dict[str, Any]]:
    """Returns a row for each set and deadline. `jobs`: returns the job of a deadline in hours."""
    found: dict[str, dict[str, Any]] = {}
    for name in SETS:
        traces = read_set(folder, name)
        windows, tick = windows_of(traces, price), traces[0].tick_seconds
        for deadline in DEADLINES:
            found[f"{name}, {deadline} h"] = row(jobs(deadline), windows, tick)
            print(f"zones: {name}, {deadline} h: {found[f'{name}, {deadline} h']}", flush=True)
    return found
