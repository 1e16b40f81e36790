"""capacity.maxCostUSD: the job is stopped in time, as suspend stops it, and goes on when it is raised."""

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
from spottrain_operator.api.bookkeeping import NO_BOOKS, Bookkeeping, CostSums, Ledger
from spottrain_operator.api.node_pools import of_node
from spottrain_operator.api.observed import NodeView, Observed, PodView
from spottrain_operator.api.prices import PriceList, parse
from spottrain_operator.api.training_job import Status
from spottrain_operator.api.validation import parse_spec
from spottrain_operator.control.actions import Plan
from spottrain_operator.control.plan import plan

from tests.builders import (
    NOW,
    after,
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
from tests.unit.controller.stories import follows

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
    books: Bookkeeping = NO_BOOKS,
    at: datetime = NOW,
    prices: PriceList = PRICES,
    nodes: tuple[NodeView, ...] = (node(),),
    generation: int = 1,
    **capacity: Any,
) -> Observed:
    spec = raw_spec(capacity={"maxCostUSD": limit} | capacity if limit is not None else capacity)
    job = make_job(spec, status=status or started(), generation=generation)
    return replace(make_observed(*pods, job=job, nodes=nodes, now=at), prices=prices, books=books)


def spent(made: Plan) -> Decimal:
    status = status_of(made)
    assert status.cost is not None
    return status.cost.spent


Known = dict[str, Any]
"""Status and bookkeeping."""


def known(made: Plan) -> Known:
    assert made.books is not None
    return {"status": status_of(made), "books": made.books}


def stopped() -> Known:
    """Of a job that has cost 500 dollars, was limited to that, and has saved step 40."""
    stopping = known(plan(seen(make_pod(**POD), limit=500)))
    last = told(Outcome.INTERRUPTED, step=40, durableStep=40, pod={**deleted(), **POD})
    return known(plan(seen(last, limit=500, **stopping)))


# --- the stop -------------------------------------------------------------------------------------------
def test_a_job_that_has_cost_its_limit_saves_ends_and_is_suspended_without_a_charge() -> None:
    follows("!deletes", seen(make_pod(**POD), limit=501))
    follows("deletes=0 phase=Stopping", seen(make_pod(**POD), limit=500))
    before = stopped()
    status = before["status"]
    expected = (
        "phase=Suspended Suspended=True/MaxCostReached cause1=Suspended attempt=1 failures=0 durable=40"
    )
    follows(f"{expected} interruptions=0 !creates", seen(limit=500, **before))
    assert status.attempts[0].reason == "MaxCostReached"
    assert status.active_since is None, "activeDeadlineSeconds does not run"


def test_it_stays_suspended_and_its_sentence_does_not_change_with_each_second() -> None:
    later = plan(seen(limit=500, **stopped(), at=after(200)))
    assert not manifests(later)
    assert later.status is None


@pytest.mark.parametrize("limit", [5000, "5000.25", None])
def test_raised_or_left_out_it_goes_on_with_the_next_attempt(limit: Any) -> None:
    again = seen(limit=limit, **stopped(), at=after(60), generation=2)
    made = follows("attempt=2 creates=0 Suspended=False", again)
    assert status_of(made).active_since == after(60)


def test_a_limit_below_what_was_spent_stops_a_running_job_at_once() -> None:
    first = known(plan(seen(make_pod(**POD), limit=None)))
    follows("deletes=0", seen(make_pod(**POD), limit="0.01", **first, generation=2))


def test_a_suspension_by_the_user_keeps_its_own_sentence() -> None:
    before = stopped()
    job = make_job(raw_spec(suspend=True, capacity={"maxCostUSD": 1}), status=before["status"], generation=2)
    o = replace(make_observed(job=job, nodes=(node(),)), prices=PRICES, books=before["books"])
    follows("Suspended=True/Suspended", o)


def test_no_attempt_starts_while_the_limit_is_reached_even_one_that_has_its_record() -> None:
    waiting, books = replace(started(2), next_start=after(-1)), spent_before(use=Decimal(7))
    unseen = replace(waiting.attempts[1], started=None, created_workers=0, node="")
    waiting = replace(waiting, attempts=(waiting.attempts[0], unseen))
    expected = "!creates Suspended=True/MaxCostReached Scheduled=False/MaxCostReached"
    made = follows(expected, seen(status=waiting, books=books, limit=7))
    follows("attempt=2 creates=0", seen(status=status_of(made), books=books, limit=8, generation=2))
    follows("!creates", make_observed(job=make_job(raw_spec(suspend=True), status=waiting)))


def test_no_successor_starts_during_a_notice_and_a_job_that_is_done_is_done() -> None:
    doomed = node(notice=notice(60))
    follows("attempt=1 !creates", seen(make_pod(**POD), limit=500, nodes=(doomed,)))
    done = ended_pod(message='{"outcome": "done", "step": 9}', **POD)
    follows("phase=Succeeded !Suspended=True", seen(done, limit=1))


# --- in time --------------------------------------------------------------------------------------------
def test_the_limit_is_checked_with_the_sums_as_of_now_and_not_of_the_last_write() -> None:
    first = known(plan(seen(make_pod(**POD), limit=600)))
    assert spent(plan(seen(make_pod(**POD), limit=600))) == 500
    assert plan(seen(make_pod(**POD), limit=600, **first, at=after(99))).status is None
    assert removed(plan(seen(make_pod(**POD), limit=600, **first, at=after(100)))) == {0}


@given(limit=st.integers(501, 900), passed=st.integers(0, 300), micros=st.integers(0, 999_999))
def test_the_next_look_is_when_the_limit_will_be_reached(limit: int, passed: int, micros: int) -> None:
    """From wherever it looks, it looks again no more than a second after the limit, and never early in vain
    for ever."""
    first = known(plan(seen(make_pod(**POD), limit=limit)))
    at = min(after(passed), after(limit - 501)) + timedelta(microseconds=micros)
    made = plan(seen(make_pod(**POD), limit=limit, **first, at=at))
    assert not removed(made) and made.recheck_after is not None
    again = at + made.recheck_after
    assert again <= after(limit - 500 + 1)
    if again >= after(limit - 500):
        assert removed(plan(seen(make_pod(**POD), limit=limit, **first, at=again))) == {0}
    else:
        assert made.recheck_after >= timedelta(seconds=50), "only because something else is due then"


def test_a_new_price_counts_within_the_interval_of_the_sums() -> None:
    first = known(plan(seen(make_pod(**POD), limit=10**6)))
    made = plan(seen(make_pod(**POD), limit=10**6, **first))
    assert made.recheck_after is not None and made.recheck_after <= timedelta(minutes=5, seconds=1)


# --- unknown prices -------------------------------------------------------------------------------------
def spent_before(**sums: Decimal) -> Bookkeeping:
    return Bookkeeping(ledger=Ledger(time=NOW, earlier=CostSums(**sums)))


def dry(first: Status, books: Bookkeeping = NO_BOOKS) -> Observed:
    """A SpotFirst job whose only spot pool had no node in time."""
    given = first.attempts[0]
    old = replace(given, cause="SchedulingTimeout", ended=NOW, pool="cheap", instance_type="g5")
    status = replace(first, attempts=(old,))
    return seen(status=status, books=books, type="SpotFirst", pools=POOLS, limit=10**6)


def kind(made: Plan) -> str:
    return status_of(made).attempts[-1].capacity_type


def test_with_known_prices_spot_first_falls_back_to_on_demand() -> None:
    assert kind(follows("Accepted=True/Valid", dry(started()))) == "OnDemand"


def test_after_a_gap_in_the_prices_the_limit_is_no_guarantee_and_on_demand_is_used() -> None:
    o = dry(started(), spent_before(unknown_seconds=Decimal(60)))  # all present prices are known
    assert kind(follows("Accepted=True/PriceUnknown warns=PriceUnknown", o)) == "OnDemand"


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dollars"), [(120, "120"), ("120", "120"), (35.5, "35.5"), ("0.01", "0.01")]
)
def test_numbers_and_decimal_strings_are_dollars(value: Any, dollars: str) -> None:
    assert parse_spec(raw_spec(capacity={"maxCostUSD": value})).capacity.max_cost_usd == Decimal(dollars)


TOLD = (
    dry(started(), spent_before(unknown_seconds=Decimal(60))),
    seen(make_pod(**POD), limit=500),
    seen(limit=500, **stopped()),
    seen(make_pod(**POD), prices=parse(json.dumps([ON_DEMAND]))),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""
