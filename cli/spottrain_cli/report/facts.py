"""What the page shows: of a TrainingJob and the series of its steps, or of the series alone. Pure.

Times are Unix seconds, amounts are US dollars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from typing import Final

from spottrain.core.log_format import counted
from spottrain.core.series import Attempt as Recorded
from spottrain.core.series import Point, Series, cut

from spottrain_cli import timeline
from spottrain_cli.figures import steps_word
from spottrain_cli.jobs import BUCKETS, Attempt, Cost, Goodput, Job, percent

KILLED: Final = "Killed"
"""Cause of an attempt that ended without a word, where there is no operator that knows more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One attempt on the time line. None: unknown, or not yet."""

    number: int
    start: float | None = None
    bound: float | None = None
    """When all of its nodes were there."""
    first: float | None = None
    """When it had done a step."""
    end: float | None = None
    node: str = ""
    place: str = ""
    cause: str = ""
    """Empty while it runs."""
    why: str = ""
    charged: bool = False
    start_step: int | None = None
    last_step: int | None = None
    lost: int | None = None
    """Steps that were done again."""
    spent: Decimal | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Break:
    """Where the training went on after an attempt had ended."""

    step: int
    number: int
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    title: str
    state: str
    live: bool
    """Whether it may still go on."""
    made: float
    sentences: tuple[str, ...] = ()
    """What the operator says of it."""
    step: int | None = None
    total: int | None = None
    word: str = "step"
    loss: float | None = None
    spans: tuple[Span, ...] = ()
    curves: tuple[tuple[Point, ...], ...] = ()
    """Points of each attempt, without steps that were done again."""
    breaks: tuple[Break, ...] = ()
    parts: dict[str, float] | None = None
    """Seconds, by the names of `jobs.BUCKETS`; None: unknown."""
    allocated: float | None = None
    """Those in which all nodes were there."""
    cost: Cost | None = None
    nodes: bool = True
    """Whether it ran on nodes of a cluster, which cost something."""
    diagnosis: str = ""
    notes: tuple[str, ...] = ()
    """What is not on the page, and why."""

    @property
    def points(self) -> list[Point]:
        return [point for curve in self.curves for point in curve]

    @property
    def begun(self) -> float | None:
        return min((span.start for span in self.spans if span.start is not None), default=None)

    @property
    def seconds(self) -> float | None:
        """From the first start to the end, or to now."""
        ends = [span.end for span in self.spans if span.end is not None]
        end = self.made if self.live or not ends else max(ends)
        return None if self.begun is None else max(0.0, end - self.begun)

    @property
    def interruptions(self) -> int:
        return sum(span.cause not in ("", timeline.DONE) for span in self.spans)


# --- of a job -------------------------------------------------------------------------------------------
def of_job(job: Job, found: Sequence[Series], *, now: datetime, note: str = "") -> Report:
    """Returns the report on a job. `note`: why there is no series of it, if that is so."""
    own = [series for series in found if series.attempt.jobUID == job.uid]
    known = {attempt.number for attempt in job.attempts}
    spans = [span for span in _recorded(own) if span.number not in known]
    spans += [_span(attempt) for attempt in job.attempts]
    return Report(
        title=job.ref,
        state=job.phase or timeline.UNSEEN,
        live=not job.ended,
        made=now.timestamp(),
        sentences=tuple(each.message for each in timeline.sentences(job) if each.message),
        step=job.progress.step,
        total=job.progress.totalSteps,
        word=steps_word(job),
        loss=_loss(job) if (last := _last_loss(own)) is None else last,
        spans=tuple(spans),
        curves=tuple(series.points for series in cut(own)),
        breaks=_breaks(spans),
        parts=_parts(job.goodput),
        allocated=_allocated(job.goodput),
        cost=job.cost,
        diagnosis=_diagnosis(own),
        notes=tuple(_notes(job, spans, note)),
    )


def _span(attempt: Attempt) -> Span:
    lost = attempt.lost_steps if attempt.cause not in ("", timeline.DONE) else None
    many = f"{attempt.workers} x " if (attempt.workers or 1) > 1 else ""
    return Span(
        number=attempt.number,
        start=_unix(attempt.startTime),
        bound=_unix(attempt.boundTime),
        first=_unix(attempt.firstStepTime),
        end=_unix(attempt.endTime),
        node=many + (attempt.node or "no node"),
        place=", ".join(filter(None, (attempt.instanceType, attempt.capacityType, attempt.zone))),
        cause=attempt.cause,
        why=attempt.evidence if attempt.cause else timeline.stands(attempt),
        charged=bool(attempt.charged),
        start_step=attempt.startStep,
        last_step=attempt.lastStep,
        lost=lost,
        spent=attempt.spent,
    )


def _loss(job: Job) -> float | None:
    return None if job.progress.loss is None else float(job.progress.loss)


def _unix(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()


def _parts(goodput: Goodput | None) -> dict[str, float] | None:
    parts = {} if goodput is None else {name: float(value) for name, value in goodput.buckets.items()}
    return parts if sum(parts.values()) > 0 else None


def _allocated(goodput: Goodput | None) -> float | None:
    if goodput is None or goodput.wanted is None or (share := percent(goodput.scheduling)) is None:
        return None
    return float(goodput.wanted * share / 100)


def _notes(job: Job, spans: Sequence[Span], note: str) -> list[str]:
    notes = [note] if note else []
    if job.attempts and (first := min(span.number for span in spans)) > 1:
        gone = "Attempt 1 is" if first == 2 else f"Attempts 1 to {first - 1} are"
        notes.append(f"{gone} not on the time line: the status keeps the last 10. The sums have all.")
    if job.cost is not None and not job.cost.known:
        notes.append("The price of some node-hours is not known; they are in no sum.")
    if job.goodput is None:
        notes.append("Where the time went is not known: no trainer has reported it.")
    return notes


# --- of the series alone ----------------------------------------------------------------------------------
def of_series(uri: str, found: Sequence[Series], *, now: float) -> Report:
    """Returns the report on the job that has used this checkpoint URI last."""
    last = max(found, key=lambda series: series.attempt.term).attempt
    own = [series for series in found if series.attempt.jobUID == last.jobUID]
    spans = _recorded(own)
    return Report(
        title=last.job,
        state=spans[-1].cause or "Running, or killed",
        live=not last.outcome,
        made=now,
        sentences=(f"Checkpoints: {uri}",),
        step=last.step,
        total=last.totalSteps or None,
        loss=_last_loss(own),
        spans=tuple(spans),
        curves=tuple(series.points for series in cut(own)),
        breaks=_breaks(spans),
        parts=_summed([series.attempt for series in cut(own)]),
        nodes=False,
        diagnosis=_diagnosis(own),
        notes=("It is made from the checkpoint URI alone: it knows no nodes, prices or waits for nodes.",),
    )


def _recorded(own: Sequence[Series]) -> list[Span]:
    """Returns a job's attempts as their series have them."""
    ordered = sorted(own, key=lambda series: series.attempt.term)
    return [_span_of(series, over=series is not ordered[-1]) for series in ordered]


def _span_of(series: Series, *, over: bool) -> Span:
    """`over`: whether a later attempt has begun."""
    attempt, points = series.attempt, series.points
    last = max([attempt.writtenTime, *(point.time for point in points)])
    cause = attempt.outcome[:1].upper() + attempt.outcome[1:] or (KILLED if over else "")
    kept = attempt.startStep if attempt.durableStep is None else attempt.durableStep
    return Span(
        number=attempt.number,
        start=attempt.bornTime,
        bound=attempt.bornTime,
        first=points[0].time if points else None,
        end=last if cause else None,
        cause=cause,
        why="it left no word; its last record is its last save" if cause == KILLED else "",
        start_step=attempt.startStep,
        last_step=attempt.step,
        lost=max(0, attempt.step - kept) if cause not in ("", timeline.DONE) else None,
    )


def _summed(attempts: Sequence[Recorded]) -> dict[str, float] | None:
    """Returns the seconds of all attempts, as far as they were written. What was not saved was lost."""
    splits = [(each, each.timeSplit) for each in attempts if each.timeSplit is not None]
    parts = dict.fromkeys(BUCKETS, 0.0)
    for attempt, split in splits:
        over = bool(attempt.outcome) or attempt is not attempts[-1]
        lost = split.unsaved if over else 0.0
        seconds = asdict(split) | {"rollback": lost, "productive": split.productive - lost}
        parts = {name: parts[name] + seconds[name] for name in BUCKETS}
    return parts if sum(parts.values()) > 0 else None


# --- both -----------------------------------------------------------------------------------------------
def _breaks(spans: Sequence[Span]) -> tuple[Break, ...]:
    return tuple(
        Break(step=after.start_step, number=one.number, cause=one.cause)
        for one, after in pairwise(spans)
        if one.cause and after.start_step is not None
    )


def _last_loss(own: Sequence[Series]) -> float | None:
    """The status may be older: it has what the trainer said at the last poll."""
    losses = (point.loss for series in reversed(cut(own)) for point in reversed(series.points))
    return next((loss for loss in losses if loss is not None), None)


def _diagnosis(own: Sequence[Series]) -> str:
    return next((each.attempt.diagnosis for each in reversed(cut(own)) if each.attempt.diagnosis), "")


def headline(report: Report) -> str:
    """Returns how it went, in one line."""
    attempts = counted(len(report.spans), "attempt")
    return f"{report.state}, {attempts}, {counted(report.interruptions, 'interruption')}"


def saving(report: Report) -> Decimal | None:
    """Returns what was saved against on-demand nodes, in percent; negative where a whole job was dearer."""
    return None if report.cost is None else report.cost.told_saving(ended=not report.live)
