"""What cost the most time, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from spottrain.core.log_format import duration

from spottrain_cli.jobs import BUCKETS
from spottrain_cli.report.facts import Report

WORTH: Final = 0.05
"""Least share of the time of a part that is worth a word."""
FIXES: Final = {
    "startup": "Import less before the first step, and keep the compile cache on; on nodes, use an image "
    "that is smaller, or that they have already.",
    "dataWait": "Load data with more workers (training.data.numWorkers: auto), or look closer with "
    "`spottrain profile`.",
    "checkpointStall": "Save less often: checkpoint.interval: auto weighs a save against what an "
    "interruption loses.",
    "restore": "Keep the bucket in the region of the nodes: each attempt reads a whole checkpoint.",
    "rollback": "Save more often: checkpoint.interval: auto does where losses are dear. A warning of the "
    "job says if a notice is too short for a save.",
    "waiting": "Allow more pools, zones or instance types, or capacity.type: SpotFirst: nodes come sooner.",
    "other": "Look at the attempts below: a trainer that reports nothing leaves all of its time here.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    title: str
    text: str
    fix: str = ""


def findings(report: Report) -> list[Finding]:
    """Returns what limited the steps, then the part of the time that was lost most of all."""
    return [*_of_steps(report), *_of_time(report)]


def _of_steps(report: Report) -> Iterator[Finding]:
    if report.diagnosis:
        name, _, text = report.diagnosis.partition(": ")
        yield Finding(title=f"The steps are {name}", text=text)


def _of_time(report: Report) -> Iterator[Finding]:
    if report.parts is None:
        yield Finding(
            title="Where the time went is not known",
            text="No trainer has reported it: the script does without spottrain's library, or has not begun.",
        )
        return
    total, lost = sum(report.parts.values()), {n: s for n, s in report.parts.items() if n != "productive"}
    name = max(lost, key=lambda each: lost[each])
    share = lost[name] / total
    productive = f"{report.parts['productive'] / total:.0%} of {duration(total)} trained the model"
    if share < WORTH:
        yield Finding(title="Little time was lost", text=f"{productive}; no other part took {WORTH:.0%}.")
        return
    yield Finding(
        title=f"The most time was lost to: {BUCKETS[name]}",
        text=f"{share:.0%}, {duration(lost[name])} of {duration(total)}. {productive}.",
        fix=FIXES[name],
    )
