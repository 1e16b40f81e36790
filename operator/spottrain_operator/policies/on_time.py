"""Whether a job will be done by its deadline: the remaining work, and what a start takes. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from spottrain.contract import LONGEST_AUTO_INTERVAL

from spottrain_operator.api.observed import Observed
from spottrain_operator.api.training_job import Status, TrainingJobSpec
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.names import Condition, Reason

RESTART: Final = 300.0
"""Seconds from a bound pod to its first step, while no attempt of the job has shown them."""
ROUND: Final = 30.0
"""Starts are rounded up to so many seconds."""
MOST: Final = 1e10
"""Seconds; more work than this is as good as endless."""
INTERVAL: Final = re.compile(r"(\d+)(steps|s|m|h)")
UNIT: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of training: of the whole job, and those that remain."""

    whole: float
    left: float


def work(o: Observed, status: Status) -> Work | None:
    """Returns the work of a job; None where it is not known."""
    shown, spec = status.progress, o.job.spec
    limit = spec.training.get("maxSteps") if spec is not None else None
    total = limit if isinstance(limit, int) else shown.total_steps if shown is not None else None
    if not total or shown is None or shown.step_seconds is None:
        return None
    record, step = status.current, status.known_durable_step
    if record is not None and not record.cause and record.stepped is not None:
        step = record.last_step  # of a training attempt its own; else the work goes on from the durable one
    left, seconds = max(0, total - (step or 0)), float(shown.step_seconds)
    return Work(min(total * seconds, MOST), min(left * seconds, MOST))


def restart(status: Status) -> float:
    """Returns the seconds from bound pods to the first step."""
    known = status.progress.start_seconds if status.progress is not None else None
    return RESTART if known is None else max(1, math.ceil(float(known) / ROUND)) * ROUND


def reserve(o: Observed, status: Status) -> float:
    """Returns the seconds that a start on demand takes at worst, with the work that is lost before it."""
    assert o.job.spec is not None
    wait = float(o.job.spec.capacity.pending_timeout_seconds)
    return restart(status) + wait + _lost_work(o.job.spec, status)


def _lost_work(spec: TrainingJobSpec, status: Status) -> float:
    """Returns the seconds of work that an interruption can lose: since the last save became durable."""
    shown = status.progress
    step_seconds = float((shown.step_seconds if shown else None) or 0)
    save = min(float((shown.save_seconds if shown else None) or 0), LONGEST_AUTO_INTERVAL)
    found = INTERVAL.fullmatch(spec.checkpoint.interval)
    if found is None:
        return LONGEST_AUTO_INTERVAL + save
    count, unit = float(found[1]), found[2]
    return min(count * (step_seconds if unit == "steps" else UNIT[unit]), MOST) + save


# --- the condition OnTime -------------------------------------------------------------------------------
def verdict(o: Observed, status: Status) -> tuple[bool | None, Reason, str] | None:
    """Returns the condition OnTime; its value None stands for Unknown."""
    deadline = o.job.spec.capacity.cheapest.deadline if o.job.spec is not None else None
    if deadline is None:
        return None
    when = rfc3339(deadline, timespec="seconds")
    if status.terminal:
        done = status.completion_time if status.is_true(Condition.SUCCEEDED) else None
        if done is None or done <= deadline:
            return (True, Reason.ON_SCHEDULE, f"the job was done before {when}") if done is not None else None
        late = (done - deadline).total_seconds() / 3600
        return False, Reason.DEADLINE_MISSED, f"the job was done {late:.1f} h after {when}"
    if o.now >= deadline:
        words = f"capacity.cheapest.deadline ({when}) has passed, and the job is not done"
        return False, Reason.DEADLINE_MISSED, words
    if (known_work := work(o, status)) is None:
        words = "it is known once a trainer has reported its number of steps and its speed"
        return (
            None,
            Reason.WORK_UNKNOWN,
            f"the remaining work is unknown, so {when} cannot be planned: {words}",
        )
    spare = (deadline - o.now).total_seconds() - known_work.left - _start_left(o, status)
    left = f"{known_work.left / 3600:.1f} h of work are left"
    if spare < 0:
        return False, Reason.BEHIND_SCHEDULE, f"{left}, {-spare / 3600:.1f} h more than fit before {when}"
    return True, Reason.ON_SCHEDULE, f"{left}, with {spare / 3600:.1f} h to spare before {when}"


def _start_left(o: Observed, status: Status) -> float:
    """Returns the seconds until training goes on, at worst."""
    record = status.current
    if record is not None and not record.cause and record.stepped is not None:
        return 0.0
    start = restart(status)
    if record is not None and not record.cause and record.bound is not None:
        return max(0.0, start - (o.now - record.bound).total_seconds())
    assert o.job.spec is not None
    return start + o.job.spec.capacity.pending_timeout_seconds
