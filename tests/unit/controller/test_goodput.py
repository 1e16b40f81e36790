"""status.goodput, the saving and the cost of each attempt, each beside a calculation by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from spottrain.contract import Outcome, Progress, TimeSplit
from spottrain_operator.api.bookkeeping import NO_BOOKS, CostSums, Timesheet
from spottrain_operator.api.node_pools import of_node
from spottrain_operator.api.observed import Ended, NodeView, PodView, Sample
from spottrain_operator.api.prices import NO_PRICES, PriceList, parse
from spottrain_operator.api.training_job import AttemptRecord, CostStatus, GoodputStatus, Job, Status
from spottrain_operator.api.validation import parse_job
from spottrain_operator.control.plan import plan
from spottrain_operator.names import pod_name
from spottrain_operator.policies.goodput import PARTS

from tests.builders import KEY, NOW, make_node, make_observed, make_pod, raw_job, raw_spec, word

SPOT = {"instanceType": "g5", "capacityType": "Spot", "usdPerHour": 36}
ON_DEMAND = SPOT | {"capacityType": "OnDemand", "usdPerHour": 108}
PRICES = parse(json.dumps([SPOT, ON_DEMAND]))
"""A cent and three cents a second."""
AWS_SPOT = of_node({"karpenter.sh/capacity-type": "spot"}, "aws:///us-east-1a/i-1")


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def begun(attempt: int = 1, *, workers: int = 1, **more: Any) -> Status:
    """The status of a job that has just created the pods of an attempt; earlier ones are over."""
    records = tuple(
        AttemptRecord(
            number=number,
            pod=pod_name(KEY.name, KEY.uid, number),
            capacity_type="Spot",
            workers=workers,
            cause="" if number == attempt else "SpotNotice",
        )
        for number in range(1, attempt + 1)
    )
    return Status(attempt=attempt, attempts=records, active_since=NOW, **more)


def node(name: str = "node-a", **more: Any) -> NodeView:
    values: dict[str, Any] = {"created": at(-9999), "instance_type": "g5", "gpus": 1, "found": AWS_SPOT}
    return make_node(name, **(values | more))


def pod(
    attempt: int = 1,
    rank: int = 0,
    *,
    bound: float | None = 10,
    runs: float | None = None,
    end: tuple[float, int, str] | None = None,
    **more: Any,
) -> PodView:
    """A pod that was bound, began to run and ended at these seconds; `end` has exit code and message too."""
    values: dict[str, Any] = {"created": at(0), "gpus": 1, "running_since": None, "phase": "Pending"}
    if bound is not None:
        values["bound"] = at(bound)
    else:
        values["node"] = ""
    if runs is not None:
        values |= {"running_since": at(runs), "phase": "Running"}
    if end is not None:
        when, code, message = end
        began = at(runs) if runs is not None else None
        ended = Ended(exit_code=code, message=message, started=began, finished=at(when))
        values |= {"running_since": None, "ended": ended, "phase": "Failed" if code else "Succeeded"}
    return make_pod(attempt, rank, **(values | more))


def split(**parts: float) -> TimeSplit:
    return TimeSplit(**parts)


def report(when: float, times: TimeSplit | None, attempt: int = 1, **more: Any) -> Sample:
    return Sample(
        progress=Progress(state="Training", attempt=attempt, step=5, totalSteps=9, timeSplit=times, **more),
        at=at(when),
    )


def done(times: TimeSplit | None, **more: Any) -> str:
    return word(Outcome.DONE, step=9, timeSplit=times, **more)


class Told:
    """A job that is reconciled with what is given, one time after the other."""

    def __init__(self, status: Status | None = None, prices: PriceList = PRICES, **spec: Any) -> None:
        self.status, self.prices, self.books = status or begun(), prices, NO_BOOKS
        self.spec = raw_spec(**spec)

    def look(
        self,
        when: float,
        *pods: PodView,
        sample: Sample | None = None,
        nodes: tuple[NodeView, ...] = (node(), node("node-b")),
    ) -> Status | None:
        """Returns the status that is written; None for none."""
        raw = raw_job(self.spec) | {"status": json.loads(json.dumps(self.status.to_json()))}
        job: Job = parse_job(raw)  # as it was stored
        seen = make_observed(*pods, job=job, nodes=nodes, now=at(when), sample=sample)
        made = plan(replace(seen, prices=self.prices, books=self.books))
        assert made.books is not None
        self.status, self.books = made.status or self.status, made.books
        return made.status

    @property
    def goodput(self) -> GoodputStatus:
        assert self.status.goodput is not None
        return self.status.goodput

    @property
    def times(self) -> Timesheet:
        return self.books.times

    @property
    def sums(self) -> CostSums:
        return self.books.ledger.sums

    @property
    def cost(self) -> CostStatus:
        assert self.status.cost is not None
        return self.status.cost

    @property
    def parts(self) -> dict[str, float]:
        return parts_of(self.goodput)


def parts_of(goodput: GoodputStatus) -> dict[str, float]:
    """Those that are not zero. They always add up to `wanted`."""
    parts = {name: getattr(goodput, name) for name in PARTS}
    assert sum(parts.values()) == goodput.wanted and all(value >= 0 for value in parts.values())
    return {name: float(value) for name, value in parts.items() if value}


def percents(goodput: GoodputStatus) -> tuple[str, str, str]:
    return goodput.runtime, goodput.scheduling, goodput.paid


def floats(*values: Decimal | int | None) -> tuple[float | None, ...]:
    return tuple(None if value is None else float(value) for value in values)


TIMES = split(productive=80, startup=6, dataWait=4, checkpointStall=3, restore=2, waiting=1, other=2)


# --- one attempt ----------------------------------------------------------------------------------------
def test_an_attempt_that_is_done_is_divided_as_its_trainer_says() -> None:
    """Bound at 10 s, its process began at 20 s; 98 s were reported, and 2 s are the container's."""
    job = Told()
    job.look(15, pod())
    job.look(130, pod(runs=20, end=(120, 0, done(TIMES))))
    assert job.parts == {
        "productive": 80.0,
        "startup": 10.0 + 6.0,
        "data_wait": 4.0,
        "checkpoint_stall": 3.0,
        "restore": 2.0,
        "waiting": 10.0 + 1.0,
        "other": 2.0 + 2.0,
    }
    assert floats(job.goodput.wanted, job.goodput.allocated) == (120, 110), "not until it was seen, at 130 s"
    assert percents(job.goodput)[:2] == ("72.7%", "91.7%")
    assert job.times.attempts == () and job.times.counted == 1


def test_a_running_trainer_s_last_report_counts() -> None:
    job = Told()
    job.look(30, pod(runs=20))
    assert job.parts == {"waiting": 10.0, "startup": 10.0, "other": 10.0}, "nothing is reported yet"
    assert percents(job.goodput) == ("Unknown", "66.7%", "Unknown")
    job.look(95, pod(runs=20), sample=report(90, split(productive=50, startup=20, unsaved=30)))
    assert job.parts == {"waiting": 10.0, "startup": 30.0, "productive": 50.0, "other": 5.0}
    assert percents(job.goodput)[0] == "58.8%", "what is not saved yet is not lost yet"


def test_the_work_of_a_trainer_that_is_killed_is_lost_since_its_last_save() -> None:
    """Reported at 90 s with 30 s unsaved; the container ended at 97 s, and its node is gone at 99 s."""
    job = Told(begun(), failurePolicy={"backoffSeconds": 60})
    job.look(95, pod(runs=20), sample=report(90, split(productive=50, startup=20, unsaved=30)))
    job.look(99, pod(runs=20, end=(97, 137, "")))
    assert job.parts == {"waiting": 10.0 + 2.0, "startup": 30.0, "productive": 20.0, "rollback": 30.0 + 7.0}
    assert job.goodput.wanted == 99, "it wants to train, and waits for its next attempt"


def test_the_work_on_a_node_that_vanishes_is_lost_until_that_is_seen() -> None:
    job = Told(failurePolicy={"backoffSeconds": 60})
    job.look(95, pod(runs=20), sample=report(90, split(productive=50, startup=20, unsaved=30)))
    job.look(120, pod(runs=20), nodes=())
    assert job.parts == {"waiting": 10.0, "startup": 30.0, "productive": 20.0, "rollback": 30.0 + 30.0}


def test_a_last_message_says_what_was_saved() -> None:
    job = Told(begun())
    job.look(95, pod(runs=20), sample=report(90, split(productive=50, startup=20, unsaved=30)))
    saved = word(Outcome.INTERRUPTED, step=9, timeSplit=split(productive=55, startup=20, checkpointStall=5))
    job.look(101, pod(runs=20, end=(100, 75, saved)))
    assert job.parts["productive"] == 55 and "rollback" not in job.parts
    lost = word(Outcome.INTERRUPTED_LOST, step=9, timeSplit=split(productive=55, startup=20, unsaved=35))
    job = Told(begun())
    job.look(101, pod(runs=20, end=(100, 79, lost)))
    assert job.parts["productive"] == 20 and job.parts["rollback"] == 35


def test_a_pod_that_never_ran_was_starting_up() -> None:
    job = Told(begun())
    job.look(20, pod(waiting=None))
    job.look(60, pod(end=(50, 1, "")))
    assert job.parts == {"waiting": 10.0 + 10.0, "startup": 40.0}


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("too long", split(productive=1e6, startup=1e6)),
        ("absurd", split(productive=1e300)),
        ("unsaved", split(productive=10, unsaved=1e6)),
        ("nothing", split()),
    ],
)
def test_a_report_cannot_claim_more_than_its_container_s_time(name: str, times: TimeSplit) -> None:
    job = Told(begun())
    job.look(95, pod(runs=20), sample=report(90, times))
    assert job.goodput.wanted == 95 and job.parts["waiting"] == 10, name
    job.look(121, pod(runs=20, end=(120, 0, done(times))))
    assert job.goodput.wanted == 120 and sum(job.parts.values()) == 120, name
    expected = {"too long": "45.5%", "absurd": "90.9%", "unsaved": "0.0%", "nothing": "Unknown"}
    assert job.goodput.runtime == expected[name]


def test_an_image_that_never_reports_has_no_goodput() -> None:
    job = Told(begun(), checkpoint={"mode": "Self"})
    job.look(121, pod(runs=20, end=(120, 0, "")))
    assert job.parts == {"waiting": 10.0, "startup": 10.0, "other": 100.0}
    assert percents(job.goodput) == ("Unknown", "91.7%", "Unknown") and job.cost.saving == "Unknown"


# --- several nodes --------------------------------------------------------------------------------------
def test_a_gang_waits_until_its_last_pod_has_a_node() -> None:
    """Rank 0 runs from 20 s on and waits for rank 1, whose node comes at 60 s. Both end at 160 s."""
    job = Told(begun(workers=2), workers=2)
    job.look(30, pod(runs=20), pod(1, 1, bound=None))
    assert job.status.goodput is None, "not before an attempt has all of its nodes"
    times = split(productive=90, startup=12, waiting=38)
    job.look(
        161,
        pod(runs=20, end=(160, 0, done(times))),
        pod(1, 1, bound=60, node="node-b", runs=65, end=(160, 0, "")),
    )
    assert job.parts == {"waiting": 60.0, "productive": 90.0, "startup": 10.0}
    assert job.goodput.allocated == 100 and percents(job.goodput)[:2] == ("90.0%", "62.5%")
    assert job.sums.use_seconds == 150 + 100, "the first node was paid for while it waited"
    assert job.goodput.paid == "72.0%", "2 x 90 of 250"
    assert job.times.closed.productive_node_seconds == 180


def test_attempts_that_overlap_during_a_notice_both_count() -> None:
    """The second has its node at 100 s, and the first saves until 110 s."""
    job = Told(begun())
    job.look(95, pod(runs=20), sample=report(90, split(productive=60, startup=10)))
    first = pod(runs=20, deleted=at(130), deletion_grace=30)
    second = pod(2, bound=100, runs=104, node="node-b")
    job.status = replace(begun(2), goodput=job.goodput, cost=job.cost)
    job.look(105, first, second)
    assert job.goodput.wanted == 105 + 5 and len(job.times.attempts) == 2
    saved = word(Outcome.INTERRUPTED, step=9, timeSplit=split(productive=65, startup=10, checkpointStall=15))
    job.look(115, pod(runs=20, end=(110, 75, saved), deleted=at(130)), second)
    assert job.times.counted == 1 and [a.number for a in job.times.attempts] == [2]
    times = split(productive=80, startup=4, waiting=6, restore=6)
    job.look(201, second, sample=report(200, times, attempt=2))
    job.look(206, pod(2, bound=100, runs=104, node="node-b", end=(205, 0, done(times))))
    assert job.parts == {
        "productive": 65.0 + 80.0,
        "startup": 10.0 + 10.0 + 4.0 + 4.0,
        "checkpoint_stall": 15.0,
        "restore": 6.0,
        "waiting": 10.0 + 6.0,
        "other": 5.0,
    }
    assert floats(job.goodput.wanted, job.goodput.allocated) == (215, 205)


# --- the time that is wanted ----------------------------------------------------------------------------
def test_suspended_time_is_not_wanted() -> None:
    job = Told(begun())
    job.look(60, pod(runs=20))
    job.spec["suspend"] = True
    saved = word(Outcome.INTERRUPTED, step=9, timeSplit=split(productive=70))
    job.look(62, pod(runs=20))
    ended = pod(runs=20, end=(90, 75, saved), deleted=at(92))
    job.look(300, ended)
    assert job.status.phase == "Suspended" and job.goodput.wanted == 90, "until it had saved"
    job.look(700)
    assert job.goodput.wanted == 90
    job.spec["suspend"] = False
    job.look(1000)
    job.look(1030)
    job.look(1045, pod(2, bound=1040))
    assert job.goodput.wanted == 90 + 45 and job.parts["waiting"] == 10 + 40


def test_a_suspension_while_it_waits_for_its_next_attempt_ends_the_wait() -> None:
    job = Told(begun(), failurePolicy={"backoffSeconds": 500})
    job.look(61, pod(runs=20, end=(60, 1, "")))
    job.spec["suspend"] = True
    job.look(100)
    assert job.goodput.wanted == 100 and job.parts["waiting"] == 10 + 40
    job.look(1000)
    assert job.goodput.wanted == 100


def test_a_job_that_was_started_by_an_older_operator_is_counted_from_then_on() -> None:
    job = Told(replace(begun(7), active_since=at(-90_000)))
    job.look(5000, pod(7, bound=3000, runs=3010), sample=report(5000, split(productive=1900), attempt=7))
    assert job.parts["productive"] == 1900 and "waiting" not in job.parts
    ended = pod(7, bound=3000, runs=3010, end=(6000, 1, ""))
    job.look(6000, ended)
    job.look(6100, pod(8, bound=6090))
    assert job.parts["waiting"] == 90 and sum(job.parts.values()) == 3000 + 100


def test_a_job_that_had_ended_before_an_upgrade_has_no_goodput() -> None:
    ended = pod(runs=20, end=(120, 0, done(TIMES)))
    job = Told()
    job.look(130, ended)
    job.status, job.books = replace(job.status, goodput=None), NO_BOOKS
    job.look(9000, ended, nodes=())
    assert job.status.goodput is None


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    job = Told()
    job.look(100, pod(runs=20), sample=report(100, split(productive=70)))
    before, before_time = job.goodput, job.times.time
    job.look(50, pod(runs=20), sample=report(50, split(productive=70), warning="w"))
    assert job.goodput.wanted == before.wanted and job.times.time == before_time


# --- when it is written ---------------------------------------------------------------------------------
def test_time_alone_is_written_every_five_minutes_and_not_while_it_waits() -> None:
    job = Told(checkpoint={"mode": "Self"})
    job.look(30, pod(runs=20))
    assert job.look(329, pod(runs=20)) is None
    written = job.look(330, pod(runs=20))
    assert written is not None and job.times.time == at(330) and job.goodput.wanted == 330
    waits = Told()
    waits.look(30, pod(bound=None))
    assert waits.look(9000, pod(bound=None)) is None


def test_a_job_that_has_ended_comes_to_rest() -> None:
    job = Told()
    ended = pod(runs=20, end=(120, 0, done(TIMES)))
    job.look(130, ended, nodes=(node(created=at(2)),))
    job.look(150, ended, nodes=())
    assert job.look(1000, ended, nodes=()) is None and job.look(9000, nodes=()) is None
    settled = job.status
    assert job.look(9999, nodes=()) is None and settled.goodput == job.goodput
    assert job.times.time == at(130), "and stays the time of the sums"


def test_the_sums_are_exact_over_more_attempts_than_the_status_keeps() -> None:
    """Each is bound for 100 s, of which 60 are productive, 10 are lost, and then none for 20 s."""
    job, status = Told(), begun()
    for number in range(1, 51):
        since = (number - 1) * 120
        kept = [r for r in job.status.attempts if r.number != number]
        records = (*kept, AttemptRecord(number=number, capacity_type="Spot", workers=1))[-20:]
        job.status = replace(job.status, attempt=number, attempts=records, conditions=status.conditions)
        times = split(productive=70, startup=20, unsaved=10)
        spec: dict[str, Any] = {"bound": since, "runs": since + 5, "node": f"n{number}"}
        nodes = (node(f"n{number}", created=at(since)),)
        job.look(since + 50, pod(number, **spec), nodes=nodes)
        lost = word(Outcome.INTERRUPTED_LOST, step=number, durableStep=number, timeSplit=times)
        job.look(since + 101, pod(number, **spec, end=(since + 100, 79, lost)), nodes=())
    assert job.goodput.productive == 50 * 60 and job.goodput.rollback == 50 * 10
    assert job.goodput.wanted == 50 * 120 - 19 and job.goodput.allocated == 50 * 100
    assert job.times.counted == 50 and len(job.status.attempts) <= 21


# --- money ----------------------------------------------------------------------------------------------
def test_the_saving_is_against_an_uninterrupted_run_on_demand() -> None:
    """110 s of use at a cent are 1.10 dollars. 84 s of them would have cost 84 x 0.03 = 2.52 on demand."""
    job = Told()
    job.look(15, pod())
    job.look(120, pod(runs=20, end=(120, 0, done(TIMES))), nodes=())
    cost = job.cost
    assert (cost.use, job.sums.on_demand_use, cost.on_demand_ideal) == (
        Decimal("1.10"),
        Decimal("3.30"),
        Decimal("2.52"),
    )
    assert cost.saving == "56.3%" and job.sums.on_demand_unknown_seconds == 0


def test_spot_that_was_dearer_is_printed_as_it_is() -> None:
    prices = parse(json.dumps([SPOT, ON_DEMAND | {"usdPerHour": 36}]))
    job = Told(prices=prices)
    job.look(120, pod(runs=20, end=(120, 0, done(TIMES))), nodes=(node(),))
    assert job.cost.saving == "-31.0%", "1 - 110 / 84"


@pytest.mark.parametrize(
    "rates",
    [
        [],
        [SPOT],
        [ON_DEMAND],
        [SPOT, ON_DEMAND | {"usdPerHour": 0}],
        [SPOT, ON_DEMAND | {"checked": "2026-02-27T00:00:00Z"}],
        [SPOT, ON_DEMAND | {"zone": "elsewhere"}],
        [SPOT, ON_DEMAND | {"since": "2026-03-01T12:00:11Z"}],
    ],
)
def test_without_a_price_for_each_second_there_is_no_saving(rates: list[dict[str, Any]]) -> None:
    job = Told(prices=parse(json.dumps(rates)) if rates else NO_PRICES)
    job.look(120, pod(runs=20, end=(120, 0, done(TIMES))), nodes=(node(),))
    assert job.cost.saving == "Unknown"
    assert job.sums.unknown_seconds + job.sums.on_demand_unknown_seconds >= 1


def test_half_of_a_node_is_compared_with_half_of_an_on_demand_node() -> None:
    job = Told()
    job.look(15, pod(), nodes=(node(gpus=2),))
    job.look(120, pod(runs=20, end=(120, 0, done(TIMES))), nodes=(node(gpus=2),))
    assert (job.cost.spent, job.sums.on_demand_use) == (Decimal("0.55"), Decimal("1.65"))
    assert job.cost.on_demand_ideal == Decimal("1.26") and job.cost.saving == "56.3%"
    assert job.sums.use_seconds == 55 and job.goodput.paid == "72.7%", "80 of 110, on half a node"


def test_a_gang_s_wait_for_its_last_node_is_no_on_demand_time() -> None:
    """250 node-seconds of use are 7.50 dollars on demand, 2 x 90 of them 5.40; spot cost 2.50."""
    job = Told(begun(workers=2), workers=2)
    times = split(productive=90, startup=12, waiting=38)
    second = pod(1, 1, bound=60, node="node-b", runs=65, end=(160, 0, ""))
    job.look(160, pod(runs=20, end=(160, 0, done(times))), second)
    assert (job.cost.spent, job.sums.on_demand_use, job.cost.on_demand_ideal) == (
        Decimal("2.50"),
        Decimal("7.50"),
        Decimal("5.40"),
    )
    assert job.cost.saving == "53.7%"


def spent(status: Status) -> Mapping[int, str]:
    return {record.number: f"{record.spent:.2f}" for record in status.attempts}


def test_each_attempt_pays_for_its_nodes() -> None:
    """Boot 8 s and 50 s of use by the first, 20 s idle by it too; 40 s by the second on the same node."""
    job = Told(begun(), failurePolicy={"backoffSeconds": 0})
    young = (node(created=at(2)),)
    job.look(20, pod(), nodes=young)
    first = pod(runs=15, end=(60, 1, ""))
    job.look(60, first, nodes=young)
    job.look(80, first, pod(2, bound=80), nodes=young)
    second = pod(2, bound=80, runs=82, end=(120, 0, done(split(productive=30))))
    job.look(120, first, second, nodes=young)
    assert spent(job.status) == {1: "0.78", 2: "0.40"} and job.cost.spent == Decimal("1.18")
    assert [job.books.ledger.of(number).use_seconds for number in (1, 2)] == [50, 40]
    assert floats(job.sums.boot_seconds, job.sums.idle_seconds) == (8, 20)
    job.look(150, first, second, nodes=())
    assert spent(job.status) == {1: "0.78", 2: "0.70"}, "the idle time is the last one's"
