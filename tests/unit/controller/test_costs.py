"""status.cost as a job's pods and nodes come and go: what is observed, and when it is written."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from spottrain.contract import Outcome
from spottrain_operator.api import resources
from spottrain_operator.api.bookkeeping import NO_BOOKS, Bookkeeping, NodeAccount, books_of_config_map
from spottrain_operator.api.node_pools import of_node
from spottrain_operator.api.observed import Ended, NodeView, PodView
from spottrain_operator.api.prices import NO_PRICES, PriceList, parse
from spottrain_operator.api.training_job import CostStatus, GoodputStatus, Status
from spottrain_operator.api.views import node_view
from spottrain_operator.control.actions import Plan, WriteBooks
from spottrain_operator.control.plan import plan
from spottrain_operator.control.resync import show_jobs
from spottrain_operator.errors import InvalidSpec
from spottrain_operator.io.price_file import PriceFiles
from spottrain_operator.policies import accounting, ledger

from tests.builders import (
    KEY,
    NOW,
    ended_pod,
    make_job,
    make_node,
    make_observed,
    make_pod,
    raw_spec,
    started,
    status_of,
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


@dataclass(frozen=True)
class Paid:
    """What is known of a job after a reconcile."""

    status: Status
    books: Bookkeeping = NO_BOOKS

    @property
    def cost(self) -> CostStatus:
        assert self.status.cost is not None
        return self.status.cost

    @property
    def dollars(self) -> dict[str, str]:
        return {name: f"{getattr(self.cost, name):.2f}" for name in ("boot", "use", "idle", "spent")}

    @property
    def nodes(self) -> tuple[NodeAccount, ...]:
        return self.books.ledger.nodes

    def next_attempt(self) -> Paid:
        return replace(self, status=replace(started(2), cost=self.cost))


def planned(
    before: Paid,
    *pods: PodView,
    nodes: tuple[NodeView, ...] = (node(),),
    at: datetime = NOW,
    prices: PriceList = PRICES,
    others: tuple[PodView, ...] = (),
) -> Plan:
    seen = make_observed(*pods, job=make_job(status=before.status), nodes=nodes, now=at)
    return plan(replace(seen, prices=prices, books=before.books, others=others))


def rests(before: Paid, *pods: PodView, **more: Any) -> bool:
    """Whether nothing is written."""
    made = planned(before, *pods, **more)
    return made.status is None and not any(isinstance(action, WriteBooks) for action in made.before)


def look(before: Paid, *pods: PodView, **more: Any) -> Paid:
    made = planned(before, *pods, **more)
    assert made.books is not None
    return Paid(made.status or before.status, made.books)


def test_a_running_pod_costs_what_its_node_costs_since_it_was_created_for_it() -> None:
    written = look(Paid(started()), make_pod(**POD))
    assert written.dollars == {"boot": "1.00", "use": "8.00", "idle": "0.00", "spent": "9.00"}
    assert not written.cost.unknown_seconds and written.cost.update_time == NOW


def test_time_alone_is_written_every_five_minutes() -> None:
    first = look(Paid(started()), make_pod(**POD))
    assert rests(first, make_pod(**POD), at=NOW + timedelta(minutes=4))
    later = look(first, make_pod(**POD), at=NOW + timedelta(minutes=5))
    assert later.dollars["spent"] == "14.00"


def test_the_end_of_an_attempt_and_of_its_node_are_written_at_once() -> None:
    first = look(Paid(started()), make_pod(**POD))
    done = ended_pod(message=word(Outcome.DONE, step=9), **POD)
    ended = look(first, done)
    assert ended.status.terminal
    assert ended.dollars["use"] == "8.00", "with the second that was summed before its end was known"
    gone = look(ended, done, nodes=(), at=NOW + timedelta(minutes=3))
    assert gone.dollars == {"boot": "1.00", "use": "8.00", "idle": "3.00", "spent": "12.00"}
    assert rests(gone, done, nodes=(), at=NOW + timedelta(minutes=60))
    assert gone.cost.update_time == NOW + timedelta(minutes=3), "and stays the time of the sums"
    forgotten = look(gone, nodes=(), at=NOW + timedelta(minutes=61))
    assert forgotten.nodes == () and forgotten.dollars["spent"] == "12.00"


ON_CPU = {"template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}}, "gpusPerWorker": 0}


def of_cpu_job(*pods: PodView, others: tuple[PodView, ...] = (), before: Paid | None = None) -> Paid:
    """What is known of a job without GPUs on a node with 4 GPUs, 8 cores and 32 GiB."""
    before = before or Paid(started())
    roomy = node(gpus=4, allocatable=resources.of_node({"cpu": "8", "memory": "32Gi"}))
    job = make_job(raw_spec(**ON_CPU), status=before.status)
    seen = replace(make_observed(*pods, job=job, nodes=(roomy,)), prices=PRICES, others=others)
    made = plan(replace(seen, books=before.books))
    assert made.books is not None
    return Paid(made.status or before.status, made.books)


def requesting(*containers: dict[str, str]) -> dict[str, Any]:
    spec = {"containers": [{"resources": {"requests": amounts}} for amounts in containers]}
    return {"bound": BOUND, "requests": resources.of_pod(spec)}


@pytest.mark.parametrize(
    ("requests", "share"),
    [
        ({"cpu": "800m", "memory": "1Gi"}, "0.1"),
        ({"cpu": "100m", "memory": "16Gi"}, "0.5"),
        ({"cpu": "80"}, "1"),
        ({}, "1"),
    ],
)
def test_a_job_without_gpus_pays_the_share_that_it_requests(requests: dict[str, str], share: str) -> None:
    cost = of_cpu_job(make_pod(**requesting(requests))).cost
    assert cost.spent == Decimal(9) * Decimal(share), "of boot and use"


def test_ten_jobs_that_request_nothing_pay_for_one_node_together() -> None:
    mine = make_pod(**requesting({}))
    others = tuple(replace(mine, uid=f"other-{n}", job=replace(KEY, uid=f"other-{n}")) for n in range(9))
    ended = replace(others[0], uid="ended", ended=Ended(exit_code=0), phase="Succeeded")
    assert of_cpu_job(mine, others=(*others, ended)).cost.spent == Decimal("0.9")


def test_a_share_that_changes_counts_from_then_on() -> None:
    mine = make_pod(**requesting({}))
    other = replace(mine, uid="other", job=replace(KEY, uid="other"))
    alone = of_cpu_job(mine)
    assert alone.cost.spent == 9
    assert of_cpu_job(mine, others=(other,), before=alone).cost.spent == 9


def test_gpus_that_nobody_can_count_are_paid_for_whole() -> None:
    """By a DRA claim, or with a device that only the template knows."""
    claims = {"resources": {"claims": [{"name": "gpu"}]}}
    pod = {"containers": [{"name": "trainer", "image": "x"} | claims], "resourceClaims": [{"name": "gpu"}]}
    job = make_job(raw_spec(template={"spec": pod}), status=started())
    roomy = node(gpus=0, allocatable=resources.of_node({"cpu": "8", "memory": "32Gi"}))
    seen = make_observed(make_pod(**requesting({"cpu": "1"})), job=job, nodes=(roomy,))
    assert Paid(status_of(plan(replace(seen, prices=PRICES)))).cost.spent == 9


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2", 2),
        ("250m", "0.25"),
        ("1.5Gi", 1610612736),
        ("1e3", 1000),
        ("1E", 10**18),
        ("5k", 5000),
        ("x", 0),
        ("", 0),
    ],
)
def test_amounts_of_cpu_and_memory_are_read_as_kubernetes_writes_them(text: str, number: Any) -> None:
    assert resources.of_node({"cpu": text}).cpu == Decimal(number)


def test_a_pod_requests_what_all_its_containers_do_and_at_least_its_largest_init_container() -> None:
    def of(cpu: str, **more: str) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}} | more

    sidecar = of("500m", restartPolicy="Always")
    spec = {"containers": [of("1"), of("250m")], "initContainers": [sidecar, of("1")]}
    assert resources.of_pod(spec).cpu == Decimal("1.75")
    assert resources.of_pod(spec | {"initContainers": [of("4")]}).cpu == 4
    assert resources.of_pod(spec | of("8")).cpu == 8, "or what it requests as a whole"


def test_an_ended_job_is_looked_at_again_until_its_node_is_gone() -> None:
    done = ended_pod(message=word(Outcome.DONE, step=9), **POD)
    ended = look(Paid(started()), done)
    again = planned(ended, done).recheck_after
    assert again is not None and again <= timedelta(minutes=1, seconds=1)


def test_the_capacity_type_is_the_node_s_and_else_what_the_attempt_asked_for() -> None:
    unlabelled = node(found=of_node({}, "aws:///us-east-1a/i-1"))
    asked = started()
    asked = replace(asked, attempts=(replace(asked.attempts[0], capacity_type="OnDemand"),))
    assert look(Paid(asked), make_pod(**POD), nodes=(unlabelled,)).dollars["spent"] == "18.00"
    assert look(Paid(asked), make_pod(**POD)).dollars["spent"] == "9.00", "a label outranks it"


def test_without_a_price_nothing_is_free() -> None:
    cost = look(Paid(started()), make_pod(**POD), prices=NO_PRICES).cost
    assert cost.unknown_seconds == 540 and cost.spent == 0


def test_a_node_that_was_gone_before_it_was_seen_is_unknown() -> None:
    cost = look(Paid(started()), ended_pod(**POD), nodes=()).cost
    assert cost.unknown_seconds == 479


def test_a_node_that_was_lost_while_the_operator_was_down_is_paid_for_until_it_was_missed() -> None:
    first = look(Paid(started()), make_pod(**POD))
    assert first.dollars["spent"] == "9.00"
    missed = NOW + timedelta(minutes=2)
    lost = make_pod(
        **POD, phase="Failed", running_since=None, deleted=NOW, disrupted=missed,
        disruption="DeletionByPodGC: PodGC: node no longer exists",
    )  # fmt: skip
    back = look(first, lost, nodes=(), at=NOW + timedelta(hours=8))
    assert back.dollars == {
        "boot": "1.00",
        "use": "10.00",
        "idle": "0.00",
        "spent": "11.00",
    }
    assert back.status.attempts[0].ended == missed, "and so long had the attempt its nodes"
    unready = look(first, replace(lost, disruption="", disrupted=None), at=NOW + timedelta(minutes=30),
                   nodes=(node(ready=False),))  # fmt: skip
    assert unready.dollars == {"boot": "1.00", "use": "8.00", "idle": "30.00", "spent": "39.00"}, (
        "a node that is only not ready is paid for, though its pod counts as ended"
    )


def test_an_attempt_on_the_same_node_that_nobody_saw_running_is_paid_for() -> None:
    failed = ended_pod(code=1, **POD)
    ended = look(Paid(started()), failed)
    assert ended.dollars["use"] == "7.98"
    second = ended.next_attempt()
    unseen = ended_pod(2, bound=NOW + timedelta(minutes=1), gpus=1)
    until = Ended(exit_code=1, finished=NOW + timedelta(minutes=31))
    back = look(second, replace(unseen, ended=until), at=NOW + timedelta(minutes=32))
    assert back.dollars == {"boot": "1.00", "use": "37.98", "idle": "2.02", "spent": "41.00"}
    late = NOW + timedelta(hours=2)
    unseen = replace(unseen, bound=late, ended=replace(until, finished=late + timedelta(minutes=5)))
    closed = look(ended, failed, at=late)
    assert closed.nodes[0].closed
    again = look(closed.next_attempt(), unseen, at=late + timedelta(minutes=6))
    assert again.dollars == {"boot": "1.00", "use": "12.98", "idle": "61.00", "spent": "74.98"}, (
        "and so it is after the node's idle hour"
    )


def test_jobs_that_use_a_node_in_turn_never_pay_for_the_same_second() -> None:
    """This one's node is idle for three minutes; then another job's pod is there, for as long as it likes."""
    failed = ended_pod(code=1, **POD)
    ended = look(Paid(started()), failed)
    assert ledger.idle_nodes(ended.books.ledger) == {"node-a"}
    its = replace(
        make_pod(bound=NOW + timedelta(minutes=3), gpus=1), job=replace(KEY, name="next", uid="next")
    )
    taken = look(ended, others=(its,), at=NOW + timedelta(minutes=40))
    assert taken.dollars["idle"] == "3.02" and not ledger.idle_nodes(taken.books.ledger)
    assert look(taken, at=NOW + timedelta(minutes=50)).dollars == taken.dollars, "for good"
    back = look(
        taken.next_attempt(),
        make_pod(2, created=NOW + timedelta(minutes=59), bound=NOW + timedelta(minutes=60), gpus=1),
        at=NOW + timedelta(minutes=65),
    )
    assert back.dollars == {"boot": "1.00", "use": "12.98", "idle": "3.02", "spent": "17.00"}
    static = look(
        Paid(started()), failed, nodes=(node(created=NOW - timedelta(days=9)),), at=NOW + timedelta(minutes=9)
    )
    assert static.dollars == {"boot": "0.00", "use": "7.98", "idle": "0.00", "spent": "7.98"}, (
        "a node that was there before is not kept for this job"
    )


def test_a_next_machine_of_the_same_name_has_an_account_of_its_own() -> None:
    """As in a managed instance group: node-a is gone at 5 minutes, and comes back under its name at 10."""
    first = look(Paid(started()), make_pod(**POD))
    lost = make_pod(
        **POD, phase="Failed", running_since=None, deleted=NOW + timedelta(minutes=5),
        disrupted=NOW + timedelta(minutes=5),
    )  # fmt: skip
    born = NOW + timedelta(minutes=10)
    again = replace(node(created=born), instance_type="g6")
    second = first.next_attempt()
    its = make_pod(2, created=NOW + timedelta(minutes=6), bound=NOW + timedelta(minutes=11), gpus=1)
    dear = parse(json.dumps([SPOT, SPOT | {"instanceType": "g6", "usdPerHour": 600}]))
    written = look(second, lost, its, nodes=(again,), at=NOW + timedelta(minutes=20), prices=dear)
    assert written.dollars == {"boot": "11.00", "use": "103.00", "idle": "5.00", "spent": "119.00"}
    assert written.status.attempts[1].spent == Decimal(100)
    later = look(written, its, nodes=(again,), at=NOW + timedelta(minutes=21), prices=dear)
    assert [entry.created for entry in later.nodes] == [born], "the first one's is over"
    gone = look(written, its, nodes=(), at=NOW + timedelta(minutes=22), prices=dear)
    assert gone.dollars["spent"] == "139.00" and not [e for e in gone.nodes if not e.closed]


def test_the_share_of_a_node_stays_until_another_attempt_uses_it() -> None:
    two = [make_pod(rank=rank, **POD) for rank in (0, 1)]
    status = replace(started(), attempts=(replace(started().attempts[0], workers=2),))
    shared = node(gpus=2)
    first = look(Paid(status), *two, nodes=(shared,))
    assert first.dollars["spent"] == "9.00"
    one_ended = [two[0], ended_pod(rank=1, **POD)]
    later = look(first, *one_ended, nodes=(shared,), at=NOW + timedelta(minutes=60))
    assert later.dollars["use"] == "68.00"
    assert later.nodes[0].share == 1
    last = make_pod(**POD, phase="Succeeded", ended=Ended(exit_code=0, finished=NOW + timedelta(minutes=60)))
    gone = look(later, last, one_ended[1], nodes=(shared,), at=NOW + timedelta(minutes=70))
    assert gone.dollars == {"boot": "1.00", "use": "68.00", "idle": "10.00", "spent": "79.00"}


def test_a_pod_that_joins_a_node_pays_from_its_binding_on() -> None:
    status = replace(started(), attempts=(replace(started().attempts[0], workers=2),))
    shared = node(gpus=2)
    first = look(Paid(status), make_pod(**POD), nodes=(shared,))
    assert first.dollars["spent"] == "4.50"
    joined = make_pod(rank=1, bound=NOW + timedelta(minutes=20), gpus=1)
    later = look(first, make_pod(**POD), joined, nodes=(shared,), at=NOW + timedelta(minutes=30))
    assert later.dollars["spent"] == "24.50", "20 minutes at half, 10 at the whole"


def test_a_node_s_gpus_and_creation_are_read() -> None:
    raw = {
        "metadata": {"name": "n", "resourceVersion": "1", "creationTimestamp": "2026-03-01T12:00:00Z"},
        "status": {
            "allocatable": {"nvidia.com/gpu": "8", "cpu": "96", "nvidia.com/mig-1g.5gb": "2", "x/y": "3"}
        },
    }
    view = node_view(raw)
    assert view.gpus == 10 and view.created is not None and view.created.hour == 12


def test_costs_are_summed_by_namespace_and_team_and_a_namespace_without_jobs_goes() -> None:
    priced = look(Paid(started()), make_pod(**POD)).status
    unpriced = look(Paid(started()), make_pod(**POD), prices=NO_PRICES).status
    jobs = [make_job(status=priced), make_job(status=priced), make_job(status=unpriced), make_job()]
    speech = make_job(status=priced, labels={"spottrain.io/team": "speech"})
    other = replace(speech, key=replace(speech.key, namespace="shared"))
    show_jobs([*jobs, speech, other])
    assert _metric("spottrain_spent_dollars") == {
        ("ns", ""): 18.0,
        ("ns", "speech"): 9.0,
        ("shared", "speech"): 9.0,
    }
    unpriced_seconds = _metric("spottrain_unpriced_node_seconds")
    assert (unpriced_seconds["ns", ""], unpriced_seconds["ns", "speech"]) == (540.0, 0.0)
    show_jobs(jobs)
    assert _metric("spottrain_spent_dollars") == {("ns", ""): 18.0}


def test_times_and_what_they_would_have_cost_on_demand_are_summed() -> None:
    times = GoodputStatus(productive=Decimal(80), data_wait=Decimal(4))
    known = CostStatus(spent=Decimal("1.25"), on_demand_ideal=Decimal("2.5"), saving="50.0%")
    show_jobs(
        [
            make_job(status=Status(goodput=times, cost=known)),
            make_job(status=Status(goodput=times, cost=replace(known, saving="Unknown"))),
        ]
    )
    assert _metric("spottrain_on_demand_dollars") == {("ns", ""): 2.5}
    assert _metric("spottrain_compared_spent_dollars") == {("ns", ""): 1.25}, "of the same jobs"
    parts = _metric("spottrain_goodput_seconds")
    assert parts["ns", "", "productive"] == 160.0 and parts["ns", "", "dataWait"] == 8.0 and len(parts) == 8


def _metric(name: str) -> dict[tuple[str, ...], float]:
    found = [sample for family in REGISTRY.collect() for sample in family.samples if sample.name == name]
    return {tuple(sample.labels.values()): sample.value for sample in found}


# --- the file -------------------------------------------------------------------------------------------
def test_a_price_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "prices.json"
    prices = PriceFiles(path, tmp_path / "none.json")
    assert prices() == NO_PRICES == prices()
    assert caplog.text.count("no price list, so its prices are unknown") == 1
    path.write_text(json.dumps([SPOT]))
    first = prices()
    assert len(first.rates) == 1 and prices() is first
    path.write_text(json.dumps([SPOT, SPOT | {"zone": "b"}, SPOT | {"usdPerHour": 0}]))
    assert len(prices().rates) == 2 and "rate 2 is left out: usdPerHour must be greater than 0" in caplog.text
    path.unlink()
    assert prices() == NO_PRICES


def test_own_and_fetched_prices_are_read_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, fetched = tmp_path / "prices.json", tmp_path / "fetched.json"
    own.write_text(json.dumps([SPOT]))
    prices = PriceFiles(own, fetched)

    def known() -> dict[str, int]:
        return {kind: int(history[0].usd_per_hour) for (kind, _, _), history in prices().rates.items()}

    assert known() == {"g5": 60} and "no price list" not in caplog.text
    fetched.write_text(json.dumps([SPOT | {"usdPerHour": 1}, SPOT | {"instanceType": "p5"}]))
    assert known() == {"g5": 60, "p5": 60}
    assert prices() is prices(), "nothing is merged while nothing changes"
    own.unlink()
    assert known() == {"g5": 1, "p5": 60} and caplog.text.count("no price list") == 1
    fetched.unlink()
    assert not known() and caplog.text.count("no price list") == 1, "there need not be fetched ones"


# --- the ConfigMap --------------------------------------------------------------------------------------
def writes(made: Plan) -> bool:
    return any(isinstance(action, WriteBooks) for action in made.before)


def test_the_bookkeeping_is_written_at_the_end_of_an_attempt_and_every_ten_minutes() -> None:
    new = planned(Paid(started()), make_pod(**POD))
    assert not writes(new), "the pods and nodes of a first attempt tell all of it"
    first = look(Paid(started()), make_pod(**POD))
    assert not writes(planned(first, make_pod(**POD), at=NOW + timedelta(minutes=9)))
    assert writes(planned(first, make_pod(**POD), at=NOW + timedelta(minutes=10)))
    assert writes(planned(first, ended_pod(code=1, **POD), at=NOW + timedelta(minutes=1)))


def test_a_written_bookkeeping_is_read_as_it_was() -> None:
    failed = planned(look(Paid(started()), make_pod(**POD)), ended_pod(code=1, **POD))
    (written,) = (action.manifest for action in failed.before if isinstance(action, WriteBooks))
    assert books_of_config_map(written) == failed.books
    assert written["metadata"]["ownerReferences"][0]["uid"] == KEY.uid
    with pytest.raises(InvalidSpec, match=r"bookkeeping\.json is not JSON"):
        books_of_config_map({"data": {"bookkeeping.json": "{"}})


def test_a_first_attempt_needs_no_bookkeeping_to_be_paid_for() -> None:
    first = look(Paid(started()), make_pod(**POD))
    assert accounting.rebuilt(first.status, NOW) == NO_BOOKS
    later, kept = (
        look(Paid(first.status, books), make_pod(**POD), at=NOW + timedelta(minutes=5))
        for books in (NO_BOOKS, first.books)
    )
    assert later.dollars == kept.dollars and later.cost.lost_time is None


def test_a_lost_bookkeeping_is_rebuilt_from_the_status_and_says_so() -> None:
    """The second attempt is paid for from the last sums on, and nothing that was in them is lost."""
    ended = look(Paid(started()), ended_pod(code=1, **POD), nodes=())
    second = make_pod(2, bound=NOW, gpus=1, node="node-b")
    young = make_node("node-b", created=NOW, instance_type="g5", gpus=1, found=AWS_SPOT)
    known = look(ended.next_attempt(), second, nodes=(young,), at=NOW + timedelta(minutes=2))
    books = accounting.rebuilt(known.status, NOW + timedelta(minutes=3))
    lost = look(Paid(known.status, books), second, nodes=(young,), at=NOW + timedelta(minutes=7))
    kept = look(known, second, nodes=(young,), at=NOW + timedelta(minutes=7))
    assert lost.dollars == kept.dollars
    assert (kept.cost.lost_time, lost.cost.lost_time) == (None, known.cost.update_time)
