"""The table of `spottrain list`: a line for each job, in as many columns as there is room for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from spottrain_cli import figures
from spottrain_cli.jobs import Job, facts


class Column(NamedTuple):
    head: str
    cell: Callable[[Job, datetime], str]
    right: bool = True


NAMESPACE: Final = Column("NAMESPACE", lambda job, now: job.namespace, right=False)
COLUMNS: Final = (
    Column("NAME", lambda job, now: job.name, right=False),
    Column("PHASE", lambda job, now: job.phase or figures.NONE, right=False),
    Column("STEP", lambda job, now: figures.step(job)),
    Column("LEFT", lambda job, now: figures.left(job)),
    Column("LOSS", lambda job, now: figures.loss(job)),
    Column("INTERRUPTIONS", lambda job, now: str(job.interruptions)),
    Column("COST", lambda job, now: figures.spent(job.cost)),
    Column("AGE", lambda job, now: figures.since(job.created, now) if job.created else figures.NONE),
)
DROPPED: Final = ("INTERRUPTIONS", "AGE", "LOSS", "COST", "LEFT")
"""Columns that a narrow terminal goes without, the first one first."""


def lines(jobs: Sequence[Job], *, where: str, now: datetime, width: int = 0) -> list[str]:
    """Returns the table. `where`: what was asked for. `width`: of the terminal; 0: without limit."""
    if not jobs:
        return [f"There is no TrainingJob in {where}."]
    columns = [NAMESPACE, *COLUMNS] if len({job.namespace for job in jobs}) > 1 else [*COLUMNS]
    found = _table(columns, jobs, now)
    for name in DROPPED:
        if not width or max(map(len, found)) <= width:
            break
        columns = [each for each in columns if each.head != name]
        found = _table(columns, jobs, now)
    return found


def _table(columns: Sequence[Column], jobs: Sequence[Job], now: datetime) -> list[str]:
    rows = [[each.head for each in columns], *([each.cell(job, now) for each in columns] for job in jobs)]
    return figures.table(rows, right=[number for number, each in enumerate(columns) if each.right])


def as_facts(jobs: Sequence[Job]) -> dict[str, Any]:
    return {"jobs": [facts(job) for job in jobs]}
