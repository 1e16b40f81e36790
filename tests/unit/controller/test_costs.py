"""status.cost as a job's pods and nodes come and go: what is observed, and when it is written."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from spottrain.contract import Outcome
from spottrain_operator.api.node_pools import of_node
from spottrain_operator.api.observed import NodeView, PodView
from spottrain_operator.api.prices import NO_PRICES, PriceList, parse
from spottrain_operator.api.training_job import CostStatus, Status
from spottrain_operator.api.validation import parse_job
from spottrain_operator.api.views import node_view
from spottrain_operator.control.plan import plan
from spottrain_operator.control.resync import show_jobs
from spottrain_operator.io.price_file import PriceFile

from tests.builders import (
    NOW,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    notice,
    raw_job,
    started,
    word,
)

SPOT = {"instanceType": "g5", "capacityType": "Spot", "usdPerHour": 60}
PRICES = parse(json.dumps([SPOT, SPOT | {"capacityType": "OnDemand", "usdPerHour": 120}]))
AWS_SPOT = of_node({"karpenter.sh/capacity-type": "spot"}, "aws:///us-east-1a/i-1")
BOUND = NOW - timedelta(minutes=8)
POD: dict[str, Any] = {"bound": BOUND, "gpus": 1}


def node(**more: Any) -> NodeView:
    """Of 60 dollars an hour, created for the pod of `make_pod`, a minute before that was bound to it."""
    values: dict[str, Any] = {
        "created": NOW - timedelta(minutes=9),
        "instance_type": "g5",
        "gpus": 1,
        "found": AWS_SPOT,
    }
    return make_node(**(values | more))


def look(
    status: Status,
    *pods: PodView,
    nodes: tuple[NodeView, ...] = (node(),),
    at: datetime = NOW,
    prices: PriceList = PRICES,
) -> Status | None:
    """The status that a reconcile writes; None for none."""
    seen = make_observed(*pods, job=make_job(status=status), nodes=nodes, now=at)
    return plan(replace(seen, prices=prices)).status


def costs(status: Status | None) -> CostStatus:
    assert status is not None and status.cost is not None
    return status.cost


def dollars(status: Status | None) -> dict[str, str]:
    cost = costs(status)
    return {name: f"{getattr(cost, name):.2f}" for name in ("boot", "use", "idle", "spent")}


def test_a_running_pod_costs_what_its_node_costs_since_it_was_created_for_it() -> None:
    written = look(started(), make_pod(**POD))
    assert dollars(written) == {"boot": "1.00", "use": "8.00", "idle": "0.00", "spent": "9.00"}
    assert costs(written).state == "Estimated" and costs(written).time == NOW


def test_time_alone_is_written_every_five_minutes() -> None:
    first = look(started(), make_pod(**POD))
    assert first is not None
    assert look(first, make_pod(**POD), at=NOW + timedelta(minutes=4)) is None
    later = look(first, make_pod(**POD), at=NOW + timedelta(minutes=5))
    assert dollars(later)["spent"] == "14.00"


def test_the_end_of_an_attempt_and_of_its_node_are_written_at_once() -> None:
    first = look(started(), make_pod(**POD))
    assert first is not None
    done = ended_pod(message=word(Outcome.DONE, step=9), **POD)
    ended = look(first, done)
    assert ended is not None and ended.terminal
    assert dollars(ended)["use"] == "8.00", "with the second that was summed before its end was known"
    gone = look(ended, done, nodes=(), at=NOW + timedelta(minutes=3))
    assert dollars(gone) == {"boot": "1.00", "use": "8.00", "idle": "3.00", "spent": "12.00"}
    assert gone is not None and look(gone, done, nodes=(), at=NOW + timedelta(minutes=60)) is None
    assert costs(gone).time == NOW + timedelta(minutes=3), "and stays the time of the sums"
    forgotten = look(gone, nodes=(), at=NOW + timedelta(minutes=61))
    assert costs(forgotten).nodes == () and dollars(forgotten)["spent"] == "12.00"


def test_an_ended_job_is_looked_at_again_until_its_node_is_gone() -> None:
    done = ended_pod(message=word(Outcome.DONE, step=9), **POD)
    ended = look(started(), done)
    assert ended is not None
    seen = make_observed(done, job=make_job(status=ended), nodes=(node(),))
    again = plan(replace(seen, prices=PRICES)).recheck_after
    assert again is not None and again <= timedelta(minutes=1, seconds=1)


def test_the_capacity_type_is_the_node_s_and_else_what_the_attempt_asked_for() -> None:
    unlabelled = node(found=of_node({}, "aws:///us-east-1a/i-1"))
    asked = started()
    asked = replace(asked, attempts=(replace(asked.attempts[0], capacity_type="OnDemand"),))
    assert dollars(look(asked, make_pod(**POD), nodes=(unlabelled,)))["spent"] == "18.00"
    assert dollars(look(asked, make_pod(**POD)))["spent"] == "9.00", "a label outranks it"


def test_without_a_price_the_state_is_unknown_and_nothing_is_free() -> None:
    cost = costs(look(started(), make_pod(**POD), prices=NO_PRICES))
    assert cost.state == "Unknown" and cost.unknown_seconds == 540 and cost.spent == 0


def test_a_node_that_was_gone_before_it_was_seen_is_unknown() -> None:
    cost = costs(look(started(), ended_pod(**POD), nodes=()))
    assert cost.state == "Unknown" and cost.unknown_seconds == 480


def test_what_aws_takes_back_in_its_first_hour_is_refunded() -> None:
    first = look(started(), make_pod(**POD), nodes=(node(notice=notice(1)),))
    assert first is not None
    interrupted = ended_pod(code=75, message=word(Outcome.INTERRUPTED, step=5, durableStep=5), **POD)
    gone = look(first, interrupted, nodes=())
    assert f"{costs(gone).refunded:.2f}" == "9.00" and costs(gone).spent == 0


def test_half_of_a_node_s_gpus_cost_half() -> None:
    written = look(started(), make_pod(**POD), nodes=(node(gpus=2),))
    assert dollars(written)["spent"] == "4.50" and f"{costs(written).whole_nodes:.2f}" == "9.00"


def test_the_sums_survive_being_stored() -> None:
    written = look(started(), make_pod(**POD))
    assert written is not None
    raw = raw_job() | {"status": json.loads(json.dumps(written.to_json()))}
    assert parse_job(raw).status.cost == written.cost
    assert raw["status"]["cost"]["spent"] == "9.000000"


def test_a_node_s_gpus_and_creation_are_read() -> None:
    raw = {
        "metadata": {"name": "n", "resourceVersion": "1", "creationTimestamp": "2026-03-01T12:00:00Z"},
        "status": {
            "allocatable": {"nvidia.com/gpu": "8", "cpu": "96", "nvidia.com/mig-1g.5gb": "2", "x/y": "3"}
        },
    }
    view = node_view(raw)
    assert view.gpus == 10 and view.created is not None and view.created.hour == 12


def test_costs_are_summed_by_namespace_and_a_namespace_without_jobs_goes() -> None:
    priced, unpriced = look(started(), make_pod(**POD)), look(started(), make_pod(**POD), prices=NO_PRICES)
    jobs = [make_job(status=priced), make_job(status=priced), make_job(status=unpriced), make_job()]
    other = make_job(status=priced)
    other = replace(other, key=replace(other.key, namespace="team-b"))
    show_jobs([*jobs, other])
    assert _metric("spottrain_spent_dollars") == {"ns": 18.0, "team-b": 9.0}
    assert _metric("spottrain_unpriced_node_seconds") == {"ns": 540.0, "team-b": 0.0}
    show_jobs(jobs)
    assert _metric("spottrain_spent_dollars") == {"ns": 18.0}


def _metric(name: str) -> dict[str, float]:
    found = [sample for family in REGISTRY.collect() for sample in family.samples if sample.name == name]
    return {sample.labels["namespace"]: sample.value for sample in found}


# --- the file -------------------------------------------------------------------------------------------
def test_a_price_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "prices.json"
    prices = PriceFile(path)
    assert prices() is NO_PRICES and prices() is NO_PRICES
    assert caplog.text.count("no price list, so all prices are unknown") == 1
    path.write_text(json.dumps([SPOT]))
    first = prices()
    assert len(first.rates) == 1 and prices() is first
    path.write_text(json.dumps([SPOT, SPOT | {"zone": "b"}, SPOT | {"usdPerHour": 0}]))
    assert (
        len(prices().rates) == 2 and "rate 2 is left out: usdPerHour must be a number above 0" in caplog.text
    )
    path.unlink()
    assert prices() is NO_PRICES
