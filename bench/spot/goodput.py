"""How much of the paid time becomes saved work, on real spot runs.

A run begins with a restart, then alternates work and saves that pause it; work after the last save is lost at
its end. Goodput is saved work / paid time. The interval is the runtime's own (`save_interval`): Young's and
Daly's, with the time between losses learned online, zone by zone.

    interval_over_best_fixed   goodput / that of each zone's best fixed interval, which only hindsight knows
    goodput_with_notices       of RECALL of the interruptions a notice tells in time for a last save

With notices the standard setting loses 3.0 % of the time to restarts, 1.0 % to periodic saves, 0.5 % to
last saves and 0.7 % to steps that are done again. So no interval comes to 0.955; a save that pauses for 13 s
would, or a restart of 130 s.

Both are means over the zones, with a save of 30 s and a restart of 180 s; `settings` has others, and those of
the newest records of `checkpoint` and `restart`, without a node's boot. A trace's first run counts from where
the trace begins; its last run has no end and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any, Final

from spottrain.lifecycle.save_interval import Losses, auto_seconds

from bench import record
from bench.spot.traces import Trace, read_trace, read_windows

RECALL: Final = 0.95
SETS: Final = ("availability/1-node/aws-10-26-2022", "preemption/1-node/aws-04-22-2023")
MISSING: Final = "availability/1-node/aws-02-15-2023"
"""A set that published figures used and that may be absent; it is read where it is there."""
FIXED: Final = tuple(15.0 * 1.1**power for power in range(70))
"""Fixed intervals that hindsight chooses from: 15 s to 3 h."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Seconds that a save takes from the training, that a restart takes, and until a save is durable."""

    save: float
    restart: float
    upload: float = 0.0


STANDARD: Final = "save 30 s, restart 180 s"
SETTINGS: Final = {
    "save 5 s, restart 180 s": Setting(5, 180),
    STANDARD: Setting(30, 180),
    "save 60 s, restart 300 s": Setting(60, 300),
}
Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""Of each benchmark."""


def measured(records: Records) -> dict[str, Setting]:
    """Returns the settings that the newest records of `checkpoint` and `restart` have.

    Raises:
        ValueError: There is no record, or it lacks a figure.
    """
    try:
        save, start = (records[name][0] for name in ("checkpoint", "restart"))
        names = ("work_lost_s_per_save", "durable_s_ours")
        lost, durable = (float(save["figures"][name]["median"]) for name in names)
        size = f"{float(save['figures']['bytes']) / 2**30:.0f} GiB"
        restarts = {
            kind: float(start["figures"][kind]["to_first_step"]["median"]) for kind in ("cold", "warm")
        }
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise ValueError(
            f"no measured save and restart ({error!r}): run the benchmarks checkpoint and restart"
        ) from None
    return {
        f"measured: {size}, {kind} compile cache": Setting(lost, restart, durable)
        for kind, restart in restarts.items()
    }


class Learned:
    """The runtime's `auto` interval. A loss is an interruption without a last save."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._trained, self._attempts, self._lost = 0.0, 0, 0.0

    def seconds(self, running: float) -> float:
        """Returns the interval after `running` seconds of the current run."""
        losses = Losses(
            trained=self._trained + running, here=running, attempts=self._attempts, lost=self._lost
        )
        return auto_seconds(cost=self._setting.save, upload=self._setting.upload, losses=losses)

    def ended(self, seconds: float, lost: float) -> None:
        """Notes the end of a run, of which the share `lost` lost steps."""
        self._trained += seconds
        self._attempts += 1
        self._lost += lost


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


def goodput_learned(runs: Sequence[float], setting: Setting, recall: float) -> float:
    """Returns saved / paid with the runtime's interval; of each interruption 1 - recall is a loss."""
    learned, total = Learned(setting), 0.0
    for length in runs:
        total += saved(length, setting, learned.seconds, recall)
        learned.ended(max(0.0, length - setting.restart), 1 - recall)
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
    learned = goodput_learned(runs, setting, 0.0)
    ceiling = sum(max(0.0, length - setting.restart) for length in runs) / sum(runs)
    return {
        "mean_run_hours": mean(runs) / 3600,
        "goodput": learned,
        "goodput_best_fixed": best,
        "interval_over_best_fixed": learned / best,
        "goodput_with_notices": goodput_learned(runs, setting, RECALL),
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
    settings = SETTINGS | measured(record.stored())
    rows = {
        name: {zone: zone_row(runs, each) for zone, runs in zones.items()} for name, each in settings.items()
    }
    standard = means(list(rows[STANDARD].values()))
    return {
        "interval_over_best_fixed": standard["interval_over_best_fixed"],
        "goodput_with_notices": standard["goodput_with_notices"],
        "goodput_with_notices_best_fixed": standard["goodput_with_notices_best_fixed"],
        "ceiling": standard["ceiling"],
        "traces": len(zones),
        "spot_runs": sum(len(runs) for runs in zones.values()),
        "measured": {name: asdict(settings[name]) for name in settings if name not in SETTINGS},
        "settings": {name: means(list(each.values())) for name, each in rows.items()},
        "by_zone": {
            zone: {figure: round(value, 4) for figure, value in each.items()}
            for zone, each in rows[STANDARD].items()
        },
    }
