"""Sums of a job's nodes, each beside a calculation by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from spottrain_operator.api.bookkeeping import Bookkeeping, Ledger
from spottrain_operator.api.node_pools import of_node
from spottrain_operator.api.observed import Ended, NodeView, PodView
from spottrain_operator.api.prices import PriceList, parse
from spottrain_operator.api.training_job import KEPT_ATTEMPTS
from spottrain_operator.policies.ledger import MOST_NODES, updated

from tests.builders import make_job, make_node, make_observed, make_pod, started

T0 = datetime(2026, 11, 23, 12, tzinfo=UTC)
SPOT = {"instanceType": "p4d", "capacityType": "Spot", "usdPerHour": 6.00}
PRICES = parse(json.dumps([SPOT, SPOT | {"capacityType": "OnDemand", "usdPerHour": 18.00}]))


def at(minutes: float) -> datetime:
    return T0 + timedelta(minutes=minutes)


SPOT_NODE = of_node({"karpenter.sh/capacity-type": "spot"}, "")


def node(name: str = "one", gpus: int = 1) -> NodeView:
    """Made for a pod of two minutes, at minute 2."""
    return make_node(name, created=at(2), instance_type="p4d", zone="a", gpus=gpus, found=SPOT_NODE)


def pod(attempt: int = 1, rank: int = 0, *, on: str = "one", bound: float = 5, ended: float = 0) -> PodView:
    """Bound, and ended, at these minutes."""
    more: dict[str, Any] = (
        {"phase": "Failed", "ended": Ended(exit_code=1, finished=at(ended))} if ended else {}
    )
    return make_pod(attempt, rank, node=on, created=at(1), bound=at(bound), gpus=1, **more)


def look(
    ledger: Ledger,
    minutes: float,
    *pods: PodView,
    nodes: tuple[NodeView, ...] = (node(),),
    lost: datetime | None = None,
) -> Ledger:
    """The ledger, up to this minute."""
    seen = make_observed(*pods, job=make_job(status=started()), nodes=nodes, now=at(minutes))
    o = replace(seen, prices=PRICES, books=Bookkeeping(ledger=ledger, lost=lost))
    return updated(o, o.job.status, due=True)


def cents(value: Decimal) -> str:
    return f"{value:.2f}"


def lines(ledger: Ledger) -> tuple[str, str, str, str]:
    sums = ledger.sums
    return cents(sums.boot), cents(sums.use), cents(sums.idle), cents(sums.spent)


def test_however_often_it_is_summed_the_sums_are_the_same() -> None:
    often = Ledger()
    for minutes in range(6, 65):
        often = look(often, minutes, pod())
    once = look(look(Ledger(), 6, pod()), 75, pod(ended=65), nodes=())
    assert lines(look(often, 75, pod(ended=65), nodes=())) == lines(once) == ("0.30", "6.00", "1.00", "7.30")


def test_an_operator_that_was_down_adds_what_it_missed_once() -> None:
    after = look(look(Ledger(), 30, pod()), 300, pod())
    assert cents(after.sums.use) == "29.50" and after == look(after, 300, pod())
    assert after == look(after, 200, pod()), "a clock that goes back takes nothing away"


def test_a_pod_on_a_shared_node_pays_its_share_of_the_gpus() -> None:
    assert lines(look(Ledger(), 65, pod(), nodes=(node(gpus=4),))) == ("0.08", "1.50", "0.00", "1.58")
    whole = look(Ledger(), 65, pod(), nodes=(node(gpus=0),))
    assert lines(whole) == ("0.30", "6.00", "0.00", "6.30"), (
        "without a known share it pays for the whole node"
    )


def test_a_node_that_goes_on_without_the_job_is_paid_for_an_hour() -> None:
    costs = look(Ledger(), 65, pod())
    for minutes in (500, 600):
        costs = look(costs, minutes, pod(ended=65))
    assert cents(costs.sums.idle) == "6.00" and costs.nodes[0].closed, "kept while its pod exists"
    assert look(costs, 700).nodes == ()
    again = look(costs, 700, pod(2, bound=690))
    assert again.of(1) == costs.of(1) and cents(again.of(2).spent) == "1.00"
    assert lines(again)[1:3] == ("7.00", "6.00"), "and paid for again from a next pod on"


def test_a_node_that_is_gone_is_counted_once_however_long_its_pod_stays() -> None:
    costs = look(Ledger(), 6, pod())
    for minutes in (65, 90, 95):
        costs = look(costs, minutes, pod(ended=65), nodes=())
    assert lines(costs) == ("0.30", "6.00", "0.00", "6.30") and costs.nodes[0].closed


def test_the_bookkeeping_never_holds_more_nodes_than_a_gang_may_have_and_drops_the_longest_idle() -> None:
    """The nodes of a gang of 600 are idle when its next attempt has others."""
    names = [f"a{n}" for n in range(600)], [f"b{n}" for n in range(600)]
    nodes = tuple(node(name) for name in (*names[0], *names[1]))
    ended = [pod(rank=n, on=name, ended=20 + n / 100) for n, name in enumerate(names[0])]
    costs = look(Ledger(), 15, *(pod(rank=n, on=name) for n, name in enumerate(names[0])), nodes=nodes)
    costs = look(costs, 28, *ended, nodes=nodes)
    costs = look(costs, 30, *(pod(2, n, on=name) for n, name in enumerate(names[1])), nodes=nodes)
    assert len(costs.nodes) == MOST_NODES == 1024
    dropped = {each.name for each in nodes} - {each.name for each in costs.nodes}
    assert dropped == {f"a{n}" for n in range(176)}
    idle = sum((Decimal(6) * (1000 - n) / 6000 for n in range(600)), Decimal(0))
    assert cents(costs.sums.idle) == cents(idle)


def test_the_price_of_a_gang_s_nodes_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, cost = [], PriceList.cost

    def counted(self: PriceList, *what: Any) -> Any:
        asked.append(what)
        return cost(self, *what)

    monkeypatch.setattr(PriceList, "cost", counted)
    nodes = tuple(node(f"n{n}") for n in range(300))
    look(Ledger(), 65, *(pod(rank=n, on=f"n{n}", ended=60) for n in range(300)), nodes=nodes)
    assert len(asked) == 4, "boot, use, use on demand, idle"


def test_after_a_loss_a_node_is_paid_for_from_then_on() -> None:
    assert lines(look(Ledger(), 65, pod(), lost=at(35))) == ("0.00", "3.00", "0.00", "3.00")


def test_the_attempts_that_the_status_drops_stay_in_the_sums() -> None:
    ledger = Ledger()
    for n in range(1, 31):
        ledger = look(ledger, 6, pod(n, on=f"n{n}"), nodes=(node(f"n{n}"),))
        ledger = look(ledger, 15, pod(n, on=f"n{n}", ended=15), nodes=())
    assert [attempt.number for attempt in ledger.attempts] == [*range(31 - KEPT_ATTEMPTS, 31)]
    assert cents(ledger.sums.spent) == cents(30 * ledger.of(30).spent) == "39.00"
