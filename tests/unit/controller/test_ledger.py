"""Sums of a job's nodes, each beside a calculation by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from spottrain_operator.api.prices import PriceList, parse
from spottrain_operator.api.training_job import CostStatus
from spottrain_operator.policies.ledger import MOST_NODES, NodeFacts, accounted

T0 = datetime(2026, 11, 23, 12, tzinfo=UTC)
SPOT = {"instanceType": "p4d", "capacityType": "Spot", "usdPerHour": 6.00}
PRICES = parse(json.dumps([SPOT, SPOT | {"capacityType": "OnDemand", "usdPerHour": 18.00}]))


def at(minutes: float) -> datetime:
    return T0 + timedelta(minutes=minutes)


NODE = NodeFacts(
    name="one", created=at(2), instance_type="p4d", zone="a", capacity_type="Spot", platform="AWS", gpus=8,
    used=8, pod_created=at(0), bound=at(5), last_bound=at(5),
)  # fmt: skip


def summed(*steps: tuple[float, list[NodeFacts]], prices: PriceList = PRICES) -> CostStatus:
    costs = CostStatus()
    for minutes, facts in steps:
        costs = accounted(costs, facts, prices, at(minutes)).costs
    return costs


def cents(value: Decimal) -> str:
    return f"{value:.2f}"


def lines(costs: CostStatus) -> tuple[str, str, str, str]:
    return cents(costs.boot), cents(costs.use), cents(costs.idle), cents(costs.spent)


def test_however_often_it_is_summed_the_sums_are_the_same() -> None:
    ended = replace(NODE, ended=at(65), gone=at(75))
    often = summed(*((minutes, [NODE]) for minutes in range(6, 65)), (75, [ended]))
    assert lines(often) == lines(summed((75, [ended]))) == ("0.30", "6.00", "1.00", "7.30")


def test_an_operator_that_was_down_adds_what_it_missed_once() -> None:
    before = summed((30, [NODE]))
    after = accounted(before, [NODE], PRICES, at(300)).costs
    assert cents(after.use) == "29.50" and after == accounted(after, [NODE], PRICES, at(300)).costs
    assert replace(after, time=at(200)) == accounted(after, [NODE], PRICES, at(200)).costs, (
        "a clock that goes back takes nothing away"
    )


def test_a_pod_on_a_shared_node_pays_its_share_of_the_gpus() -> None:
    costs = summed((65, [replace(NODE, used=2)]))
    assert lines(costs) == ("0.08", "1.50", "0.00", "1.58") and cents(costs.whole_nodes) == "6.30"
    cpu = summed((65, [replace(NODE, gpus=0, used=0)]))
    assert lines(cpu) == ("0.30", "6.00", "0.00", "6.30"), "without a known share it pays for the whole node"
    claimed = summed((65, [replace(NODE, used=0)]))
    assert lines(claimed) == lines(cpu), "and so is one whose GPUs nobody can count, as with DRA"


def test_ec2_does_not_bill_a_spot_node_that_it_takes_back_in_its_first_hour() -> None:
    taken = replace(NODE, reclaimed=True, ended=at(40), gone=at(42))
    costs = summed((20, [NODE]), (42, [taken]))
    assert cents(costs.refunded) == "4.00" == cents(costs.boot + costs.use + costs.idle)
    assert cents(costs.spent) == "0.00"
    for other in (
        replace(taken, ended=at(61), gone=at(63)),
        replace(taken, reclaimed=False),
        replace(taken, platform="GCP"),
        replace(taken, capacity_type="OnDemand"),
    ):
        assert not summed((20, [NODE]), (70, [other])).refunded


def test_a_node_that_goes_on_without_the_job_is_paid_for_an_hour() -> None:
    ended = replace(NODE, ended=at(65))
    costs = summed((65, [NODE]), (500, [ended]), (600, [ended]))
    assert cents(costs.idle) == "6.00" and costs.nodes[0].closed, "kept while its pod exists"
    assert accounted(costs, [replace(ended, pods=0)], PRICES, at(700)).costs.nodes == ()
    sums = accounted(costs, [replace(NODE, last_bound=at(690), attempt=2)], PRICES, at(700))
    again = sums.costs
    assert list(sums.attempts) == [2] and cents(sums.attempts[2].spent) == "1.00"
    assert cents(again.use) == "7.00" and cents(again.idle) == "6.00", "and paid for again from a next pod on"


def test_a_node_that_is_gone_is_counted_once_however_long_its_pod_stays() -> None:
    gone = replace(NODE, ended=at(65), gone=at(65))
    costs = summed((65, [gone]), (90, [replace(gone, gone=at(90))]), (95, [replace(gone, gone=at(95))]))
    assert lines(costs) == ("0.30", "6.00", "0.00", "6.30") and costs.nodes[0].closed


def test_the_status_never_holds_more_nodes_than_a_gang_may_have_and_drops_the_longest_idle() -> None:
    """The nodes of a gang of 600 are idle when its next attempt has others."""
    first = [replace(NODE, name=f"a{n}", ended=at(20 + n / 100), pods=0) for n in range(600)]
    second = [replace(NODE, name=f"b{n}", attempt=2, first_attempt=2) for n in range(600)]
    running = [replace(node, ended=None, pods=1) for node in first]
    costs = summed((15, running), (30, [*first, *second]))
    assert len(costs.nodes) == MOST_NODES == 1024
    dropped = {node.name for node in (*first, *second)} - {node.name for node in costs.nodes}
    assert dropped == {f"a{n}" for n in range(176)}
    assert cents(costs.idle) == cents(sum((Decimal(6) * (1000 - n) / 6000 for n in range(600)), Decimal(0)))


def test_the_price_of_a_gang_s_nodes_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, cost = [], PriceList.cost

    def counted(self: PriceList, *what: Any) -> Any:
        asked.append(what)
        return cost(self, *what)

    monkeypatch.setattr(PriceList, "cost", counted)
    summed((65, [replace(NODE, name=f"n{n}", ended=at(60)) for n in range(300)]))
    assert len(asked) == 4, "boot, use, use on demand, idle"
