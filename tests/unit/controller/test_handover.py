"""Ask first: while a job trains on demand, the pods of its next attempt ask for spot."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain.contract import Env, Outcome
from spottrain_operator.api.kueue import Admission
from spottrain_operator.api.observed import PodView, Refusal
from spottrain_operator.api.training_job import KEPT_ATTEMPTS, AttemptRecord, RankRecord, Status
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.control.actions import Plan
from spottrain_operator.names import Cause, Reason

from tests.builders import (
    NOW,
    after,
    deleted,
    ended_pod,
    make_node,
    make_pod,
    manifests,
    notice,
    sample,
    told,
)
from tests.unit.controller.stories import Story

NODES = (make_node("od-node"), make_node("spot-node"))
POOLS = [
    {"name": "a", "platform": "AWS"},
    {"name": "b", "platform": "AWS"},
    {"name": "od", "platform": "AWS", "type": "OnDemand"},
]
CAPACITY: dict[str, Any] = {"type": "SpotFirst", "pools": POOLS}
CLAIM = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}


def on_demand(workers: int = 1, **more: Any) -> Status:
    """The first attempt trains on demand for two hours, and has saved."""
    ranks = tuple(RankRecord(rank=rank, node="od-node") for rank in range(workers))
    record = AttemptRecord(
        number=1,
        pod="p",
        pool="od",
        capacity_type="OnDemand",
        workers=workers,
        notice_seconds=110,
        started=after(-7300),
        node="od-node",
        durable_step=50,
        ranks=ranks,
    )
    record = replace(record, **more)
    return Status(attempt=1, attempts=(record,), known_durable_step=50)


def trains(rank: int = 0, **more: Any) -> PodView:
    return make_pod(1, rank, **{"node": "od-node", "running_since": after(-7200), "grace": 60} | more)


def waits(attempt: int = 2, rank: int = 0, **more: Any) -> PodView:
    """A pod of the request that has no node yet."""
    values: dict[str, Any] = {"node": "", "phase": "Pending", "created": NOW, "unschedulable": "no nodes"}
    return make_pod(attempt, rank, **values | more)


def gated(attempt: int = 2, rank: int = 0, **more: Any) -> PodView:
    """A pod of the request that runs, and waits at the gate."""
    values: dict[str, Any] = {"node": "spot-node", "created": NOW, "running_since": after(100)}
    return make_pod(attempt, rank, **values | more)


class Returns(Story):
    """A job on demand whose time to return to spot has come."""

    def __init__(self, workers: int = 1, status: Status | None = None, **spec: Any) -> None:
        spec = {"capacity": CAPACITY} | ({"workers": workers} if workers > 1 else {}) | spec
        super().__init__(status or on_demand(workers), **spec)

    def look(self, expected: str, *pods: PodView, **more: Any) -> Plan:
        return super().look(expected, *pods, **{"nodes": NODES} | more)

    def asked(self, workers: int = 1) -> Returns:
        """The request has begun."""
        ranks = ",".join(map(str, range(workers)))
        self.look(f"attempt=1 creates={ranks} !deletes !stopping", *map(trains, range(workers)))
        return self


def test_from_its_first_save_on_a_job_on_demand_is_looked_at_again_without_any_event() -> None:
    unsaved = replace(on_demand(durable_step=None), known_durable_step=None)
    job = Returns(unsaved.attempts[0].workers, unsaved)
    saved = sample(step=60, durableStep=50)
    job.look("attempt=1 durable=50 again=60 !creates", trains(), sample=saved)
    job.look("on=Spot creates=0", trains(), sample=saved, at=61)


def test_the_training_goes_on_while_the_next_attempts_pod_asks_for_spot_and_until_it_runs() -> None:
    job = Returns()
    made = job.look("attempt=1 on=Spot pool=a creates=0 !deletes !stopping !cause1", trains())
    assert [pod["metadata"]["name"] for pod in manifests(made)] == [job.status.attempts[1].pod]
    for pod in (waits(), waits(node="spot-node"), waits(node="spot-node", unschedulable="")):
        job.look("attempt=1 !deletes !creates !stopping !cause", trains(), pod, at=90)
    job.look("attempt=1 !deletes again=20", trains(), gated(running_since=after(100)), at=100)
    job.look(
        "attempt=2 cause1=Moved deletes-of-1 !deletes-of-2 tells=AttemptStarted", trains(), gated(), at=120
    )
    saves = trains(**deleted())
    job.look("attempt=2 !deletes !creates interruptions=0 failures=0 noProgress=0", saves, gated(), at=121)
    saved = told(Outcome.INTERRUPTED, 1, step=60, durableStep=60, pod={"node": "od-node"} | deleted())
    job.look("releases=0 durable=60 !creates Running=True", saved, gated(), at=130)
    done = told(Outcome.DONE, 2, step=100, startStep=60)
    job.look("Succeeded=True interruptions=0 failures=0", done, at=600)


def test_the_gate_of_the_request_stays_closed_until_it_is_given_up_or_the_other_has_saved() -> None:
    (pod,) = manifests(Returns().look("creates=0", trains()))
    env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
    longest = NOW + timedelta(seconds=600 + 600 + 60 + 10)
    assert int(env[Env.GATE_UNTIL] or 0) == longest.timestamp()


@pytest.mark.parametrize(
    ("state", "expected"), [("Gated", "stopping2=Replaced deletes"), ("Training", "!deletes")]
)
def test_pods_that_wait_for_an_attempt_that_was_killed_before_it_released_are_made_again(
    state: str, expected: str
) -> None:
    job = Returns().asked()
    job.look("attempt=2 cause1=Moved", trains(), gated(), at=120)
    saves, killed = trains(**deleted()), ended_pod(1, 137, node="od-node", grace=60, **deleted())
    for at in (130, 190):  # it may take all of its time
        told_at = replace(sample(attempt=2, state="Gated"), at=after(at))
        job.look("attempt=2 !deletes !stopping", saves, gated(), sample=told_at, at=at)
    job.look("attempt=2 !stopping", killed, gated(), sample=told_at, at=190, alone_since=after(190))
    polled = replace(sample(attempt=2, state=state), at=after(196))
    job.look(f"attempt=2 {expected}", gated(), sample=polled, at=196, alone_since=after(190))


def test_a_request_without_a_node_is_given_up_for_the_next_pool_and_the_training_has_not_noticed() -> None:
    job = Returns().asked()
    job.look("!deletes", trains(), waits(), at=599)
    job.look(
        "cause2=SchedulingTimeout deletes-of-2 !deletes-of-1 attempt=1 !warns", trains(), waits(), at=900
    )
    job.look("pool=b creates=0 attempt=1", trains(), waits(**deleted()), at=601)
    assert [r.number for r in job.status.attempts] == [1, 2, 3], "no number is used twice"
    job.look("cause3=SchedulingTimeout", trains(), waits(3), at=1201)
    job.look("!creates", trains(), at=1202)
    assert job.status.asking is None
    job.look("!creates", trains(), at=600 + 3599)
    job.look("pool=a creates=0 failures=0 interruptions=0", trains(), at=1202 + 3600)
    assert [r.number for r in job.status.attempts] == [1, 3, 4], "of each pool the last request is kept"


def test_a_pod_that_has_its_node_may_pull_its_image_for_a_while() -> None:
    starts = waits(node="spot-node", unschedulable="")
    job = Returns().asked()
    job.look("!deletes", trains(), starts, at=1199)
    job.look("cause2=SchedulingTimeout deletes-of-2 !deletes-of-1", trains(), starts, at=1200)


@pytest.mark.parametrize(
    "pod",
    [
        gated(**deleted()),
        gated(notice=notice()),
        ended_pod(2, 1, node="spot-node"),
    ],
    ids=["deleted", "its node goes", "ended"],
)
def test_a_request_whose_pod_ends_is_given_up(pod: PodView) -> None:
    job = Returns().asked()
    job.look("!deletes", trains(), waits(), at=10)
    job.look(
        "cause2=SchedulingTimeout attempt=1 failures=0 !deletes-of-1",
        trains(),
        pod,
        at=20,
    )


def test_a_request_that_is_rejected_is_given_up_and_not_repeated_at_once() -> None:
    job = Returns(capacity=CAPACITY | {"type": "SpotFirst", "pools": POOLS[1:]}).asked()
    quota = Refusal(
        generation=1, reason=Reason.QUOTA_EXCEEDED, message="quota", at=NOW, retry=timedelta(seconds=30)
    )
    job.look("cause2=SchedulingTimeout !creates", trains(), refusal=quota, at=1)
    job.look("!creates", trains(), at=60)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (trains(notice=notice(60), **deleted()), "SpotNotice"),
        (ended_pod(1, 1, node="od-node"), "Failed"),
        (told(Outcome.INTERRUPTED, 1, step=60, durableStep=60, pod={"node": "od-node"}), "Interrupted"),
    ],
)
def test_where_the_running_attempt_ends_otherwise_its_request_goes_and_the_next_one_starts_anew(
    end: PodView, cause: str
) -> None:
    job = Returns().asked()
    made = job.look(f"attempt=3 cause1={cause} deletes-of-2", end, waits(), at=10)
    assert [r.number for r in job.status.attempts] == [1, 3], "a number is never used for other pods"
    assert not [pod for pod in manifests(made) if pod["metadata"]["name"] == waits().name]


def test_earlier_requests_do_not_delay_the_next_attempt() -> None:
    """They are no attempts that have failed to start."""
    asked, alone = Returns().asked(), Returns()
    asked.look("cause2=SchedulingTimeout", trains(), waits(), at=600)
    lost = told(Outcome.INTERRUPTED, 1, step=60, durableStep=60, pod={"node": "od-node"})
    for job in (asked, alone):
        job.look("cause1=Interrupted interruptions=1", lost, at=650)
    assert asked.status.next_start is not None and alone.status.next_start is not None
    assert abs(asked.status.next_start - alone.status.next_start) < timedelta(seconds=2)


def test_an_attempt_after_the_one_that_took_over_waits_for_the_first_that_still_saves() -> None:
    job = Returns().asked()
    job.look("attempt=2 cause1=Moved", trains(), gated(), at=120)
    saves = trains(deleted=after(180), deletion_grace=60)
    lost = told(Outcome.INTERRUPTED, 2, pod={"node": "spot-node"} | deleted())
    job.look("attempt=3 !creates start=+10", saves, lost, at=125)
    made = job.look("attempt=3 creates=0", saves, at=135)
    (pod,) = manifests(made)
    env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
    assert int(env[Env.GATE_UNTIL] or 0) == after(190).timestamp()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"spec": {"suspend": True}}, "stopping1=Suspended cause2=Replaced"),
        (
            {"meta": {"deletionTimestamp": rfc3339(NOW), "finalizers": ["spottrain.io/checkpoints"]}},
            "attempt=1",
        ),
        ({"spec": {"capacity": {"type": "OnDemand", "pools": POOLS[2:]}}}, "cause2"),
    ],
    ids=["suspended", "deleted", "no spot any more"],
)
def test_a_request_goes_with_what_it_was_for(changed: dict[str, Any], expected: str) -> None:
    Returns().asked().look(f"deletes-of-2 {expected}", trains(), waits(), at=10, **changed)


def test_a_job_that_is_done_while_it_asks_keeps_no_pod_that_waits() -> None:
    done = told(Outcome.DONE, 1, step=100, pod={"node": "od-node"})
    Returns().asked().look("Succeeded=True deletes-of-2", done, waits(), at=10)


@pytest.mark.parametrize(
    ("more", "spec"),
    [
        ({"admission": Admission()}, {}),
        ({"claims": {"data": ("ReadWriteOnce",)}}, {}),
        ({}, {"checkpoint": {"mode": "Self"}}),
    ],
    ids=["its quota is for one", "its volume is", "nothing waits at a gate"],
)
def test_where_two_attempts_must_not_exist_it_ends_before_it_asks(
    more: dict[str, Any], spec: dict[str, Any]
) -> None:
    if "admission" in more:
        more = {"meta": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}} | more
    Returns(**spec).look("attempt=1 !creates !on=Spot", trains(), **more)


def test_a_gang_asks_as_a_whole_and_moves_when_all_of_its_pods_run() -> None:
    job = Returns(2).asked(2)
    old, first = (trains(0), trains(1)), gated(2, 0)
    job.look("attempt=1 !deletes", *old, first, waits(2, 1), at=200)
    job.look(
        "attempt=2 cause1=Moved deletes=0,1 deletes-of-1 !deletes-of-2", *old, first, gated(2, 1), at=300
    )


def test_a_gang_some_of_whose_pods_have_no_node_gives_the_others_back() -> None:
    job = Returns(2).asked(2)
    job.look(
        "cause2=SchedulingTimeout deletes=0,1 !deletes-of-1",
        *map(trains, (0, 1)),
        gated(2, 0),
        waits(2, 1),
        at=900,
    )


def test_an_operator_that_died_after_the_status_creates_the_pods_and_after_the_handover_deletes() -> None:
    job = Returns().asked()
    job.look("creates=0 attempt=1", trains(), at=5)
    job.look("attempt=2 cause1=Moved", trains(), gated(), at=120)
    job.look("attempt=2 deletes-of-1 !creates", trains(), gated(), at=500)


def test_the_record_of_the_attempt_that_trains_stays_however_often_it_asks() -> None:
    many = [{"name": f"spot-{n}", "platform": "AWS"} for n in range(KEPT_ATTEMPTS - 1)]
    job = Returns(capacity=CAPACITY | {"pools": [*many, POOLS[2]]})
    at = 0.0
    for _ in range(3 * KEPT_ATTEMPTS):
        job.look("attempt=1", trains(), at=at)
        asked = job.status.asking
        pods = (waits(asked.number, created=after(at)),) if asked is not None else ()
        at += 601
        job.look("attempt=1 !stopping1", trains(), *pods, at=at)
    assert job.status.attempts[0].number == 1
    assert Cause.SCHEDULING_TIMEOUT in {r.cause for r in job.status.attempts}


def test_both_nodes_are_paid_from_when_the_request_has_its_own() -> None:
    job = Returns().asked()
    old, new = trains(bound=after(-7200)), gated(bound=after(60), running_since=after(100))
    books = job.look("attempt=1", old, new, at=110).books
    assert books is not None and {node.name for node in books.ledger.nodes} == {"od-node", "spot-node"}
