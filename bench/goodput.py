"""How much of the paid time becomes saved work, on real spot runs: `make bench-goodput TRACES=FOLDER`.

A run begins with a restart, then alternates work and saves that pause it; work after the last save is lost at
its end. Goodput is saved work / paid time. The interval is the runtime's own (`save_interval`): Young's and
Daly's, with the time between losses learned online from a Gamma prior, zone by zone.

    interval_over_best_fixed   goodput / that of each zone's best fixed interval, which only hindsight knows
    goodput_with_notices       of RECALL of the interruptions a notice tells in time for a last save

Both are means over the zones, with a save of 30 s and a restart of 180 s; `settings` has others, and those
that were measured on this machine (`bench/RESULTS.md`). A trace's first run counts from where the trace
begins; its last run has no end and is left out. The last line is JSON. Exit code 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any, Final

from spottrain.lifecycle.save_interval import (
    FIRST_SECONDS,
    MOST_SECONDS,
    auto_seconds,
    seconds_between_losses,
    young,
)
from spottrain_operator.policies.spot_runs import SHAPE, UP_HOURS

from bench.policy.traces import Trace, TraceError, read_trace, read_windows

RECALL: Final = 0.95
SETS: Final = ("availability/1-node/aws-10-26-2022", "preemption/1-node/aws-04-22-2023")
MISSING: Final = "availability/1-node/aws-02-15-2023"
"""A set that published figures used and that may be absent; it is read where it is there."""
FIXED: Final = tuple(15.0 * 1.1**power for power in range(70))
"""Fixed intervals that hindsight chooses from: 15 s to 3 h."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Seconds that a save pauses the training, that a restart takes, and until a save is durable."""

    save: float
    restart: float
    upload: float = 0.0


STANDARD: Final = "save 30 s, restart 180 s"
SETTINGS: Final = {
    "save 5 s, restart 180 s": Setting(5, 180),
    STANDARD: Setting(30, 180),
    "save 60 s, restart 300 s": Setting(60, 300),
    "measured: 1 GiB, cold compile cache": Setting(0.079, 53.9, 6.2),
    "measured: 1 GiB, warm compile cache": Setting(0.079, 12.4, 6.2),
}
"""Measured: `stall_s`, `durable_s_ours` and `to_first_step` of bench/RESULTS.md, without a node's boot."""


class Learned:
    """The runtime's `auto` interval. A loss is an interruption without a last save."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._trained, self._losses = 0.0, 0.0

    def seconds(self, running: float) -> float:
        """Returns the interval after `running` seconds of the current run."""
        between = seconds_between_losses(self._trained + running, self._losses)  # type: ignore[arg-type]
        return auto_seconds(stall=self._setting.save, upload=self._setting.upload, loss_seconds=between)

    def ended(self, seconds: float, losses: float) -> None:
        self._trained += seconds
        self._losses += losses


class ByAge:
    """A candidate: the older a run, the rarer its end, and the longer the interval.

    The time between losses is that of a Weibull hazard, as in the operator's `spot_runs`, over the coming
    interval. Its scale is learned from a prior that weighs as much as three runs.
    """

    PRIOR_RUNS: Final = 3.0

    def __init__(self, setting: Setting, recall: float) -> None:
        self._setting, self._lost = setting, 1 - recall
        self._count = self.PRIOR_RUNS
        self._total = self.PRIOR_RUNS * (UP_HOURS * 3600) ** SHAPE

    def seconds(self, running: float) -> float:
        """Returns the interval after `running` seconds of the current run."""
        age, found = running + self._setting.restart, FIRST_SECONDS
        rate = self._lost * self._count / (self._total + age**SHAPE)
        for _ in range(6):
            hazard = rate * ((age + found) ** SHAPE - age**SHAPE) / found
            found = min(max(young(self._setting.save, 1 / hazard), self._setting.upload), MOST_SECONDS)
        return float(found)

    def ended(self, seconds: float) -> None:
        self._count += 1
        self._total += seconds**SHAPE


def saved(length: float, setting: Setting, interval: Callable[[float], float], recall: float) -> float:
    """Returns the expected seconds of work that outlast a run.

    With probability `recall` a notice allows a last save, which must fit before the end.
    """
    kept, unsaved, now = 0.0, 0.0, setting.restart
    while now < length:
        work = interval(now - setting.restart)
        if now + work + setting.save > length:
            unsaved = max(0.0, length - setting.save - now)
            break
        kept += work
        now += work + setting.save
    return kept + recall * unsaved


def goodput_learned(runs: Sequence[float], setting: Setting, recall: float, loss: float) -> float:
    """Returns saved / paid with the runtime's interval; an interruption counts as `loss` losses."""
    learned, total = Learned(setting), 0.0
    for length in runs:
        total += saved(length, setting, learned.seconds, recall)
        learned.ended(max(0.0, length - setting.restart), loss)
    return total / sum(runs)


def goodput_by_age(runs: Sequence[float], setting: Setting, recall: float) -> float:
    """Returns saved / paid with the candidate's interval."""
    candidate, total = ByAge(setting, recall), 0.0
    for length in runs:
        total += saved(length, setting, candidate.seconds, recall)
        candidate.ended(length)
    return total / sum(runs)


def best_fixed(runs: Sequence[float], setting: Setting, recall: float) -> float:
    """Returns saved / paid with the interval that hindsight finds best."""

    def kept(interval: float) -> float:
        return sum(saved(length, setting, lambda _: interval, recall) for length in runs)

    return max(map(kept, FIXED)) / sum(runs)


def runs_of(trace: Trace) -> list[float]:
    """Returns the seconds of the runs with spot; the last one only if its end was seen."""
    found = [(up, len(list(ticks)) * trace.tick_seconds) for up, ticks in groupby(trace.available)]
    return [seconds for up, seconds in found[:-1] if up]


def zone_row(runs: Sequence[float], setting: Setting) -> dict[str, float]:
    """Returns the figures of one zone."""
    best = best_fixed(runs, setting, 0.0)
    learned = goodput_learned(runs, setting, 0.0, 1.0)
    ceiling = sum(max(0.0, length - setting.restart) for length in runs) / sum(runs)
    return {
        "mean_run_hours": mean(runs) / 3600,
        "goodput": learned,
        "goodput_best_fixed": best,
        "interval_over_best_fixed": learned / best,
        "interval_by_age_over_best_fixed": goodput_by_age(runs, setting, 0.0) / best,
        "goodput_with_notices": goodput_learned(runs, setting, RECALL, 1 - RECALL),
        "goodput_with_notices_by_age": goodput_by_age(runs, setting, RECALL),
        "goodput_with_notices_all_losses": goodput_learned(runs, setting, RECALL, 1.0),
        "goodput_with_notices_best_fixed": best_fixed(runs, setting, RECALL),
        "ceiling": ceiling,
    }


def means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(mean(each[name] for each in rows), 4) for name in rows[0]}


def figures_of(folder: Path) -> dict[str, Any]:
    read_windows(folder)  # checks the polarity
    paths = [path for place in (*SETS, MISSING) for path in sorted((folder / place).glob("*.json"))]
    zones = {f"{path.parent.name} {path.stem}": runs_of(read_trace(path)) for path in paths}
    zones = {name: runs for name, runs in zones.items() if runs}
    rows = {
        name: {zone: zone_row(runs, each) for zone, runs in zones.items()} for name, each in SETTINGS.items()
    }
    standard = means(list(rows[STANDARD].values()))
    return {
        "interval_over_best_fixed": standard["interval_over_best_fixed"],
        "interval_by_age_over_best_fixed": standard["interval_by_age_over_best_fixed"],
        "goodput_with_notices": standard["goodput_with_notices"],
        "goodput_with_notices_best_fixed": standard["goodput_with_notices_best_fixed"],
        "ceiling": standard["ceiling"],
        "zones": len(zones),
        "runs": sum(len(runs) for runs in zones.values()),
        "settings": {name: means(list(each.values())) for name, each in rows.items()},
        "by_zone": {
            zone: {figure: round(value, 4) for figure, value in each.items()}
            for zone, each in rows[STANDARD].items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", nargs="?", default=os.environ.get("SPOTTRAIN_TRACES"), help="their folder")
    options = parser.parse_args()
    if not options.traces:
        print("name the folder of the spot traces: make bench-goodput TRACES=FOLDER", file=sys.stderr)
        return 2
    try:
        figures = figures_of(Path(options.traces))
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(figures))
    met = figures["interval_over_best_fixed"] >= 0.99 and figures["goodput_with_notices"] >= 0.955
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
