"""How figures of a job are written: steps, dollars, times, and unknown ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from decimal import Decimal
from textwrap import wrap

from spottrain.core.log_format import duration

from spottrain_cli.jobs import SYNC, Cost, Job

NONE = "-"
"""What is not there, or not known yet."""


def dollars(value: Decimal) -> str:
    """Writes $1,234.50; what is below a cent with the digits that it has."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    if 0 < size < Decimal("0.01"):
        return f"{sign}${size.normalize():f}"
    return f"{sign}${size:,.2f}"


def lower_bound(spent: Decimal | None, *, known: bool) -> str:
    """Writes what was spent; where prices are unknown, that it is more."""
    if spent is None or (not known and not spent):
        return "unknown"
    return dollars(spent) if known else f"at least {dollars(spent)}"


def spent(cost: Cost | None) -> str:
    return NONE if cost is None else lower_bound(cost.spent, known=cost.known)


def step(job: Job) -> str:
    """Writes 812/5,000. With checkpoint.mode Sync the operator counts commits of the folder."""
    if job.progress.step is None:
        return NONE
    total = f"/{job.progress.totalSteps:,}" if job.progress.totalSteps else ""
    return f"{job.progress.step:,}{total}"


def steps_word(job: Job) -> str:
    return "checkpoint" if job.checkpoint.mode == SYNC else "step"


def left(job: Job) -> str:
    """Writes the estimated time until the last step; nothing for a job that does not train."""
    seconds = job.progress.etaSeconds
    return NONE if seconds is None or job.ended else duration(float(seconds))


def loss(job: Job) -> str:
    return NONE if job.progress.loss is None else f"{job.progress.loss:.4g}"


def since(then: datetime, now: datetime) -> str:
    """Writes how long ago it was; clocks of two machines may differ by a little."""
    return duration(max(0.0, (now - then).total_seconds()))


def clock(time: datetime, now: datetime) -> str:
    """Writes 14:05Z of today, else 11-23 14:05Z, or with the year where it is another one."""
    if time.date() == now.date():
        return f"{time:%H:%M}Z"
    return f"{time:%m-%d %H:%M}Z" if time.year == now.year else f"{time:%Y-%m-%d %H:%M}Z"


def size(number: int) -> str:
    """Formats bytes in binary units with three digits."""
    amount = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"


def table(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Aligns columns, those of `right` to the right. The first row is the heading."""
    ends, widths = set(right), [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (
        [
            cell.rjust(w) if i in ends else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in aligned]


def folded(text: str, width: int, *, first: str = "", rest: str | None = None) -> list[str]:
    """Breaks a sentence at `width` columns; 0: not at all. `first` and `rest` begin its lines."""
    rest = " " * len(first) if rest is None else rest
    if not width:
        return [first + text]
    return wrap(
        text,
        max(width, len(rest) + 20),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]
