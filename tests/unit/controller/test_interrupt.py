"""A fire drill: each new value of the annotation `spottrain.io/interrupt` interrupts a training job once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import PodView
from spottrain_operator.api.training_job import InterruptStatus, Status
from spottrain_operator.control.actions import Plan
from spottrain_operator.names import INTERRUPT_ANNOTATION, Phase
from spottrain_operator.policies.capacity import RECLAIMS

from tests.builders import (
    after,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    notice,
    raw_spec,
    sample,
    started,
    told,
)
from tests.unit.controller.stories import Story

ASKED: dict[str, Any] = {"annotations": {INTERRUPT_ANNOTATION: "drill-1"}}
TRAINS = replace(started(), phase=Phase.RUNNING)
STOPPED = deleted(seconds_ago=1)
SAVED: dict[str, Any] = {"step": 120, "durableStep": 120, "startStep": 0, "durableSeconds": 1.24}


class Drill(Story):
    """A job that trains, and whose owner asks for an interruption."""

    def __init__(self, status: Status = TRAINS, **spec: Any) -> None:
        super().__init__(status, **spec)

    def look(self, expected: str, *pods: PodView, **more: Any) -> Plan:
        return super().look(expected, *pods, **{"meta": ASKED} | more)


def test_an_attempt_saves_and_ends_and_the_next_one_goes_on_at_once_on_the_same_node() -> None:
    job = Drill()
    made = job.look("stopping1=InterruptRequested deletes=0 tells=InterruptRequested !warns", make_pod())
    assert [a.grace for a in made.after if hasattr(a, "grace")] == [None], "the pod's own: that of a notice"
    assert job.status.interrupt == InterruptStatus(request="drill-1", attempt=1)
    job.look("!deletes !creates phase=Stopping", make_pod(**STOPPED), at=1)
    end = told(Outcome.INTERRUPTED, pod=STOPPED, **SAVED)
    made = job.look("attempt=2 cause1=InterruptRequested creates=0 start=now !warns", end, at=3)
    job.look("!stopping2 !deletes interruptions=0 failures=0 noProgress=0 !interrupted", make_pod(2), at=60)
    first = job.status.attempts[0]
    assert (first.exit_code, first.durable_step, str(first.signal_to_durable_seconds)) == (75, 120, "1.24")
    assert first.evidence.endswith("drill-1; step 120 was saved, 1.2 s after its signal")
    assert "InterruptRequested" not in RECLAIMS, "no pool is avoided for it"


def test_each_new_value_is_honoured_once_also_by_an_operator_that_was_started_again() -> None:
    job = Drill()
    job.look("stopping1=InterruptRequested", make_pod())
    job.look("deletes=0 unwritten", make_pod(), at=1)  # it died between the status and the DELETE
    job.look("attempt=2", told(Outcome.INTERRUPTED, pod=STOPPED, **SAVED), at=2)
    runs = {"sample": sample(130, 2, startStep=120)}
    job.look("!stopping2 phase=Running", make_pod(2), at=60, **runs)
    job.look("!stopping2", make_pod(2), at=70, **runs)
    again = {"annotations": {INTERRUPT_ANNOTATION: "drill-2"}}
    job.look("stopping2=InterruptRequested", make_pod(2), at=80, meta=again, **runs)
    assert job.status.interrupt == InterruptStatus(request="drill-2", attempt=2)


PENDING: dict[str, Any] = {"node": "", "phase": "Pending"}
IDLE: dict[str, tuple[Status, tuple[PodView, ...], dict[str, Any]]] = {
    "it has no node yet": (replace(TRAINS, phase=Phase.PENDING), (make_pod(**PENDING),), {}),
    "it was made with the annotation": (Status(), (), {}),
    "it is suspended": (replace(TRAINS, phase=Phase.SUSPENDED), (), {"spec": {"suspend": True}}),
    "its attempt ends already": (replace(TRAINS, phase=Phase.STOPPING), (make_pod(**STOPPED),), {}),
    "its node has a notice": (TRAINS, (make_pod(),), {"nodes": (make_node(notice=notice(100)),)}),
    "it is to be suspended": (TRAINS, (make_pod(),), {"spec": {"suspend": True}}),
}


@pytest.mark.parametrize("case", IDLE)
def test_a_job_that_does_not_train_is_left_alone_and_says_so(case: str) -> None:
    status, pods, more = IDLE[case]
    job = Drill(status)
    job.look("warns=InterruptIgnored !stopping1=InterruptRequested", *pods, **more)
    assert job.status.interrupt and job.status.interrupt.attempt is None
    assert job.status.interrupt.message.startswith("no attempt was interrupted, because the job does not")
    job.look("!warns=InterruptIgnored", *pods, at=5, **more)


def test_a_job_that_is_over_says_so_too() -> None:
    job = Story(replace(TRAINS))
    job.look("Succeeded=True", told(Outcome.DONE, step=100))
    job.look("warns=InterruptIgnored Succeeded=True", told(Outcome.DONE, step=100), meta=ASKED, at=5)


def test_of_a_gang_all_ranks_save_and_the_next_attempt_starts_when_all_have_ended() -> None:
    record = replace(TRAINS.attempts[0], workers=2, created_workers=2)
    job = Drill(replace(TRAINS, attempts=(record,)), workers=2)
    nodes = (make_node(), make_node("node-b"))
    both = make_pod(), make_pod(1, 1, node="node-b")
    job.look("stopping1=InterruptRequested deletes=0,1", *both, nodes=nodes)
    first = told(Outcome.INTERRUPTED, pod=STOPPED, **SAVED)
    job.look("attempt=1 !creates", first, make_pod(1, 1, node="node-b", **STOPPED), nodes=nodes, at=2)
    ends = first, ended_pod(1, 75, rank=1, node="node-b", **STOPPED)
    job.look("attempt=2 cause1=InterruptRequested creates=0,1 interruptions=0", *ends, nodes=nodes, at=3)


ENDS = {
    "rank 0 ended (exit code 137) and reported no save": ended_pod(1, 137, **STOPPED),
    "rank 0 did not save its last step (interruptedLost): the store": told(
        Outcome.INTERRUPTED_LOST, pod=STOPPED, step=9, message="the store"
    ),
}


@pytest.mark.parametrize("words", ENDS)
def test_what_was_not_saved_is_said_and_charged_to_nobody(words: str) -> None:
    job = Drill()
    job.look("stopping1=InterruptRequested", make_pod())
    job.look("cause1=InterruptRequested attempt=2 failures=0 interruptions=0", ENDS[words], at=3)
    assert job.status.attempts[0].evidence.endswith(words)


def test_a_training_that_gets_done_meanwhile_is_done() -> None:
    job = Drill()
    job.look("stopping1=InterruptRequested", make_pod())
    job.look("Succeeded=True", told(Outcome.DONE, pod=STOPPED, step=200), at=3)


def test_a_value_of_any_length_fits_the_status() -> None:
    job = make_job(annotations={INTERRUPT_ANNOTATION: "x" * 10_000})
    assert job.interrupt == "x" * 64


TOLD = (
    make_observed(make_pod(), job=make_job(status=TRAINS, **ASKED)),
    make_observed(make_pod(**PENDING), job=make_job(status=replace(TRAINS, phase=Phase.PENDING), **ASKED)),
    make_observed(make_pod(**STOPPED), job=make_job(raw_spec(suspend=True), status=TRAINS, **ASKED)),
    *(
        make_observed(
            end,
            now=after(3),
            job=make_job(
                status=replace(
                    TRAINS,
                    interrupt=InterruptStatus(request="drill-1", attempt=1),
                    attempts=(
                        replace(
                            TRAINS.attempts[0],
                            stopping="InterruptRequested",
                            evidence=f"requested by annotation {INTERRUPT_ANNOTATION}: drill-1",
                        ),
                    ),
                ),
                **ASKED,
            ),
        )
        for end in (told(Outcome.INTERRUPTED, pod=STOPPED, **SAVED), *ENDS.values())
    ),
)
