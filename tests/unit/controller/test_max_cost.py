"""capacity.maxCost: the job is stopped in time, as suspend stops it, and goes on when the limit is raised."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spottrain.contract import Outcome
from spottrain_operator.api.node_pools import of_node
from spottrain_operator.api.observed import NodeView, Observed, Plan, PodView
from spottrain_operator.api.prices import PriceList, parse
from spottrain_operator.api.training_job import CostStatus, Status
from spottrain_operator.api.validation import parse_spec
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition, Phase

from tests.builders import (
    NOW,
    after,
    condition,
    deleted,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    manifests,
    notice,
    raw_spec,
    removed,
    started,
    status_of,
    told,
)

SPOT = {"instanceType": "g5", "capacityType": "Spot", "usdPerHour": 3600}
ON_DEMAND = SPOT | {"capacityType": "OnDemand", "usdPerHour": 7200}
PRICES = parse(json.dumps([SPOT, ON_DEMAND]))
"""A spot node costs a dollar a second."""
BOUND = after(-500)
POD: dict[str, Any] = {"bound": BOUND, "gpus": 1}
POOLS = [
    {"name": "cheap", "platform": "AWS", "type": "Spot"},
    {"name": "sure", "platform": "AWS", "type": "OnDemand"},
]


def node(**more: Any) -> NodeView:
    found = of_node({"karpenter.sh/capacity-type": "spot"}, "aws:///us-east-1a/i-1")
    values: dict[str, Any] = {"created": after(-900), "instance_type": "g5", "gpus": 1, "found": found}
    return make_node(**(values | more))


def seen(
    *pods: PodView,
    limit: Any = 1000,
    status: Status | None = None,
    at: datetime = NOW,
    prices: PriceList = PRICES,
    nodes: tuple[NodeView, ...] = (node(),),
    generation: int = 1,
    **capacity: Any,
) -> Observed:
    spec = raw_spec(capacity={"maxCost": limit} | capacity if limit is not None else capacity)
    job = make_job(spec, status=status or started(), generation=generation)
    return replace(make_observed(*pods, job=job, nodes=nodes, now=at), prices=prices)


def spent(made: Plan) -> Decimal:
    status = status_of(made)
    assert status.cost is not None
    return status.cost.spent


def stopped() -> Status:
    """Of a job that has cost 500 dollars, was limited to that, and has saved step 40."""
    stopping = status_of(plan(seen(make_pod(**POD), limit=500)))
    last = told(Outcome.INTERRUPTED, step=40, durableStep=40, pod={**deleted(), **POD})
    return status_of(plan(seen(last, limit=500, status=stopping)))


# --- the stop -------------------------------------------------------------------------------------------
def test_a_job_that_has_cost_its_limit_saves_ends_and_is_suspended_without_a_charge() -> None:
    assert not removed(plan(seen(make_pod(**POD), limit=501)))
    made = plan(seen(make_pod(**POD), limit=500))
    assert removed(made) == {0} and status_of(made).phase == Phase.STOPPING
    status = stopped()
    found = condition(status, Condition.SUSPENDED)
    assert (found.status, found.reason) == ("True", "MaxCostReached")
    assert "capacity.maxCost (500 US dollars): 500.00 US dollars before refunds; raise" in found.message
    assert status.phase == Phase.SUSPENDED and status.attempts[0].cause == Cause.SUSPENDED
    assert status.attempts[0].reason == "MaxCostReached" and status.known_durable_step == 40
    assert (status.attempt, status.failures, status.interruptions) == (1, 0, 0)
    assert status.active_since is None, "activeDeadlineSeconds does not run"


def test_it_stays_suspended_and_its_sentence_does_not_change_with_each_second() -> None:
    status = stopped()
    later = plan(seen(limit=500, status=status, at=after(200)))
    assert not manifests(later)
    if later.status is not None:  # the sums of the idle node
        assert replace(later.status, cost=None) == replace(status, cost=None)


def test_a_refund_does_not_lift_the_stop() -> None:
    """AWS takes the idle node back in its first hour: that costs nothing, but the job would start again."""
    status = stopped()
    taken = node(notice=notice(60), reclaimed=True)
    status = status_of(plan(seen(limit=500, status=status, nodes=(taken,), at=after(30))))
    made = plan(seen(limit=500, status=status, nodes=(), at=after(60)))
    status = status_of(made)
    assert status.cost is not None and status.cost.refunded >= 500 and status.cost.spent == 0
    assert status.attempt == 1 and not manifests(made)
    assert condition(status, Condition.SUSPENDED).reason == "MaxCostReached"
    raised = plan(seen(limit=700, status=status, nodes=(), at=after(90), generation=2))
    assert status_of(raised).attempt == 2 and manifests(raised)


@pytest.mark.parametrize("limit", [5000, "5000", "5000.25", None])
def test_raised_or_left_out_it_goes_on_with_the_next_attempt(limit: Any) -> None:
    made = plan(seen(limit=limit, status=stopped(), at=after(60), generation=2))
    status = status_of(made)
    assert status.attempt == 2 and manifests(made)
    assert condition(status, Condition.SUSPENDED).status == "False" and status.active_since == after(60)


def test_a_limit_below_what_was_spent_stops_a_running_job_at_once() -> None:
    first = status_of(plan(seen(make_pod(**POD), limit=None)))
    made = plan(seen(make_pod(**POD), limit="0.01", status=first, generation=2))
    assert removed(made) == {0}


def test_a_suspension_by_the_user_keeps_its_own_sentence() -> None:
    job = make_job(raw_spec(suspend=True, capacity={"maxCost": 1}), status=stopped(), generation=2)
    made = plan(replace(make_observed(job=job, nodes=(node(),)), prices=PRICES))
    assert condition(made, Condition.SUSPENDED).reason == "Suspended"


def test_no_attempt_starts_while_the_limit_is_reached_even_one_that_has_its_record() -> None:
    waiting = replace(started(2), next_start=after(-1), cost=CostStatus(use=Decimal(7)))
    unseen = replace(waiting.attempts[1], started=None, ranks=(), node="")
    waiting = replace(waiting, attempts=(waiting.attempts[0], unseen))
    made = plan(seen(status=waiting, limit=7))
    assert not manifests(made)
    assert condition(made, Condition.SUSPENDED).reason == "MaxCostReached"
    assert condition(made, Condition.SCHEDULED).reason == "MaxCostReached"
    again = plan(seen(status=status_of(made), limit=8, generation=2))
    assert status_of(again).attempt == 2 and manifests(again), "and then it is that attempt which starts"


def test_a_suspended_job_whose_attempt_has_its_record_makes_no_pod() -> None:
    waiting = replace(started(2), next_start=after(-1))
    unseen = replace(waiting.attempts[1], started=None, ranks=(), node="")
    waiting = replace(waiting, attempts=(waiting.attempts[0], unseen))
    assert not manifests(plan(make_observed(job=make_job(raw_spec(suspend=True), status=waiting))))


def test_no_successor_starts_during_a_notice() -> None:
    doomed = node(notice=notice(60))
    made = plan(seen(make_pod(**POD), limit=500, nodes=(doomed,)))
    assert status_of(made).attempt == 1 and not manifests(made)


def test_a_job_that_is_done_when_its_limit_is_reached_is_done() -> None:
    made = plan(seen(ended_pod(message='{"outcome": "done", "step": 9}', **POD), limit=1))
    assert status_of(made).phase == Phase.SUCCEEDED and not status_of(made).is_true(Condition.SUSPENDED)


# --- in time --------------------------------------------------------------------------------------------
def test_the_limit_is_checked_with_the_sums_as_of_now_and_not_of_the_last_write() -> None:
    first = status_of(plan(seen(make_pod(**POD), limit=600)))
    assert spent(plan(seen(make_pod(**POD), limit=600))) == 500
    assert plan(seen(make_pod(**POD), limit=600, status=first, at=after(99))).status is None
    assert removed(plan(seen(make_pod(**POD), limit=600, status=first, at=after(100)))) == {0}


@given(limit=st.integers(501, 900), passed=st.integers(0, 300), micros=st.integers(0, 999_999))
def test_the_next_look_is_when_the_limit_will_be_reached(limit: int, passed: int, micros: int) -> None:
    """From wherever it looks, it looks again no more than a second after the limit, and never early in vain
    for ever."""
    first = status_of(plan(seen(make_pod(**POD), limit=limit)))
    at = min(after(passed), after(limit - 501)) + timedelta(microseconds=micros)
    made = plan(seen(make_pod(**POD), limit=limit, status=first, at=at))
    assert not removed(made) and made.recheck_after is not None
    again = at + made.recheck_after
    assert again <= after(limit - 500 + 1)
    if again >= after(limit - 500):
        assert removed(plan(seen(make_pod(**POD), limit=limit, status=first, at=again))) == {0}
    else:
        assert made.recheck_after >= timedelta(seconds=50), "only because something else is due then"


def test_a_new_price_counts_within_the_interval_of_the_sums() -> None:
    first = status_of(plan(seen(make_pod(**POD), limit=10**6)))
    made = plan(seen(make_pod(**POD), limit=10**6, status=first))
    assert made.recheck_after is not None and made.recheck_after <= timedelta(minutes=5, seconds=1)


def test_without_a_limit_nothing_is_computed_and_nothing_said() -> None:
    made = plan(seen(make_pod(**POD), limit=None))
    assert status_of(made).condition(Condition.COST_LIMITED) is None


# --- unknown prices -------------------------------------------------------------------------------------
def dry(first: Status) -> Observed:
    """A SpotFirst job whose only spot pool had no node in time."""
    given = first.attempts[0]
    old = replace(given, cause="SchedulingTimeout", ended=NOW, pool="cheap", instance_type="g5")
    return seen(status=replace(first, attempts=(old,)), type="SpotFirst", pools=POOLS, limit=10**6)


def test_with_known_prices_spot_first_falls_back_to_on_demand() -> None:
    made = plan(dry(started()))
    assert status_of(made).attempts[-1].capacity_type == "OnDemand"
    found = condition(made, Condition.COST_LIMITED)
    assert (found.status, found.reason) == ("True", "PricesKnown")


@pytest.mark.parametrize(
    "prices",
    [
        [SPOT],
        [SPOT, ON_DEMAND | {"usdPerHour": 0}],
        [SPOT, ON_DEMAND | {"checked": "2026-02-28T11:59:00Z"}],
        [SPOT, ON_DEMAND | {"instanceType": "g6"}],
    ],
    ids=["missing", "zero", "older than a day", "of another type"],
)
def test_without_an_on_demand_price_a_limited_job_stays_on_spot_and_says_so(prices: list[Any]) -> None:
    made = plan(replace(dry(started()), prices=parse(json.dumps(prices))))
    assert status_of(made).attempts[-1].capacity_type == "Spot"
    found = condition(made, Condition.COST_LIMITED)
    assert found.reason == "PriceUnknown"


def test_after_a_gap_in_the_prices_the_limit_is_no_guarantee_and_on_demand_is_used_again() -> None:
    cost = CostStatus(state="Unknown", unknown_seconds=Decimal(60), time=NOW)
    made = plan(dry(replace(started(), cost=cost)))
    assert status_of(made).attempts[-1].capacity_type == "OnDemand", "all present prices are known"
    found = condition(made, Condition.COST_LIMITED)
    assert (found.status, found.reason) == ("False", "PriceUnknown")
    assert "price list" not in found.message
    assert any(event.warning and event.reason == "PriceUnknown" for event in made.events)


def test_while_a_node_of_the_job_has_no_price_it_does_not_use_on_demand() -> None:
    """That node came for the job and is idle: its attempt has ended, and it is still paid for."""
    first = status_of(plan(seen(make_pod(**POD), prices=parse(json.dumps([ON_DEMAND])))))
    booted = node().created or NOW
    ended = replace(first.cost.nodes[0], start=booted, ended=NOW) if first.cost else None
    assert first.cost is not None and ended is not None
    idle = replace(started(), cost=replace(first.cost, nodes=(ended,)))
    made = plan(replace(dry(idle), prices=parse(json.dumps([ON_DEMAND]))))
    assert status_of(made).attempts[-1].capacity_type == "Spot"
    found = condition(made, Condition.COST_LIMITED)
    assert (found.status, found.reason) == ("False", "PriceUnknown")
    made = plan(dry(idle))
    assert status_of(made).attempts[-1].capacity_type == "OnDemand", "once it has one"


def test_an_unlimited_job_falls_back_with_unknown_prices_as_ever() -> None:
    observed = dry(started())
    spec = raw_spec(capacity={"type": "SpotFirst", "pools": POOLS})
    job = make_job(spec, status=observed.job.status)
    made = plan(replace(observed, job=job, prices=parse("")))
    assert status_of(made).attempts[-1].capacity_type == "OnDemand"


def test_a_limited_job_with_one_spot_pool_waits_there_without_limit_while_a_price_is_unknown() -> None:
    pending = make_pod(node="", phase="Pending", running_since=None, created=after(-5000))
    status = replace(
        started(),
        attempts=(replace(started().attempts[0], node="", ranks=(), pool="cheap", instance_type="g5"),),
    )
    limited = seen(pending, status=status, type="SpotFirst", pools=POOLS, prices=parse(""))
    assert not removed(plan(limited))
    assert removed(plan(replace(limited, prices=parse(json.dumps([ON_DEMAND, SPOT]))))) == {0}


def test_a_limit_that_is_left_out_takes_its_condition_back() -> None:
    first = status_of(plan(seen(make_pod(**POD))))
    made = plan(seen(make_pod(**POD), status=first, limit=None, generation=2))
    assert condition(made, Condition.COST_LIMITED).reason == "NoMaxCost"


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dollars"), [(120, "120"), ("120", "120"), (35.5, "35.5"), ("0.01", "0.01")]
)
def test_numbers_and_decimal_strings_are_dollars(value: Any, dollars: str) -> None:
    assert parse_spec(raw_spec(capacity={"maxCost": value})).capacity.max_cost == Decimal(dollars)


TOLD = (
    *(replace(dry(started()), prices=parse(json.dumps(prices))) for prices in ([SPOT, ON_DEMAND], [SPOT])),
    dry(replace(started(), cost=CostStatus(state="Unknown", unknown_seconds=Decimal(60), time=NOW))),
    seen(make_pod(**POD), limit=500),
    seen(limit=500, status=stopped()),
    seen(make_pod(**POD), prices=parse(json.dumps([ON_DEMAND]))),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""
