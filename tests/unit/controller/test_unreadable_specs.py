"""A running job whose stored spec cannot be read: what runs is looked after, and nothing is started."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.observed import Observed, PodView, Waiting
from spottrain_operator.api.training_job import Job, Status
from spottrain_operator.control.plan import plan
from spottrain_operator.names import QUEUE_LABEL

from tests.builders import (
    NOW,
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
from tests.unit.controller.stories import Story, follows
from tests.unit.controller.test_kueue import PREEMPTED, admitted

OLD = {"capacity": {"type": "spot"}}
"""A value of an older version."""
DOOMED = (make_node(notice=notice(60)), make_node("node-b"))


def unread(*pods: PodView, **more: Any) -> Observed:
    job: Job = more.pop("job", None) or make_job(raw_spec(**OLD), status=started())
    assert job.spec is None and job.invalid
    return make_observed(*pods, job=job, **more)


def test_it_is_told_of_a_notice_and_ended_and_counted_and_not_started_until_it_can_be_read() -> None:
    job = Story(started(), **OLD)
    job.look("annotates=0 !deletes Accepted=False/InvalidSpec", make_pod(), nodes=DOOMED)
    pod = make_pod(notice=notice(60))
    job.look("deletes=0 attempt=1", pod, nodes=DOOMED, annotated_at=after(-2))
    saved = told(Outcome.INTERRUPTED, step=9, durableStep=9, pod=deleted(20) | {"notice": notice(60)})
    job.look("cause1=SpotNotice interruptions=1 attempt=1 durable=9 !creates", saved, at=20, nodes=DOOMED)
    job.look("attempt=1 releases=0 !creates !Failed Accepted=False", saved, at=21, nodes=DOOMED)
    job.look("attempt=1 !creates !Failed", at=90, nodes=DOOMED)
    job.look("attempt=2 creates=0", at=200, nodes=DOOMED, spec=raw_spec(), meta={"generation": 2})


ENDS: dict[str, tuple[Observed, str]] = {
    "a crash": (unread(ended_pod(code=1)), "cause1=Failed failures=1 attempt=1 !creates"),
    "done": (unread(told(Outcome.DONE, step=9)), "Succeeded=True/Completed phase=Succeeded"),
    "a bad configuration": (unread(told(Outcome.BAD_CONFIGURATION)), "Failed=True"),
    "a lost node": (unread(make_pod(), nodes=()), "cause1=NodeLost interruptions=1 deletes=0 !creates"),
    "a hang": (unread(make_pod(), sample=sample(hangSeconds=9.0, idleSeconds=9.0)), "stopping1=Stalled"),
    "advice": (unread(make_pod(), nodes=(make_node(save_advised="2026-03-01T12:00:00Z"),)), "annotates=0"),
    "nothing": (unread(make_pod()), "Accepted=False/InvalidSpec !deletes !cause1"),
    "exit code 0, which only the spec explains": (unread(ended_pod(code=0)), "!cause1 !Failed !releases"),
}  # fmt: skip


PENDING: dict[str, Any] = {"node": "", "phase": "Pending"}
NO_IMAGE = Waiting(reason="ImagePullBackOff", message="m", container="trainer")
PODS = (
    make_pod(),
    make_pod(**deleted()),
    make_pod(notice=notice()),
    make_pod(**PENDING, unschedulable="no node"),
    make_pod(**PENDING, avoids=("node-a",), unschedulable="no node"),
    make_pod(**PENDING, grouped=True),
    make_pod(phase="Pending", running_since=None, waiting=NO_IMAGE),
    make_pod(phase="Failed", reason="OutOfcpu"),
    ended_pod(code=1),
    *(told(outcome, step=3) for outcome in Outcome),
)
NODES = ((), (make_node(),), DOOMED, (make_node(fault="x"),), (make_node(ready=False),))
RECORD = started().attempts[0]
STATUSES = (
    Status(),
    started(2),
    started(gate_until=after(20)),
    *(
        started(attempts=(replace(RECORD, **more),))
        for more in (
            {"stopping": "Stalled", "evidence": "x"},
            {"cause": "SpotNotice", "ended": NOW},
            {"capacity_type": "OnDemand", "durable_step": 3, "workers": 2},
            {"start_error_since": after(-3600)},
        )
    ),
)


@pytest.mark.parametrize("meta", [{}, {"deletionTimestamp": "2026-03-01T11:59:00Z"}], ids=["kept", "deleted"])
def test_whatever_is_there_it_can_be_planned(meta: dict[str, Any]) -> None:
    for status in STATUSES:
        job = make_job(raw_spec(**OLD), status=status, **meta)
        for pod, nodes in product(PODS, NODES):
            o = unread(pod, job=job, nodes=nodes, annotated_at=after(-5), sample=sample(hangSeconds=9.0))
            plan(o)


@pytest.mark.parametrize("what", ENDS)
def test_what_befalls_it_is_handled(what: str) -> None:
    o, expected = ENDS[what]
    follows(expected, o)


def test_the_whole_gang_is_stopped_for_a_rank_that_failed() -> None:
    pods = [ended_pod(code=1), make_pod(rank=1)]
    status = started()
    record = replace(status.attempts[0], workers=2)
    job = make_job(raw_spec(**OLD), status=replace(status, attempts=(record,)))
    follows("stopping1=Failed deletes=1", unread(*pods, job=job))


def test_its_queue_gets_its_quota_back() -> None:
    labels = {QUEUE_LABEL: "team"}
    readable = make_job(raw_spec(), status=started(), labels=labels)
    admission = admitted(readable, make_pod(), **PREEMPTED).admission
    o = unread(make_pod(), job=make_job(raw_spec(**OLD), status=started(), labels=labels))
    follows("!stopping1 !deletes", o)
    follows("stopping1=Suspended reason1=Evicted deletes=0", replace(o, admission=admission))
