"""Sums of a job's nodes, each beside a calculation by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from spottrain_operator.api.bookkeeping import Ledger
from spottrain_operator.api.prices import PriceList, parse
from spottrain_operator.api.training_job import KEPT_ATTEMPTS
from spottrain_operator.policies.ledger import MOST_NODES, NodeFacts, accounted

T0 = datetime(2026, 11, 23, 12, tzinfo=UTC)
SPOT = {"instanceType": "p4d", "capacityType": "Spot", "usdPerHour": 6.00}
PRICES = parse(json.dumps([SPOT, SPOT | {"capacityType": "OnDemand", "usdPerHour": 18.00}]))


def at(minutes: float) -> datetime:
    return T0 + timedelta(minutes=minutes)


NODE = NodeFacts(
    name="one", created=at(2), instance_type="p4d", zone="a", capacity_type="Spot", share=Decimal(1),
    start=at(2), bound=at(5), last_bound=at(5),
)  # fmt: skip


def summed(*steps: tuple[float, list[NodeFacts]], prices: PriceList = PRICES) -> Ledger:
    ledger = Ledger()
    for minutes, facts in steps:
        ledger = accounted(ledger, facts, prices, at(minutes))
    return ledger


def cents(value: Decimal) -> str:
    return f"{value:.2f}"


def lines(ledger: Ledger) -> tuple[str, str, str, str]:
    sums = ledger.sums
    return cents(sums.boot), cents(sums.use), cents(sums.idle), cents(sums.spent)


def test_however_often_it_is_summed_the_sums_are_the_same() -> None:
    ended = replace(NODE, ended=at(65), gone=at(75))
    often = summed(*((minutes, [NODE]) for minutes in range(6, 65)), (75, [ended]))
    assert lines(often) == lines(summed((75, [ended]))) == ("0.30", "6.00", "1.00", "7.30")


def test_an_operator_that_was_down_adds_what_it_missed_once() -> None:
    before = summed((30, [NODE]))
    after = accounted(before, [NODE], PRICES, at(300))
    assert cents(after.sums.use) == "29.50" and after == accounted(after, [NODE], PRICES, at(300))
    assert replace(after, time=at(200)) == accounted(after, [NODE], PRICES, at(200)), (
        "a clock that goes back takes nothing away"
    )


def test_a_pod_on_a_shared_node_pays_its_share_of_the_gpus() -> None:
    costs = summed((65, [replace(NODE, share=Decimal("0.25"))]))
    assert lines(costs) == ("0.08", "1.50", "0.00", "1.58")
    cpu = summed((65, [replace(NODE, share=None)]))
    assert lines(cpu) == ("0.30", "6.00", "0.00", "6.30"), "without a known share it pays for the whole node"


def test_a_node_that_goes_on_without_the_job_is_paid_for_an_hour() -> None:
    ended = replace(NODE, ended=at(65))
    costs = summed((65, [NODE]), (500, [ended]), (600, [ended]))
    assert cents(costs.sums.idle) == "6.00" and costs.nodes[0].closed, "kept while its pod exists"
    assert accounted(costs, [replace(ended, pods=0)], PRICES, at(700)).nodes == ()
    again = accounted(costs, [replace(NODE, last_bound=at(690), attempt=2)], PRICES, at(700))
    assert again.of(1) == costs.of(1) and cents(again.of(2).spent) == "1.00"
    assert lines(again)[1:3] == ("7.00", "6.00"), "and paid for again from a next pod on"


def test_a_node_that_is_gone_is_counted_once_however_long_its_pod_stays() -> None:
    gone = replace(NODE, ended=at(65), gone=at(65))
    costs = summed((65, [gone]), (90, [replace(gone, gone=at(90))]), (95, [replace(gone, gone=at(95))]))
    assert lines(costs) == ("0.30", "6.00", "0.00", "6.30") and costs.nodes[0].closed


def test_the_bookkeeping_never_holds_more_nodes_than_a_gang_may_have_and_drops_the_longest_idle() -> None:
    """The nodes of a gang of 600 are idle when its next attempt has others."""
    first = [replace(NODE, name=f"a{n}", ended=at(20 + n / 100), pods=0) for n in range(600)]
    second = [replace(NODE, name=f"b{n}", attempt=2, first_attempt=2) for n in range(600)]
    running = [replace(node, ended=None, pods=1) for node in first]
    costs = summed((15, running), (30, [*first, *second]))
    assert len(costs.nodes) == MOST_NODES == 1024
    dropped = {node.name for node in (*first, *second)} - {node.name for node in costs.nodes}
    assert dropped == {f"a{n}" for n in range(176)}
    assert cents(costs.sums.idle) == cents(
        sum((Decimal(6) * (1000 - n) / 6000 for n in range(600)), Decimal(0))
    )


def test_the_price_of_a_gang_s_nodes_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, cost = [], PriceList.cost

    def counted(self: PriceList, *what: Any) -> Any:
        asked.append(what)
        return cost(self, *what)

    monkeypatch.setattr(PriceList, "cost", counted)
    summed((65, [replace(NODE, name=f"n{n}", ended=at(60)) for n in range(300)]))
    assert len(asked) == 4, "boot, use, use on demand, idle"


def test_after_a_loss_a_node_is_paid_for_from_then_on() -> None:
    assert lines(accounted(Ledger(), [NODE], PRICES, at(65), since=at(35))) == (
        "0.00",
        "3.00",
        "0.00",
        "3.00",
    )


def test_the_attempts_that_the_status_drops_stay_in_the_sums() -> None:
    nodes = [
        replace(NODE, name=f"n{n}", first_attempt=n, attempt=n, ended=at(15), gone=at(15))
        for n in range(1, 31)
    ]
    ledger = summed((20, nodes))
    assert [attempt.number for attempt in ledger.attempts] == [*range(31 - KEPT_ATTEMPTS, 31)]
    assert cents(ledger.sums.spent) == cents(30 * ledger.of(30).spent) == "39.00"
