"""Cost of our choice between spot and on-demand, beside other rules and the optimum.

Each of eight configurations is a job of 48 h on 120 windows of real spot availability. `cost_over_optimum` is
the mean over the configurations of mean cost over mean optimum. `uniform_progress_reproduced`: each mean of
Uniform Progress and of the optimum, rounded to ten cents, is the published one, which is given in ten cents.
`fitted` and `held_out` are the windows of the zone that the constants of our rule were fitted to, and of the
other one. `other_traces` were not looked at while the rule was made. `stopped_sight` is without free sight
of availability (`simulate`), as the operator is. The optimum beside it knows all and asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from bench.spot import baselines, zones
from bench.spot.optimum import least_cost
from bench.spot.ours import Ours
from bench.spot.simulate import Job, Outcome, Replay, Rule, Sight, Zone
from bench.spot.traces import PLENTIFUL, SCARCE, Window, merged, read_trace, read_windows

HOUR: Final = 3600.0
SPOT_PRICE: Final = 0.9731
BOOT_SECONDS: Final = 120.0
"""Where requests are simulated: from a granted one until the node can start the job."""
REQUEST_SECONDS: Final = 600.0
"""How long the operator waits for a spot node: the default of `cheapest.pendingSeconds`."""
FITTED: Final = "us-west-2a"
DEVIATION: Final = 0.05
"""Dollars by which a reproduced mean may differ: half of the published figures' last digit."""
PUBLISHED: Final = {
    (52, 3, SCARCE): (125.8, 116.2),
    (52, 3, PLENTIFUL): (91.4, 77.6),
    (52, 12, SCARCE): (139.2, 125.5),
    (52, 12, PLENTIFUL): (109.7, 87.3),
    (70, 3, SCARCE): (108.1, 104.0),
    (70, 3, PLENTIFUL): (66.9, 61.4),
    (70, 12, SCARCE): (122.6, 113.7),
    (70, 12, PLENTIFUL): (77.5, 68.4),
}
"""(deadline in hours, overhead in minutes, group): dollars of Uniform Progress, of the optimum."""
OTHER_TRACES: Final = {
    "1 node, 04/2023": ("preemption/1-node/aws-04-22-2023", 1),
    "4 of 4 nodes, 08/2023": ("preemption/4-node/aws-08-03-2023", 4),
    "16 of 16 nodes, 08/2023": ("availability/16-node/aws-08-27-2023", 16),
}
RULES: Final[dict[str, Callable[[], Rule]]] = {
    "on_demand": lambda: baselines.with_safety_net(baselines.on_demand),
    "greedy": lambda: baselines.with_safety_net(baselines.greedy),
    "spot_else_on_demand": lambda: baselines.with_safety_net(baselines.spot_else_on_demand),
    "uniform_progress": lambda: baselines.with_safety_net(baselines.uniform_progress),
    "ours": Ours,
}


@dataclass(frozen=True, slots=True)
class Replayed:
    """Every rule on one window."""

    window: Window
    optimum: float
    outcomes: dict[str, Outcome]


def job_of(deadline_hours: float, overhead_minutes: float, sight: Sight = "free") -> Job:
    """Returns the job of "Can't Be Late" at its price of a V100 node; with requests a start has a boot."""
    return Job(
        work=48 * HOUR,
        deadline=deadline_hours * HOUR,
        overhead=overhead_minutes * 60.0 + (0.0 if sight == "free" else BOOT_SECONDS),
        on_demand_price=3.06,
        request=REQUEST_SECONDS if sight == "stopped" else 0.0,
    )


def replay(
    job: Job, windows: Iterable[Window], rules: Sequence[str], sight: Sight = "free"
) -> list[Replayed]:
    found = []
    for window in windows:
        zone = [Zone(window.trace, window.available, [(0.0, SPOT_PRICE)])]
        best = least_cost(job, zone, window.tick_seconds)
        outcomes = {name: Replay(job, zone, window.tick_seconds, sight).run(RULES[name]()) for name in rules}
        found.append(Replayed(window, best, outcomes))
    return found


def row(replayed: Sequence[Replayed]) -> dict[str, Any]:
    """Returns the means of a set of windows: dollars by rule, and the ratios."""
    names = list(replayed[0].outcomes)
    best = mean(each.optimum for each in replayed)
    costs = {name: mean(each.outcomes[name].cost for each in replayed) for name in names}
    return {
        **{name: round(cost, 2) for name, cost in costs.items()},
        "optimum": round(best, 2),
        "uniform_progress_over_optimum": round(costs["uniform_progress"] / best, 4),
        "ours_over_optimum": round(costs["ours"] / best, 4),
        "ours_over_uniform_progress": round(costs["ours"] / costs["uniform_progress"], 4),
    }


def average(rows: Iterable[dict[str, Any]], figure: str) -> float:
    return round(mean(float(each[figure]) for each in rows), 4)


def late(replayed: Iterable[Replayed], rule: str = "ours") -> int:
    return sum(each.outcomes[rule].late for each in replayed)


def title(deadline: int, overhead: int, group: str) -> str:
    return f"{deadline} h, {overhead} min, {group}"


def main_windows(windows: Sequence[Window]) -> dict[tuple[int, int, str], list[Replayed]]:
    """Replays every rule on every window under the eight configurations."""
    found = {}
    for deadline, overhead, group in PUBLISHED:
        chosen = [window for window in windows if window.group == group]
        key = (deadline, overhead, group)
        found[key] = replay(job_of(deadline, overhead), chosen, list(RULES))
        print(f"{title(*key)}: {row(found[key])}", flush=True)
    return found


def largest_deviation(results: dict[tuple[int, int, str], list[Replayed]]) -> float:
    """Returns the dollars between a published mean (one decimal place) and ours, which is not rounded."""
    deviations = []
    for key, (progress, optimum) in PUBLISHED.items():
        costs = [each.outcomes["uniform_progress"].cost for each in results[key]]
        deviations += [abs(mean(costs) - progress)]
        deviations += [abs(mean(each.optimum for each in results[key]) - optimum)]
    return max(deviations)


def halves(results: dict[tuple[int, int, str], list[Replayed]]) -> dict[str, dict[str, float]]:
    """Returns the mean ratios of the zone that constants were fitted to, and of the other one."""
    found = {}
    for name, fitted in (("fitted", True), ("held_out", False)):
        rows = [
            row([each for each in replayed if each.window.trace.startswith(FITTED) == fitted])
            for replayed in results.values()
        ]
        found[name] = {
            figure: average(rows, figure) for figure in ("uniform_progress_over_optimum", "ours_over_optimum")
        }
    return found


def with_requests(windows: Sequence[Window], every: int) -> dict[str, dict[str, Any]]:
    """Replays with availability learned by requests. The optimum knows it, and pays for boots as well."""
    found = {}
    for deadline, overhead, group in PUBLISHED:
        chosen = [window for window in windows if window.group == group][::every]
        job = job_of(deadline, overhead, "stopped")
        replayed = replay(job, chosen, ["uniform_progress", "ours"], "stopped")
        found[title(deadline, overhead, group)] = row(replayed) | {"late": late(replayed)}
        print(f"stopped: {title(deadline, overhead, group)}: {row(replayed)}", flush=True)
    return found


def other_traces(folder: Path) -> dict[str, dict[str, Any]]:
    """Replays traces that the rule was not made with, cut into windows of 70 h."""
    found = {}
    for name, (place, nodes) in OTHER_TRACES.items():
        windows = []
        for path in sorted((folder / place).glob("*.json")):
            trace = merged(read_trace(path, nodes=nodes))
            ticks = int(70 * HOUR / trace.tick_seconds)
            for start in range(0, len(trace.available) - ticks + 1, ticks):
                part = trace.available[start : start + ticks]
                windows.append(Window(trace.name, name, trace.tick_seconds, part))
        rows, missed = [], 0
        for deadline, overhead in ((52, 3), (52, 12), (70, 3), (70, 12)):
            replayed = replay(job_of(deadline, overhead), windows, ["uniform_progress", "ours"])
            rows.append(row(replayed))
            missed += late(replayed)
        figures = ("uniform_progress_over_optimum", "ours_over_optimum", "ours_over_uniform_progress")
        found[name] = {figure: average(rows, figure) for figure in figures}
        found[name] |= {"windows": len(windows), "late": missed}
        print(f"{name}: {found[name]}", flush=True)
    return found


def figures_of(folder: Path, every: int) -> dict[str, Any]:
    windows = read_windows(folder)
    results = main_windows(windows)
    rows = {key: row(replayed) for key, replayed in results.items()}
    deviation = largest_deviation(results)
    everything = [each for replayed in results.values() for each in replayed]
    stopped = with_requests(windows, every)
    several = zones.figures_of(folder, lambda deadline, sight: job_of(deadline, 12, sight), SPOT_PRICE)
    return {
        "cost_over_optimum": average(rows.values(), "ours_over_optimum"),
        "uniform_progress_over_optimum": average(rows.values(), "uniform_progress_over_optimum"),
        "saving_over_uniform_progress": round(1 - average(rows.values(), "ours_over_uniform_progress"), 4),
        "worst_over_uniform_progress": max(each["ours_over_uniform_progress"] for each in rows.values()),
        "missed_deadlines": late(everything),
        "runs": len(everything),
        "uniform_progress_reproduced": deviation <= DEVIATION,
        "largest_deviation_dollars": round(deviation, 4),
        "stopped_cost_over_optimum": average(stopped.values(), "ours_over_optimum"),
        "stopped_uniform_progress_over_optimum": average(stopped.values(), "uniform_progress_over_optimum"),
        **{
            f"zones_{sight}_over_{other}": average(each.values(), f"ours_over_{other}")
            for sight, each in several.items()
            for other in ("optimum", "single_best", "single_uniform_progress")
        },
        "configurations": {title(*key): each for key, each in rows.items()},
        "halves": halves(results),
        "other_traces": other_traces(folder),
        "stopped_sight": stopped,
        "zones": several,
    }
