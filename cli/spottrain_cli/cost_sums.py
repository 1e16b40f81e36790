"""What the jobs of a namespace, or of all, cost: a line for each, and sums by team."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from spottrain.core.log_format import counted

from spottrain_cli.cost_report import NOT_COUNTED, facts, node_hours
from spottrain_cli.figures import lower_bound, table
from spottrain_cli.jobs import Job, percent

NO_TEAM: Final = "(no team)"
DELETED: Final = "Jobs that were deleted are in no sum."


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    jobs: int
    spent: Decimal
    unknown_seconds: Decimal
    unknown_jobs: int
    """Jobs that had nodes and do not say what was spent."""
    known: bool
    """Whether every node-second of every job has a price."""

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Sum:
        costs = [job.cost for job in jobs if job.cost is not None]
        unknown_jobs = sum(_unknown(job) for job in jobs)
        return cls(
            jobs=len(jobs),
            spent=sum((cost.spent or Decimal(0) for cost in costs), Decimal(0)),
            unknown_seconds=sum((cost.unknownSeconds or Decimal(0) for cost in costs), Decimal(0)),
            unknown_jobs=unknown_jobs,
            known=not unknown_jobs and all(cost.known for cost in costs),
        )

    @property
    def text(self) -> str:
        parts = [f"{counted(self.jobs, 'job')}: {lower_bound(self.spent, known=self.known)}"]
        if self.unknown_seconds:
            parts.append(f"{node_hours(self.unknown_seconds)} without a price")
        if self.unknown_jobs:
            parts.append(f"{counted(self.unknown_jobs, 'job')} without a cost")
        return ", ".join(parts)

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "jobs": self.jobs,
            "spent": float(self.spent),
            "known": self.known,
            "unknownSeconds": float(self.unknown_seconds),
            "jobsWithoutCost": self.unknown_jobs,
        }


def lines(jobs: Sequence[Job], *, where: str) -> list[str]:
    """Returns one line for each job and the sums. `where` names what was asked for."""
    if not jobs:
        return [f"There is no TrainingJob in {where}."]
    by_team = _by_team(jobs)
    found = [*table([*_rows(jobs, teams=bool(by_team))]), "", Sum.of(jobs).text]
    found += [f"  team {team or NO_TEAM}, {Sum.of(own).text}" for team, own in by_team.items()]
    return [*found, "", f"{DELETED} {NOT_COUNTED}"]


def all_facts(jobs: Sequence[Job], *, now: datetime) -> dict[str, Any]:
    return {
        "jobs": [facts(job, now=now) for job in jobs],
        "sum": Sum.of(jobs).facts,
        "teams": [{"team": team} | Sum.of(own).facts for team, own in _by_team(jobs).items()],
    }


def _by_team(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    """Returns the jobs of each team, those without one last; empty where no job has a team."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.team, []).append(job)
    named = {team: found[team] for team in sorted(found) if team}
    return named | ({"": found[""]} if named and "" in found else {})


def _rows(jobs: Sequence[Job], *, teams: bool) -> Iterator[list[str]]:
    namespaces = len({job.namespace for job in jobs}) > 1
    head = ["JOB", "PHASE", "SPENT", "WITHOUT A PRICE", "SAVING", "PAID GOODPUT"]
    yield [*["NAMESPACE"] * namespaces, *["TEAM"] * teams, *head]
    for job in jobs:
        yield [*[job.namespace] * namespaces, *[job.team or "-"] * teams, *_row(job)]


def _row(job: Job) -> list[str]:
    if job.cost is None:
        spent = "unknown" if _unknown(job) else "-"
        return [job.name, job.phase or "-", spent, "-", "-", "-"]
    without = node_hours(job.cost.unknownSeconds) if job.cost.unknownSeconds else "-"
    saving = job.cost.known_saving
    paid = percent(job.goodput.paid) if job.goodput else None
    rates = ["unknown" if rate is None else f"{rate} %" for rate in (saving, paid)]
    spent = lower_bound(job.cost.spent, known=job.cost.known)
    return [job.name, job.phase or "-", spent, without, *rates]


def _unknown(job: Job) -> bool:
    """Whether the job had nodes, and what was spent is not known."""
    return job.ran if job.cost is None else job.cost.spent is None
