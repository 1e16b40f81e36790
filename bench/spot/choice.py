"""Cost of our choice between spot and on-demand, beside other rules and the optimum.

Each of eight configurations is a job of 48 h on 120 windows of real spot availability. `cost_over_optimum`
is the mean over the configurations of mean cost over mean optimum. All rules see what the operator sees
(`simulate`); the optimum knows the future and asks for nothing. `fitted` and `held_out` are the windows of
the zone that the constants of our rule were fitted to, and of the other one. `other_traces` were not looked
at while the rule was made.

`uniform_progress_reproduced`: without a boot, each mean of Uniform Progress and of the optimum, rounded to
ten cents, is the published one, which is given in ten cents.
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
from bench.spot.simulate import Job, Outcome, Replay, Rule, Zone
from bench.spot.traces import PLENTIFUL, SCARCE, Window, merged, read_trace, read_windows

HOUR: Final = 3600.0
SPOT_PRICE: Final = 0.9731
BOOT_SECONDS: Final = 120.0
"""From a granted request until the node can start the job."""
REQUEST_SECONDS: Final = 600.0
"""How long the operator waits for a spot node: the default of `cheapest.pendingSeconds`."""
FITTED: Final = "us-west-2a"
DEVIATION: Final = 0.05
"""Dollars by which a reproduced mean may differ: half of the published figures' last digit."""
Setting = tuple[int, int, str]
"""Deadline in hours, overhead in minutes, group of windows."""
PUBLISHED: Final[dict[Setting, tuple[float, float]]] = {
    (52, 3, SCARCE): (125.8, 116.2),
    (52, 3, PLENTIFUL): (91.4, 77.6),
    (52, 12, SCARCE): (139.2, 125.5),
    (52, 12, PLENTIFUL): (109.7, 87.3),
    (70, 3, SCARCE): (108.1, 104.0),
    (70, 3, PLENTIFUL): (66.9, 61.4),
    (70, 12, SCARCE): (122.6, 113.7),
    (70, 12, PLENTIFUL): (77.5, 68.4),
}
"""Dollars of Uniform Progress, of the optimum."""
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
BOTH: Final = ("uniform_progress", "ours")


@dataclass(frozen=True, slots=True)
class Replayed:
    """Some rules on one window."""

    window: Window
    optimum: float
    outcomes: dict[str, Outcome]


def job_of(deadline_hours: float, overhead_minutes: float, boot: float = BOOT_SECONDS) -> Job:
    """Returns the job of "Can't Be Late" at its price of a V100 node. Its starts have no boot."""
    return Job(
        work=48 * HOUR,
        deadline=deadline_hours * HOUR,
        overhead=overhead_minutes * 60.0 + boot,
        on_demand_price=3.06,
        boot=boot,
        request=REQUEST_SECONDS,
    )


def replay(job: Job, windows: Iterable[Window], rules: Sequence[str]) -> list[Replayed]:
    found = []
    for window in windows:
        zone = [Zone(window.trace, window.available, [(0.0, SPOT_PRICE)])]
        best = least_cost(job, zone, window.tick_seconds)
        outcomes = {name: Replay(job, zone, window.tick_seconds).run(RULES[name]()) for name in rules}
        found.append(Replayed(window, best, outcomes))
    return found


def row(replayed: Sequence[Replayed]) -> dict[str, Any]:
    """Returns the means of a set of windows: dollars by rule, and the ratios."""
    best = mean(each.optimum for each in replayed)
    costs = {name: mean(each.outcomes[name].cost for each in replayed) for name in replayed[0].outcomes}
    return {
        **{name: round(cost, 2) for name, cost in costs.items()},
        "optimum": round(best, 2),
        "uniform_progress_over_optimum": round(costs["uniform_progress"] / best, 4),
        "ours_over_optimum": round(costs["ours"] / best, 4),
        "ours_over_uniform_progress": round(costs["ours"] / costs["uniform_progress"], 4),
        "late": sum(each.outcomes["ours"].late for each in replayed),
    }


def average(rows: Iterable[dict[str, Any]], figure: str) -> float:
    return round(mean(float(each[figure]) for each in rows), 4)


def title(setting: Setting) -> str:
    deadline, overhead, group = setting
    return f"{deadline} h, {overhead} min, {group}"


def main_windows(windows: Sequence[Window]) -> dict[Setting, list[Replayed]]:
    """Replays every rule on every window under the eight configurations."""
    found = {}
    for setting in PUBLISHED:
        deadline, overhead, group = setting
        chosen = [window for window in windows if window.group == group]
        found[setting] = replay(job_of(deadline, overhead), chosen, list(RULES))
        print(f"{title(setting)}: {row(found[setting])}", flush=True)
    return found


def largest_deviation(windows: Sequence[Window]) -> float:
    """Returns the dollars between a published mean (one decimal place) and ours, which is not rounded."""
    deviations = []
    for (deadline, overhead, group), (progress, optimum) in PUBLISHED.items():
        chosen = [window for window in windows if window.group == group]
        replayed = replay(job_of(deadline, overhead, boot=0.0), chosen, ["uniform_progress"])
        costs = [each.outcomes["uniform_progress"].cost for each in replayed]
        deviations += [abs(mean(costs) - progress), abs(mean(each.optimum for each in replayed) - optimum)]
    return max(deviations)


def halves(results: dict[Setting, list[Replayed]]) -> dict[str, dict[str, float]]:
    """Returns the mean ratios of the zone that constants were fitted to, and of the other one."""
    found = {}
    for name, fitted in (("fitted", True), ("held_out", False)):
        rows = [
            row([each for each in replayed if each.window.trace.startswith(FITTED) == fitted])
            for replayed in results.values()
        ]
        found[name] = {f"{rule}_over_optimum": average(rows, f"{rule}_over_optimum") for rule in BOTH}
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
        settings = ((52, 3), (52, 12), (70, 3), (70, 12))
        rows = [row(replay(job_of(*setting), windows, BOTH)) for setting in settings]
        figures = ("uniform_progress_over_optimum", "ours_over_optimum", "ours_over_uniform_progress")
        found[name] = {figure: average(rows, figure) for figure in figures}
        found[name] |= {"windows": len(windows), "late": sum(each["late"] for each in rows)}
        print(f"{name}: {found[name]}", flush=True)
    return found


def figures_of(folder: Path, every: int) -> dict[str, Any]:
    windows = read_windows(folder)[::every]
    results = main_windows(windows)
    rows = {setting: row(replayed) for setting, replayed in results.items()}
    deviation = largest_deviation(windows)
    several = zones.figures_of(folder, lambda deadline: job_of(deadline, 12), SPOT_PRICE)
    return {
        "cost_over_optimum": average(rows.values(), "ours_over_optimum"),
        "uniform_progress_over_optimum": average(rows.values(), "uniform_progress_over_optimum"),
        "saving_over_uniform_progress": round(1 - average(rows.values(), "ours_over_uniform_progress"), 4),
        "worst_over_uniform_progress": max(each["ours_over_uniform_progress"] for each in rows.values()),
        "missed_deadlines": sum(each["late"] for each in (*rows.values(), *several.values())),
        "runs": sum(len(replayed) for replayed in results.values()),
        "uniform_progress_reproduced": deviation <= DEVIATION,
        "largest_deviation_dollars": round(deviation, 4),
        **{
            f"zones_over_{other}": average(several.values(), f"ours_over_{other}")
            for other in ("optimum", "single_best", "uniform_progress")
        },
        "configurations": {title(setting): each for setting, each in rows.items()},
        "halves": halves(results),
        "other_traces": other_traces(folder),
        "zones": several,
    }
