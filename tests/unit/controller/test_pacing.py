"""Which changes of a status are written at once, and that facts that come one by one make few writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from spottrain_operator.api.observed import Annotate, Event, Limits, Plan
from spottrain_operator.api.training_job import (
    AttemptRecord,
    ConditionStatus,
    CostStatus,
    GoodputStatus,
    ProgressStatus,
    RankRecord,
    Status,
    with_record,
)
from spottrain_operator.control.pacing import paced, patience
from spottrain_operator.names import Condition

from tests.builders import KEY, NOW, after, make_pod
from tests.unit.controller.fake_cluster import KeySet, World, resync

LIMITS = Limits()
AT_ONCE, FACTS, COUNTS = timedelta(0), LIMITS.facts_delay, LIMITS.counts_delay
Change = Callable[[Status], Status]


def _condition(kind: Condition, value: str, reason: str = "R", message: str = "") -> ConditionStatus:
    return ConditionStatus(type=kind, status=value, reason=reason, message=message, last_transition_time=NOW)


def _gang(workers: int = 8, **more: Any) -> Status:
    record = AttemptRecord(number=1, pool="default", workers=workers, **more)
    known = (_condition(Condition.ACCEPTED, "True"), _condition(Condition.SCHEDULED, "False"))
    return Status(observed_generation=1, phase="Pending", attempt=1, attempts=(record,), conditions=known)


def _record(**more: Any) -> Change:
    return lambda status: with_record(status, replace(status.attempts[0], **more))


def _said(kind: Condition, value: str, reason: str = "R", message: str = "") -> Change:
    def change(status: Status) -> Status:
        others = tuple(c for c in status.conditions if c.type != kind)
        return replace(status, conditions=(*others, _condition(kind, value, reason, message)))

    return change


def _set(**more: Any) -> Change:
    return lambda status: replace(status, **more)


@pytest.mark.parametrize(
    ("change", "wait"),
    [
        # counts, while the pods of a gang get their nodes
        (_set(ready_workers=3), COUNTS),
        (_record(created_workers=3), COUNTS),
        (_said(Condition.SCHEDULED, "False", "WaitingForPod", "3 of 8 pods have a node"), COUNTS),
        (_said(Condition.RUNNING, "False", "ContainerStarting"), COUNTS),
        # facts that people look for
        (_set(phase="Starting"), FACTS),
        (_said(Condition.SCHEDULED, "True"), FACTS),
        (_said(Condition.RUNNING, "True"), FACTS),
        (_record(bound=NOW), FACTS),
        # decisions, ends, what is new of the spec
        (_set(observed_generation=2), AT_ONCE),
        (_set(attempt=2), AT_ONCE),
        (_set(failures=1), AT_ONCE),
        (_set(next_start=NOW), AT_ONCE),
        (_set(gate_until=NOW), AT_ONCE),
        (_set(active_since=NOW), AT_ONCE),
        (_record(cause="SpotNotice"), AT_ONCE),
        (_record(stopping="Suspended"), AT_ONCE),
        (_record(ended=NOW), AT_ONCE),
        (_record(exit_code=1), AT_ONCE),
        (_record(ranks=(RankRecord(rank=3, exit_code=1),)), AT_ONCE),
        (_record(start_error_since=NOW), AT_ONCE),
        (_said(Condition.ACCEPTED, "False"), AT_ONCE),
        (_said(Condition.ACCEPTED, "True", "Other"), AT_ONCE),
        (_said(Condition.SUSPENDED, "True"), AT_ONCE),
        (_said(Condition.STORE_REACHABLE, "False"), AT_ONCE),
        (_said(Condition.COST_LIMITED, "True"), AT_ONCE),
        (_said(Condition.SUCCEEDED, "True"), AT_ONCE),
        (_said(Condition.FAILED, "True"), AT_ONCE),
    ],
)
def test_a_decision_is_written_at_once_and_facts_wait(change: Change, wait: timedelta) -> None:
    old = _gang()
    assert patience(old, change(old), LIMITS) == wait


@pytest.mark.parametrize(
    "change",
    [
        _set(ready_workers=7),
        _record(created_workers=3),
        _said(Condition.RUNNING, "False", "NodeNotReady"),
        _said(Condition.SCHEDULED, "False", "R", "the scheduler says something else"),
        _said(Condition.INTERRUPTED, "False"),
    ],
)
def test_once_all_pods_have_nodes_facts_wait_for_a_moment_only(change: Change) -> None:
    old = _gang(bound=NOW)
    assert patience(old, change(old), LIMITS) == FACTS


@pytest.mark.parametrize("more", [{}, {"bound": NOW}])
@pytest.mark.parametrize(
    "change",
    [
        _set(progress=ProgressStatus(step=7)),
        _set(goodput=GoodputStatus()),
        _set(cost=CostStatus()),
        _set(known_durable_step=7),
        _record(stepped=NOW),
        _record(last_step=7),
    ],
)
def test_progress_and_costs_have_waited_already(change: Change, more: dict[str, Any]) -> None:
    """They are due at intervals; to wait for further facts would only be one more reconcile."""
    old = _gang(**more)
    assert patience(old, change(old), LIMITS) == AT_ONCE
    assert patience(old, _set(ready_workers=1)(change(old)), LIMITS) > AT_ONCE, (
        "with a pod's start they wait for it"
    )


def test_a_lone_worker_has_no_counts_to_wait_for() -> None:
    old = _gang(workers=1)
    waits = _said(Condition.SCHEDULED, "False", "WaitingForPod", "it waits for the scheduler")(old)
    assert patience(old, waits, LIMITS) == FACTS


def _plan(status: Status | None, **more: Any) -> Plan:
    return Plan(reason="Keep", message="", status=status, **more)


def test_facts_wait_for_their_time_once_and_are_then_written() -> None:
    old = _gang(bound=NOW)
    news = _plan(replace(old, ready_workers=1), recheck_after=timedelta(minutes=1))
    made, due = paced(news, old, None, NOW, LIMITS)
    assert made.status is None and made.recheck_after == FACTS and due == NOW + FACTS
    more = _plan(replace(old, ready_workers=2))
    made, due = paced(more, old, due, after(0.2), LIMITS)
    assert made.status is None and due == NOW + FACTS, "further facts do not put the write off"
    made, due = paced(more, old, due, after(0.3), LIMITS)
    assert made == more and due is None


def test_a_phase_is_not_put_off_by_the_counts_before_it() -> None:
    old = _gang()
    _, due = paced(_plan(replace(old, ready_workers=1)), old, None, NOW, LIMITS)
    assert due == NOW + COUNTS
    _, due = paced(_plan(replace(old, phase="Starting")), old, due, after(1), LIMITS)
    assert due == after(1) + FACTS


def test_nothing_is_left_to_write_where_the_facts_are_as_before() -> None:
    assert paced(_plan(None), _gang(), after(3), NOW, LIMITS) == (_plan(None), None)


def test_a_clock_that_was_set_back_puts_nothing_off() -> None:
    old = _gang(bound=NOW)
    _, due = paced(_plan(replace(old, ready_workers=1)), old, after(3600), NOW, LIMITS)
    assert due == NOW + FACTS


@pytest.mark.parametrize(
    "more",
    [
        {"before": (Annotate(pod=make_pod(), words={}),)},
        {"after": (Annotate(pod=make_pod(), words={}),)},
        {"events": (Event(warning=False, reason="R", message=""),)},
    ],
)
def test_a_status_with_an_action_or_an_event_is_written_at_once(more: dict[str, Any]) -> None:
    old = _gang(bound=NOW)
    made = _plan(replace(old, ready_workers=1), **more)
    assert paced(made, old, None, NOW, LIMITS) == (made, None)


class _Operator:
    """Reconciles at each event and at each time that a reconcile asks for."""

    def __init__(self, world: World) -> None:
        self.world, self.cluster = world, world.cluster
        self.due: datetime | None = None

    async def look(self) -> None:
        again: timedelta | None = timedelta(0)
        while again == timedelta(0):
            again = await self.world.reconciler(KEY)
        self.due = self.cluster.now + again if again is not None else None

    async def wait(self, seconds: float) -> None:
        end = self.cluster.now + timedelta(seconds=seconds)
        while self.due is not None and self.due <= end:
            self.cluster.now = max(self.due, self.cluster.now)
            await self.look()
        self.cluster.now = end


@pytest.mark.parametrize("seconds_between", [0.02, 0.1, 0.5, 1.0])
async def test_a_gang_whose_pods_start_one_by_one_makes_at_most_four_writes(seconds_between: float) -> None:
    world = World({"workers": 8, "capacity": {"sameZone": False}})
    cluster, operator = world.cluster, _Operator(world)
    for rank in range(8):
        cluster.add_node(f"n{rank}")
    await resync(cluster, world.caches, KeySet(), ())
    writes: list[str] = []
    real = cluster.apply_status

    async def apply_status(*args: Any, **more: Any) -> Any:
        writes.append(f"{more['status']['phase']} {more['status']['readyWorkers']}")
        return await real(*args, **more)

    cluster.apply_status = apply_status  # type: ignore[method-assign]
    await operator.look()
    for rank in range(8):
        await operator.wait(seconds_between)
        name = world.pod(1, rank)
        cluster.pods[name]["spec"]["nodeName"] = f"n{rank}"
        cluster._bump(cluster.pods[name])
        world.see_pod(cluster.pods[name])
        await operator.look()
        await operator.wait(0.05)
        cluster.bind(name, f"n{rank}")
        world.see_pod(cluster.pods[name])
        await operator.look()
    await operator.wait(0.5)
    assert world.status.ready_workers == 8 and world.status.attempts[0].complete
    assert len(writes) <= 4, writes
    # An end is written at once, though facts wait.
    cluster.bind(world.pod(1, 3), "n3")
    cluster.end(world.pod(1, 3), 1, "Traceback: boom")
    world.see_pod(cluster.pods[world.pod(1, 3)])
    await operator.look()
    assert world.status.attempts[0].stopping
