"""Events and conditions of an ordinary life say what happened, once, and warn only of what needs a person."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import Event, Observed, Plan, PodView
from spottrain_operator.api.training_job import Status
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Condition
from spottrain_operator.status.changes import progress_due

from tests.builders import (
    after,
    condition,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    raw_spec,
    sample,
    started,
    status_of,
    told,
)

MINUTE = timedelta(seconds=60)


def _seen(*pods: PodView, status: Status, **more: Any) -> Observed:
    spec = more.pop("spec", {})
    meta = more.pop("meta", {})
    return make_observed(*pods, job=make_job(raw_spec(**spec), status=status, **meta), **more)


def _reasons(made: Plan, *, warning: bool) -> list[str]:
    return [e.reason for e in made.events if e.warning == warning]


# --- interruptions ---------------------------------------------------------------------------------------
def test_a_suspended_and_resumed_job_was_never_interrupted() -> None:
    saved = told(Outcome.INTERRUPTED, step=40, durableStep=40, pod=deleted())
    stopping = status_of(
        plan(_seen(make_pod(), status=replace(started(), active_since=after(-600)), spec={"suspend": True}))
    )
    made = plan(_seen(saved, status=stopping, spec={"suspend": True}))
    assert status_of(made).condition(Condition.INTERRUPTED) is None
    assert _reasons(made, warning=True) == [] and _reasons(made, warning=False).count("Suspended") == 1
    resumed = plan(_seen(status=status_of(made)))
    assert _reasons(resumed, warning=True) == []
    runs = plan(_seen(make_pod(2), status=status_of(resumed), sample=sample(41, 2, startStep=40)))
    assert status_of(runs).condition(Condition.INTERRUPTED) is None


def test_an_interruption_is_over_when_the_next_attempt_trains_and_not_before() -> None:
    first = status_of(plan(_seen(ended_pod(1, 75, **deleted()), status=started())))
    assert first.is_true(Condition.INTERRUPTED)
    second = make_pod(2, node="node-b")
    nodes = (make_node(), make_node("node-b"))
    runs = status_of(plan(_seen(second, status=first, nodes=nodes)))
    assert runs.is_true(Condition.INTERRUPTED), "it runs, and nobody knows yet whether it trains"
    restoring = sample(0, 2, state="Restoring")
    restores = status_of(plan(_seen(second, status=runs, nodes=nodes, sample=restoring)))
    assert restores.is_true(Condition.INTERRUPTED)
    trains = status_of(plan(_seen(second, status=restores, nodes=nodes, sample=sample(10, 2, startStep=9))))
    over = condition(trains, Condition.INTERRUPTED)
    assert (over.status, over.reason) == ("False", "Recovered")


def test_a_job_that_has_failed_has_not_recovered() -> None:
    status = status_of(plan(_seen(ended_pod(1, 75, **deleted()), status=started())))
    bad = told(Outcome.BAD_CONFIGURATION, 2, message="no such bucket")
    over = status_of(plan(_seen(bad, status=status))).condition(Condition.INTERRUPTED)
    assert over is not None and (over.status, over.reason) == ("False", "Ended")


def test_where_an_attempt_went_on_from_is_told_when_it_is_known() -> None:
    status = replace(started(), known_durable_step=929)
    made = plan(_seen(ended_pod(1, 75, **deleted()), status=status))
    (begun,) = (e for e in made.events if e.reason == "AttemptStarted")
    assert "929" not in begun.message and begun.message.startswith("attempt 2, after attempt 1 (")
    second = make_pod(2)
    later = plan(_seen(second, status=status_of(made), sample=sample(1137, 2, startStep=1137)))
    told_once = Event(
        warning=False, reason="CheckpointRestored", message="attempt 2 continues from step 1137"
    )
    assert told_once in later.events
    more = _seen(second, status=status_of(later), sample=sample(1200, 2, startStep=1137), now=after(100))
    assert told_once not in plan(more).events


@pytest.mark.parametrize("reason", ["WaitingForBackoff", "DeletedJobStillSaving"])
def test_an_ordinary_wait_is_no_warning(reason: str) -> None:
    if reason == "WaitingForBackoff":
        made = plan(_seen(status=started(2, next_start=after(30), attempts=started(2).attempts[:1])))
    else:
        old = make_pod(1, job=replace(make_pod().job, uid="old"))
        made = plan(replace(_seen(status=Status()), predecessors=(old,), nodes={"node-a": make_node()}))
    assert reason in _reasons(made, warning=False) and reason not in _reasons(made, warning=True)


# --- steps -----------------------------------------------------------------------------------------------
def test_the_first_answer_and_the_first_step_of_each_attempt_are_written_at_once() -> None:
    status = started()
    for attempt, start in ((1, 0), (2, 300)):
        status = (
            status if attempt == 1 else status_of(plan(_seen(ended_pod(1, 75, **deleted()), status=status)))
        )
        pod = make_pod(attempt)
        for state, step, at, due in (
            ("Restoring", 0, 0, True),
            ("Training", start, 10, True),
            ("Training", start + 5, 20, True),
            ("Training", start + 40, 30, False),
            ("Training", start + 200, 81, True),
        ):
            answer = replace(sample(step, attempt, state=state, startStep=start), at=after(at))
            assert progress_due(status, answer, MINUTE) == due, (attempt, state, step)
            made = plan(_seen(pod, status=status, sample=answer, now=after(at)))
            status = made.status or status


# --- after the end ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("end", [Outcome.DONE, Outcome.BAD_CONFIGURATION])
def test_an_edit_of_a_job_that_has_ended_is_answered(end: Outcome) -> None:
    pod = told(end, message="no such bucket" if end is not Outcome.DONE else "")
    status = status_of(plan(_seen(pod, status=started())))
    assert status.terminal
    assert plan(_seen(pod, status=status)).status is None
    made = plan(_seen(pod, status=status, spec={"suspend": True}, meta={"generation": 2}))
    (event,) = made.events
    assert event.warning and event.reason == "JobHasEnded"
    for words in ("the job has ended", "checkpoint.uri: s3://bucket/run", "checkpoint.onExisting: Resume"):
        assert words in event.message
    running = condition(made, Condition.RUNNING)
    assert running.status == "False" and running.message == event.message
    again = plan(_seen(pod, status=status_of(made), spec={"suspend": True}, meta={"generation": 2}))
    assert again.status is None and not again.events
