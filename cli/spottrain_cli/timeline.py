"""What `spottrain status` says: how a job stands, its attempts, what they lost, what happens next. Pure.

Sentences of conditions and evidence are the operator's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from spottrain.core.log_format import counted, duration

from spottrain_cli import jobs
from spottrain_cli.figures import (
    clock,
    dollars,
    folded,
    left,
    loss,
    lower_bound,
    since,
    spent,
    step,
    steps_word,
)
from spottrain_cli.jobs import FAILED, SUCCEEDED, SUSPENDED, SYNC, Attempt, Condition, Job

DONE: Final = "Done"
"""Cause of the attempt that finished the training."""
UNSEEN: Final = "not seen by the operator yet"
BAD: Final = {
    "Accepted": "False",
    "Admitted": "False",
    "Scheduled": "False",
    "OnTime": "False",
    "Suspended": "True",
}
"""Conditions that say why a job does not train, with that status."""


# --- what an attempt lost -------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What the end of an attempt cost the training."""

    steps: int | None
    """Steps that are done again; None: unknown."""
    step_seconds: float | None
    """What these steps take."""
    pause_seconds: float | None
    """From its end to the first step of the next attempt; None: there is none yet, or it is not known."""

    @property
    def seconds(self) -> float:
        return (self.step_seconds or 0.0) + (self.pause_seconds or 0.0)


def losses(job: Job) -> dict[int, Loss]:
    """Returns what each attempt that ended before the training was done has lost, by its number."""
    after = {one.number: other for one, other in pairwise(job.attempts)}
    return {
        each.number: _loss(job, each, after.get(each.number))
        for each in job.attempts
        if each.endTime is not None and each.cause not in ("", DONE)
    }


def _loss(job: Job, attempt: Attempt, after: Attempt | None) -> Loss:
    steps, each = attempt.lost_steps, job.progress.stepSeconds
    if job.checkpoint.mode == SYNC:
        steps = None  # checkpoints are counted there; what the program did since its last one is not known
    trained = after.firstStepTime if after is not None else None
    pause = (
        None if trained is None or attempt.endTime is None else (trained - attempt.endTime).total_seconds()
    )
    return Loss(
        steps=steps,
        step_seconds=None if steps is None or each is None else steps * float(each),
        pause_seconds=None if pause is None else max(0.0, pause),
    )


# --- the text -------------------------------------------------------------------------------------------
def status(job: Job, *, now: datetime, width: int = 0) -> list[str]:
    """Returns the lines of `spottrain status`. `width`: columns of the terminal; 0: lines are not broken."""
    lines = folded(title(job), width)
    for each in sentences(job):
        lines += folded(f"{each.type}: {each.message}", width, rest="  ")
    rows = [*_rows(job, now)]
    widest = max((len(name) for name, _ in rows), default=0)
    lines += [""] * bool(rows)
    for name, text in rows:
        lines += folded(text, width, first=f"{name:<{widest}}  ")
    lines += ["", *_attempts(job, now, width)] if job.attempts else []
    if after := [*next_events(job, now)]:
        lines.append("")
        for number, text in enumerate(after):
            lines += folded(text, width, first="Next  " if not number else "      ")
    return lines


def title(job: Job) -> str:
    counts = [f"attempt {job.attempt}"] if job.attempt else []
    counts += [counted(job.interruptions, "interruption")] if job.attempt else []
    counts += [counted(job.failures, "failure")] if job.failures else []
    return f"{job.ref}: {', '.join([job.phase or UNSEEN, *counts])}"


def sentences(job: Job) -> Iterator[Condition]:
    """Yields the conditions that say how the job stands."""
    ends = [each for each in job.conditions if each.type in (SUCCEEDED, FAILED) and each.status == "True"]
    if ends:
        yield from ends
        return
    for each in job.conditions:
        if job.phase == SUSPENDED and each.type in ("Running", "Scheduled"):
            continue  # Suspended says it
        if each.message and (each.type == "Running" or BAD.get(each.type) == each.status):
            yield each


def _rows(job: Job, now: datetime) -> Iterator[tuple[str, str]]:
    yield from _progress_rows(job, now)
    known = [
        each for each in losses(job).values() if each.steps is not None or each.pause_seconds is not None
    ]
    if job.attempts and (total := sum(each.seconds for each in known)):
        steps = sum(each.steps or 0 for each in known)
        again = f", {counted(steps, 'step')} of it done again" if steps else ""
        yield "Lost", f"{duration(total)} by the end of {counted(len(known), 'attempt')}{again}"
    if job.cost is not None:
        saving = job.cost.told_saving(ended=job.ended)
        more = (
            f", {abs(saving)} % {'less' if saving >= 0 else 'more'} than on demand"
            if saving is not None
            else ""
        )
        yield "Cost", spent(job.cost) + more
    if job.progress.warning:
        yield "Warning", job.progress.warning


def _progress_rows(job: Job, now: datetime) -> Iterator[tuple[str, str]]:
    shown = job.progress
    if shown.step is not None:
        share = f" ({100 * shown.step / shown.totalSteps:.1f} %)" if shown.totalSteps else ""
        more = [f"loss {loss(job)}"] if shown.loss is not None else []
        more += (
            [f"{shown.samplesPerSecond:,.4g} samples/s"] if shown.samplesPerSecond and not job.ended else []
        )
        old = (
            f"; as of {since(shown.pollTime, now)} ago"
            if shown.pollTime is not None and not job.ended
            else ""
        )
        yield steps_word(job).capitalize(), ", ".join([step(job) + share, *more]) + old
    if shown.etaSeconds and not job.ended:
        end = clock(now + timedelta(seconds=float(shown.etaSeconds)), now)
        yield "Left", f"{left(job)}: done about {end}, if nothing interrupts it"
    if job.knownDurableStep is not None:
        when = f", {since(saved, now)} ago" if (saved := shown.saved) is not None else ""
        yield "Saved", f"{steps_word(job)} {job.knownDurableStep:,}{when}, at {job.checkpoint.uri}"


# --- attempts -------------------------------------------------------------------------------------------
def _attempts(job: Job, now: datetime, width: int) -> Iterator[str]:
    lost, digits = losses(job), len(str(job.attempts[-1].number))
    first = job.attempts[0].number
    if first > 1:
        gone = "Attempt 1 is" if first == 2 else f"Attempts 1 to {first - 1} are"
        yield from folded(f"{gone} no longer in the status, which keeps the last 10.", width)
    for each in job.attempts:
        texts = [_head(each, steps_word(job), now), *_end(each, lost.get(each.number))]
        for line, text in enumerate(texts):
            yield from folded(
                text, width, first=f"{each.number:>{digits}}  " if not line else " " * (digits + 2)
            )


def _head(attempt: Attempt, unit: str, now: datetime) -> str:
    begun = clock(attempt.startTime, now) if attempt.startTime else "not started"
    parts = [begun]
    if place := _place(attempt):
        held = "" if attempt.boundTime is None else f"{_between(attempt.boundTime, attempt.endTime or now)} "
        parts.append(f"{held}on {place}")
    if attempt.lastStep is not None:
        parts.append(f"{unit}s {attempt.startStep or 0:,} to {attempt.lastStep:,}")
    if attempt.spent is not None and attempt.node:
        parts.append(lower_bound(attempt.spent, known=not attempt.unknownSeconds))
    return ", ".join(parts)


def _between(begin: datetime, end: datetime) -> str:
    return duration(max(0.0, (end - begin).total_seconds()))


def _place(attempt: Attempt) -> str:
    if not attempt.node:
        return ""
    what = attempt.instanceType or attempt.node
    many = f"{attempt.workers} x " if (attempt.workers or 1) > 1 else ""
    inside = ", ".join(filter(None, (attempt.capacityType, attempt.zone)))
    return f"{many}{what}" + (f" ({inside})" if inside else "")


def _end(attempt: Attempt, lost: Loss | None) -> Iterator[str]:
    """Yields why it ended and what that cost, or how it stands."""
    if not attempt.cause:
        if attempt.startTime is not None:
            yield ", ".join(filter(None, (stands(attempt), attempt.evidence)))
        return
    charged = "; counts as a failure" if attempt.charged else ""
    yield ": ".join(filter(None, (attempt.cause, attempt.evidence))) + charged
    if lost is not None and (words := loss_words(lost)):
        yield words


def stands(attempt: Attempt) -> str:
    if attempt.stopping:
        return f"stopping: {attempt.stopping}"
    if not attempt.startTime:
        return "not started"
    return "waiting for nodes" if attempt.waits else "running"


def loss_words(lost: Loss) -> str:
    if lost.steps:
        took = f" ({duration(lost.step_seconds)})" if lost.step_seconds is not None else ""
        words = f"lost {counted(lost.steps, 'step')}{took}"
    else:
        words = "lost no step" if lost.steps == 0 else ""
    if lost.pause_seconds is not None:
        words += f"{'; ' if words else ''}the next attempt trained {duration(lost.pause_seconds)} later"
    return words


# --- what happens next ----------------------------------------------------------------------------------
def next_events(job: Job, now: datetime) -> Iterator[str]:
    """Yields what happens without anybody's doing, and when; for a job that stands still, what to do."""
    if job.deleted is not None:
        kept = "are deleted with it" if job.deletes_checkpoints else "stay"
        yield f"it is being deleted; its checkpoints {kept}"
    elif job.ended:
        yield from _after_end(job, now)
    elif job.phase == SUSPENDED:
        if job.suspend:
            yield f"`spottrain resume {job.ref}` continues it"
    else:
        yield from _while_alive(job, now)


def _after_end(job: Job, now: datetime) -> Iterator[str]:
    if job.output or (job.phase == SUCCEEDED and job.knownDurableStep is not None):
        yield f"`spottrain checkpoints download {job.ref} --to DIR` gets the model"
    if job.ttl_seconds is not None and job.completionTime is not None:
        when = job.completionTime + timedelta(seconds=job.ttl_seconds)
        kept = "with" if job.deletes_checkpoints else "without"
        yield f"it is deleted at {clock(when, now)}, {kept} its checkpoints (ttlSecondsAfterFinished)"


def _while_alive(job: Job, now: datetime) -> Iterator[str]:
    if job.nextStartTime is not None and job.nextStartTime > now:
        wait = duration((job.nextStartTime - now).total_seconds())
        yield f"attempt {job.attempt} starts in {wait}, at {job.nextStartTime:%H:%M:%S}Z"
    if job.active_seconds is not None and job.startTime is not None:
        when = job.startTime + timedelta(seconds=job.active_seconds)
        yield f"at {clock(when, now)} it is stopped and fails, if it is not done (activeDeadlineSeconds)"
    if job.deadline:
        yield f"it must be done by {job.deadline} (capacity.cheapest.deadline)"
    if job.limit is not None:
        yield f"it is stopped at {dollars(job.limit)} (capacity.maxCostUSD)"


# --- for programs ---------------------------------------------------------------------------------------
def facts(job: Job) -> dict[str, Any]:
    """Returns the job's facts, with what the end of each attempt has lost."""
    found, lost = jobs.facts(job), losses(job)
    for each in found["attempts"]:
        each["lost"] = asdict(lost[each["number"]]) if each["number"] in lost else None
    return found
