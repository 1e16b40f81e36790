"""Which pool the next attempt is made for, when spot is given up for a while, and when it is gone back to."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.api.node_pools import NOTHING, CapacityType, Pool, Preset, chosen
from spottrain_operator.api.observed import Annotate, Create, Delete, Ending, Observed, Plan
from spottrain_operator.api.training_job import AttemptRecord, RankRecord, Status
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition, Phase, Platform
from spottrain_operator.policies import capacity

from tests.builders import (
    NOW,
    after,
    condition,
    deleted,
    make_job,
    make_node,
    make_observed,
    make_pod,
    notice,
    raw_spec,
    started,
    told,
)

Json = dict[str, Any]
SPOT_A = {"name": "a", "platform": "AWS"}
SPOT_B = {"name": "b", "platform": "AWS"}
ON_DEMAND = {"name": "od", "platform": "AWS", "type": "OnDemand"}
SPOT_FIRST: Json = {"type": "SpotFirst", "pools": [SPOT_A, SPOT_B, ON_DEMAND]}


def past(*endings: tuple[str, Cause, float]) -> Status:
    """Attempts that have ended, by (pool, cause, minutes ago)."""
    records = tuple(
        AttemptRecord(
            number=number,
            pool=pool,
            capacity_type="OnDemand" if pool == "od" else "Spot",
            cause=cause,
            started=after(-60 * ago - 600),
            ended=after(-60 * ago),
            node="node-a",
        )
        for number, (pool, cause, ago) in enumerate(endings, 1)
    )
    return Status(attempt=len(records), attempts=records, interruptions=len(records))


def observed(status: Status, spec: Json, **more: Any) -> Observed:
    return make_observed(job=make_job(raw_spec(capacity=spec), status=status), **more)


def choice(status: Status, spec: Json = SPOT_FIRST) -> str:
    return capacity.choose(observed(status, spec), status).name


RECLAIMED = Cause.SPOT_NOTICE


@pytest.mark.parametrize(
    ("history", "pool"),
    [
        ([], "a"),
        ([("a", RECLAIMED, 1)], "b"),
        ([("a", RECLAIMED, 11)], "a"),
        ([("a", RECLAIMED, 5), ("b", RECLAIMED, 1)], "a"),
        ([("a", Cause.FAILED, 1)], "a"),
        ([("a", Cause.SCHEDULING_TIMEOUT, 1)], "b"),
    ],
    ids=["first", "the other", "cooled", "the least recent", "a failure is not the pool's", "dry"],
)
def test_a_pool_that_has_just_interrupted_comes_after_the_others(
    history: list[tuple[str, Cause, float]], pool: str
) -> None:
    assert choice(past(*history)) == pool


@pytest.mark.parametrize(
    ("history", "pool"),
    [
        ([("a", RECLAIMED, 50), ("b", RECLAIMED, 30), ("a", RECLAIMED, 1)], "od"),
        ([("a", RECLAIMED, 70), ("b", RECLAIMED, 30), ("a", RECLAIMED, 1)], "b"),
        ([("a", Cause.SCHEDULING_TIMEOUT, 12), ("b", Cause.SCHEDULING_TIMEOUT, 1)], "od"),
        ([("a", Cause.SCHEDULING_TIMEOUT, 80), ("b", Cause.SCHEDULING_TIMEOUT, 1)], "a"),
        ([("a", RECLAIMED, 9), ("b", RECLAIMED, 8), ("a", RECLAIMED, 7), ("od", Cause.MOVED, 1)], "b"),
        ([("a", RECLAIMED, 9), ("b", RECLAIMED, 8), ("a", RECLAIMED, 7), ("od", Cause.NODE_LOST, 1)], "od"),
    ],
    ids=[
        "three in an hour",
        "two in it",
        "all dry",
        "dry long ago",
        "after going back",
        "on demand it stays",
    ],
)
def test_spot_first_falls_back_and_comes_back(history: list[tuple[str, Cause, float]], pool: str) -> None:
    assert choice(past(*history)) == pool


def test_the_choice_is_in_the_record_before_a_pod_is_made() -> None:
    made = plan(observed(Status(), SPOT_FIRST))
    assert made.status is not None and made.status.attempts[0].pool == "a"
    assert made.status.attempts[0].capacity_type == "Spot"
    again = plan(observed(made.status, SPOT_FIRST))
    assert again.status is None and [type(a) for a in again.after] == [Create]


def on_demand_attempt(**more: Any) -> Status:
    record = AttemptRecord(
        number=1,
        pod="p",
        pool="od",
        capacity_type="OnDemand",
        started=after(-7200),
        node="node-a",
        durable_step=50,
        ranks=(RankRecord(rank=0, node="node-a"),),
    )
    return Status(attempt=1, attempts=(replace(record, **more),), known_durable_step=50)


def moves(status: Status, minutes: float) -> Plan:
    pod = make_pod(running_since=NOW - timedelta(minutes=minutes))
    return plan(make_observed(pod, job=make_job(raw_spec(capacity=SPOT_FIRST), status=status)))


def test_it_goes_back_to_spot_after_its_time_saving_first_and_losing_nothing() -> None:
    assert not [a for a in moves(on_demand_attempt(), 59).after if isinstance(a, Delete)]
    made = moves(on_demand_attempt(), 61)
    assert made.status is not None and made.status.attempts[0].stopping == Cause.MOVED
    assert [a for a in made.after if isinstance(a, Delete)]
    ended = told(Outcome.INTERRUPTED, step=60, durableStep=60, pod=deleted())
    last = plan(make_observed(ended, job=make_job(raw_spec(capacity=SPOT_FIRST), status=made.status))).status
    assert last is not None and (last.attempts[1].pool, last.attempts[1].capacity_type) == ("a", "Spot")
    assert (last.interruptions, last.failures) == (0, 0)


def test_it_does_not_go_back_before_this_attempt_has_saved() -> None:
    made = moves(on_demand_attempt(durable_step=None), 600)
    assert not [a for a in made.after if isinstance(a, Delete)]


def test_a_pool_without_nodes_is_left_for_the_next_one() -> None:
    waiting = make_pod(node="", phase="Pending", unschedulable="no nodes", created=after(-601))
    record = replace(on_demand_attempt().attempts[0], pool="a", capacity_type="Spot", node="")
    status = Status(attempt=1, attempts=(record,))
    made = plan(make_observed(waiting, job=make_job(raw_spec(capacity=SPOT_FIRST), status=status)))
    assert made.status is not None and made.status.attempts[0].stopping == Cause.SCHEDULING_TIMEOUT
    gone = make_pod(node="", phase="Pending", **deleted())
    last = plan(make_observed(gone, job=make_job(raw_spec(capacity=SPOT_FIRST), status=made.status))).status
    assert last is not None and last.attempts[0].cause == Cause.SCHEDULING_TIMEOUT
    assert last.attempts[1].pool == "b" and last.interruptions == 0


def test_pods_that_their_queue_has_not_admitted_have_no_time_to_lose() -> None:
    waiting = make_pod(node="", phase="Pending", queued=True, unschedulable="gated", created=after(-9999))
    record = replace(on_demand_attempt().attempts[0], pool="a", capacity_type="Spot", node="")
    job = make_job(raw_spec(capacity=SPOT_FIRST), status=Status(attempt=1, attempts=(record,)))
    made = plan(make_observed(waiting, job=job))
    assert made.status is not None and made.status.attempt == 1
    scheduled = condition(made, Condition.SCHEDULED)
    assert scheduled.reason == "WaitingForQueue" and made.status.phase == Phase.WAITING


# --- what a pool is -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("preset", "kind", "label", "window"),
    [
        (Preset.EKS, "Spot", {"eks.amazonaws.com/capacityType": "SPOT"}, 110),
        (Preset.EKS, "OnDemand", {"eks.amazonaws.com/capacityType": "ON_DEMAND"}, 110),
        (Preset.KARPENTER, "Spot", {"karpenter.sh/capacity-type": "spot"}, 15),
        (Preset.KARPENTER, "Reserved", {"karpenter.sh/capacity-type": "reserved"}, 110),
        (Preset.GKE, "Spot", {"cloud.google.com/gke-spot": "true"}, 15),
        (Preset.GKE, "OnDemand", {}, 110),
        (Preset.AKS, "Spot", {"kubernetes.azure.com/scalesetpriority": "spot"}, 25),
    ],
)
def test_a_preset_knows_labels_and_window(preset: Preset, kind: str, label: Json, window: int) -> None:
    pool = Pool(name="p", preset=preset, type=CapacityType(kind), node_selector={"x": "y"})
    assert pool.selector == label | {"x": "y"} and chosen(pool, NOTHING).window == window


def test_spot_nodes_of_gke_and_aks_are_tolerated_and_theirs_alone() -> None:
    for preset, key in (
        (Preset.GKE, "cloud.google.com/gke-spot"),
        (Preset.AKS, "kubernetes.azure.com/scalesetpriority"),
    ):
        spot, demand = (Pool(name="p", preset=preset, type=t) for t in ("Spot", "OnDemand"))  # type: ignore[arg-type]
        assert key in {t["key"] for t in spot.tolerated} and key not in {t["key"] for t in demand.tolerated}


def test_a_pool_that_the_platform_team_has_named_needs_no_more_than_its_name() -> None:
    named = {"gpus": Pool(name="gpus", platform=Platform.GKE, node_selector={"team": "ml"})}
    o = replace(observed(Status(), {"pools": [{"name": "gpus"}]}), pools=named)
    pod = next(a.manifest for a in plan(o).after if isinstance(a, Create))
    assert (
        pod["spec"]["nodeSelector"] == {"team": "ml"} and pod["spec"]["terminationGracePeriodSeconds"] == 15
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"pools": [{"name": "gpus"}]}, "the operator knows no pool of this name (it knows none"),
        ({"type": "SpotFirst", "pools": [SPOT_A]}, "has no pool of type OnDemand"),
        ({"type": "SpotFirst", "pools": [ON_DEMAND]}, "has no pool of type Spot"),
    ],
)
def test_pools_that_cannot_be_are_a_sentence_in_the_condition(spec: Json, words: str) -> None:
    made = plan(observed(Status(), spec))
    assert made.status is not None and not made.after
    accepted = condition(made, Condition.ACCEPTED)
    assert accepted.status == "False" and words in accepted.message
    assert made.status.phase == Phase.INVALID


# --- a pool that is not to be understood any more ---------------------------------------------------------
UNKNOWN: Json = {"pools": [{"name": "renamed"}]}


def test_what_runs_in_it_runs_on_and_is_told_of_its_end() -> None:
    status = started()
    o = make_observed(
        make_pod(),
        job=make_job(raw_spec(capacity=UNKNOWN), status=status),
        nodes=(make_node(notice=notice(60)),),
    )
    assert [type(a) for a in plan(o).before] == [Annotate]
    done = make_observed(told(Outcome.DONE, step=9), job=make_job(raw_spec(capacity=UNKNOWN), status=status))
    ended = plan(done).status
    assert ended is not None and ended.phase == Phase.SUCCEEDED


def test_no_attempt_is_made_for_it_until_it_is_put_right() -> None:
    ended = told(Outcome.INTERRUPTED, step=9, durableStep=9, pod=deleted())
    made = plan(make_observed(ended, job=make_job(raw_spec(capacity=UNKNOWN), status=started())))
    assert made.status is not None and made.status.attempt == 1 and made.status.attempts[0].cause
    assert made.status.phase == Phase.INVALID
    right = plan(make_observed(job=make_job(raw_spec(), status=made.status)))
    assert right.status is not None and right.status.attempt == 2


def test_a_pending_pod_of_it_is_no_error_of_ours() -> None:
    waiting = make_pod(node="", phase="Pending", unschedulable="x", created=after(-9999))
    made = plan(make_observed(waiting, job=make_job(raw_spec(capacity=UNKNOWN), status=started())))
    assert made.status is not None and made.status.condition(Condition.ACCEPTED).status == "False"  # type: ignore[union-attr]


def test_more_interruptions_than_attempts_are_kept_still_lead_on_demand() -> None:
    """The records go back 20 attempts; onDemandAfter.interruptions may be more."""
    rule = {"interruptions": 30, "withinSeconds": 86400}
    spec = SPOT_FIRST | {"onDemandAfter": rule}
    status, kinds = Status(), []
    for minute in range(32):
        job = make_job(raw_spec(capacity=spec), status=status)
        o = make_observed(job=job, now=after(60 * minute))
        if status.attempt:
            taken = deleted() | {"disruption": "taken: by the cloud"}
            pod = told(Outcome.INTERRUPTED, status.attempt, durableStep=minute, pod=taken)
            o = replace(o, pods=(pod,))
        made = plan(o)
        assert made.status is not None
        status = made.status
        kinds.append(status.attempts[-1].capacity_type)
    assert "OnDemand" in kinds and kinds.index("OnDemand") == 30
    assert len(status.attempts) == 20 and len(status.spot_reclaims) == 30


def test_a_move_back_to_spot_forgets_the_reclaims_before_it() -> None:
    status = Status(attempt=1, spot_reclaims=(NOW,) * 5)
    o = observed(status, SPOT_FIRST)
    moved = capacity.with_reclaim(o, status, Ending(cause=Cause.MOVED, evidence=""))
    assert moved.spot_reclaims == ()
