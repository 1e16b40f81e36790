"""capacity.type Cheapest: what is decided when, what it is decided from, and that no deadline is missed."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain.contract import Outcome, TimeSplit
from spottrain_operator.api.bookkeeping import Bookkeeping, CostSums, Ledger
from spottrain_operator.api.observed import Observed
from spottrain_operator.api.prices import NO_PRICES, PriceList, parse
from spottrain_operator.api.training_job import AttemptRecord, ProgressStatus, Status
from spottrain_operator.control.actions import Plan
from spottrain_operator.control.plan import plan
from spottrain_operator.names import Cause, Condition, Phase

from tests.builders import (
    NOW,
    after,
    condition,
    make_job,
    make_observed,
    make_pod,
    manifests,
    removed,
    sample,
    status_of,
    told,
)
from tests.unit.controller.fake_cluster import World
from tests.unit.controller.market import POOLS, STEP, Market, spec_of
from tests.unit.controller.stories import follows

SPOT = {"instanceType": "g5", "capacityType": "Spot", "usdPerHour": 1}
ON_DEMAND = SPOT | {"capacityType": "OnDemand", "usdPerHour": 3}
PRICES = parse(json.dumps([SPOT, ON_DEMAND]))
DEAR_SPOT = parse(json.dumps([SPOT | {"usdPerHour": "3.1"}, ON_DEMAND]))
HOUR = 3600.0
ALWAYS = [(0.0, 1e9)]
NEVER: list[tuple[float, float]] = []
RESERVE = 300 + 900 + 600
"""Seconds that are kept for a start on demand: its restart, its wait, and the work since the last save."""


def known(steps: int = 3600, durable: int | None = None, **more: Any) -> Status:
    """The status of a job whose speed is known, and that has not started, or is between two attempts."""
    progress = ProgressStatus(total_steps=steps, step_seconds=Decimal(STEP), step=durable)
    return Status(progress=progress, known_durable_step=durable, **more)


def market(
    deadline: float | None,
    spot: Sequence[tuple[float, float]],
    *,
    steps: int = 1440,
    prices: PriceList = PRICES,
    capacity: dict[str, Any] | None = None,
    **more: Any,
) -> Market:
    spec = spec_of(deadline, **(capacity or {}))
    return Market(spec=spec, spot=spot, prices=prices, status=known(steps), steps=steps, **more)


def seen(
    status: Status,
    deadline: float | None,
    *pods: Any,
    prices: PriceList = PRICES,
    now: float = 0,
    **more: Any,
) -> Observed:
    created = after(-1250 if status.attempt else 0).isoformat()
    job = make_job(spec_of(deadline, **more), status=status, creationTimestamp=created)
    return replace(make_observed(*pods, job=job, now=after(now)), prices=prices)


def chosen(made: Plan) -> tuple[str, str]:
    record = status_of(made).attempts[-1]
    return record.capacity_type, record.choice


def refused(ago: float = 1, pool: str = "cheap", number: int = 1) -> AttemptRecord:
    """A request for spot that was given up so many seconds ago."""
    return AttemptRecord(
        number=number,
        pool=pool,
        capacity_type="Spot",
        cause=Cause.SCHEDULING_TIMEOUT,
        started=after(-600 - ago),
        ended=after(-ago),
    )


def between(*records: AttemptRecord, **more: Any) -> Status:
    return known(**more, attempt=len(records), attempts=records)


# --- the next attempt -----------------------------------------------------------------------------------
def test_a_job_with_slack_asks_for_spot_and_its_record_says_why() -> None:
    made = plan(seen(known(360), 10 * HOUR))
    kind, why = chosen(made)
    assert kind == "Spot" and manifests(made)
    assert why


@pytest.mark.parametrize(
    ("deadline", "status", "choice"),
    [
        (None, known(), "Spot"),
        (None, between(refused()), "Spot"),
        (20 * HOUR, known(), "Spot"),
        (20 * HOUR, between(refused()), "Spot"),
        (10 * HOUR + RESERVE + 900, between(refused()), "OnDemand"),
        (10 * HOUR + RESERVE + 900, known(), "OnDemand"),
        (10 * HOUR + RESERVE + 1000, known(), "Spot"),
        (20 * HOUR, Status(), "Spot"),
        (20 * HOUR, replace(Status(), attempt=1, attempts=(refused(),)), "OnDemand"),
    ],
    ids=[
        "free",
        "free, refused",
        "slack",
        "slack, refused",
        "none, refused",
        "none",
        "just enough",
        "work",
        "work, refused",
    ],
)
@pytest.mark.parametrize("prices", [NO_PRICES, parse(json.dumps([SPOT])), parse(json.dumps([ON_DEMAND]))])
def test_without_prices_the_time_alone_decides(
    deadline: float | None, status: Status, choice: str, prices: PriceList
) -> None:
    assert chosen(plan(seen(status, deadline, prices=prices)))[0] == choice


def test_a_job_that_had_no_prices_for_a_while_is_in_time_on_demand() -> None:
    life = market(10 * HOUR, [(0.0, 1800.0)], prices=NO_PRICES, capacity={"maxCostUSD": 1000}, notice=120.0)
    life.run(900)
    life.prices = PRICES
    life.run(20 * HOUR)
    assert life.done_at is not None and life.done_at <= 10 * HOUR and life.made[-1] == "OnDemand"
    assert condition(life.status, Condition.ACCEPTED).reason == "PriceUnknown", "it stays no guarantee"


TWO = [
    {"name": "a", "platform": "AWS", "nodeSelector": {"node.kubernetes.io/instance-type": "g5"}},
    {"name": "b", "platform": "AWS", "nodeSelector": {"node.kubernetes.io/instance-type": "g6"}},
    {"name": "od", "platform": "AWS", "type": "OnDemand"}
    | {"nodeSelector": {"node.kubernetes.io/instance-type": "g5"}},
]


# --- while a request is pending, and on demand ----------------------------------------------------------
def requested(steps: int = 3600) -> tuple[Status, Any]:
    """A spot attempt whose pod waits since ten minutes."""
    record = AttemptRecord(
        number=1,
        pool="cheap",
        capacity_type="Spot",
        choice="as of then",
        workers=1,
        started=after(-600),
        notice_seconds=110,
    )
    pod = make_pod(
        node="", phase="Pending", running_since=None, created=after(-600), unschedulable="no nodes"
    )
    return known(steps, attempt=1, attempts=(record,)), pod


def test_a_gang_with_some_of_its_nodes_gives_them_back_and_asks_again_after_a_spread() -> None:
    record = replace(requested()[0].attempts[0], workers=2)
    status = known(attempt=1, attempts=(record,))
    bound = make_pod(created=after(-600))
    waits = make_pod(1, 1, node="", phase="Pending", running_since=None, created=after(-600))
    spec = spec_of(None) | {"workers": 2}
    observed = make_observed(bound, waits, job=make_job(spec, status=status))
    made = plan(replace(observed, prices=PRICES))
    assert removed(made) == {0, 1}
    ended = between(replace(refused(), workers=2), steps=3600)
    again = status_of(plan(replace(make_observed(job=make_job(spec, status=ended)), prices=PRICES)))
    assert again.attempts[-1].capacity_type == "Spot" and again.attempt == 2
    assert again.next_start is not None and NOW < again.next_start <= after(60)


def on_demand(**more: Any) -> tuple[Status, Any]:
    """An attempt on demand that has trained for an hour, and has saved."""
    record = AttemptRecord(
        number=2,
        pool="sure",
        capacity_type="OnDemand",
        workers=1,
        notice_seconds=110,
        instance_type="g5",
        node="node-a",
        started=after(-4200),
        bound=after(-3900),
        stepped=after(-3700),
        start_step=0,
        last_step=370,
        durable_step=360,
    )
    status = known(attempt=2, attempts=(refused(4300), replace(record, **more)), durable=360)
    return status, make_pod(2, running_since=after(-3700), created=after(-4200))


def late_request(**more: Any) -> tuple[Status, Any]:
    """On demand, and its pod waits for more than an hour."""
    status, pod = requested()
    record = replace(status.attempts[0], capacity_type="OnDemand", pool="sure")
    return replace(status, attempts=(replace(record, **more),)), replace(pod, created=after(-5000))


def after_loss(seconds: float) -> Status:
    """On demand, and a spot node was lost so many seconds ago."""
    lost = replace(refused(seconds), cause=Cause.NODE_LOST)
    return replace(ON, attempts=(lost, ON.attempts[1]))


TIGHT = 10 * HOUR + RESERVE + 700
BARE = Status()
GAP = Bookkeeping(ledger=Ledger(time=NOW, earlier=CostSums(unknown_seconds=Decimal(60))))
ON, ITS = on_demand()
LOST, BOTH = refused(pool="a"), (refused(pool="a"), refused(pool="b", number=2))


def in_two(dollars: Any, *records: AttemptRecord) -> Observed:
    """The next attempt where a second spot pool costs so much."""
    prices = parse(json.dumps([SPOT, ON_DEMAND, SPOT | {"instanceType": "g6", "usdPerHour": dollars}]))
    return seen(between(*records), 20 * HOUR, prices=prices, pools=TWO)


def in_pool_a(status: Status, pod: Any) -> Observed:
    of_a = replace(status, attempts=(replace(status.attempts[0], pool="a"),))
    return seen(
        of_a, None, pod, prices=parse(json.dumps([SPOT, ON_DEMAND, SPOT | {"instanceType": "g6"}])), pools=TWO
    )


DECISIONS: dict[str, tuple[Observed, str]] = {
    "with slack": (seen(known(360), 10 * HOUR), "on=Spot creates=0"),
    "without slack": (seen(known(360), HOUR + RESERVE), "on=OnDemand"),
    "too late": (seen(known(3600), HOUR), "on=OnDemand OnTime=False/BehindSchedule warns=BehindSchedule"),
    "refused, and little slack": (seen(between(refused()), TIGHT), "on=OnDemand start=now"),
    "refused, and much slack": (seen(between(refused()), 100 * HOUR), "on=Spot start=now"),
    "refused, without a deadline": (seen(between(refused()), None), "on=Spot start=now"),
    "dear spot": (seen(known(), 100 * HOUR, prices=DEAR_SPOT), "on=OnDemand"),
    "dear spot, without a deadline": (seen(known(), None, prices=DEAR_SPOT), "on=OnDemand"),
    "unknown work": (seen(BARE, 100 * HOUR), "on=Spot OnTime=Unknown/WorkUnknown"),
    "unknown work, refused": (
        seen(replace(BARE, attempt=1, attempts=(refused(),)), 100 * HOUR),
        "on=OnDemand OnTime=Unknown/WorkUnknown",
    ),
    "a cost limit with an old gap in the sums": (
        replace(seen(known(), HOUR, maxCostUSD=100), books=GAP),
        "on=OnDemand",
    ),
    "of two spot pools the cheaper": (in_two(2), "pool=a"),
    "of two spot pools the other": (in_two("0.2"), "pool=b"),
    "of two spot pools the one that did not refuse": (in_two(2, LOST), "pool=b"),
    "though it is dearer": (in_two("0.2", refused(pool="b")), "pool=a"),
    "both spot pools have refused": (in_two(2, *BOTH), "pool=a"),
    "a request that has waited long enough": (seen(requested()[0], TIGHT, requested()[1]), "deletes=0"),
    "not a second earlier": (
        seen(requested()[0], TIGHT, replace(requested()[1], created=after(-599))),
        "!deletes",
    ),
    "nor where nothing else would be better": (seen(requested()[0], None, requested()[1]), "!deletes again"),
    "it is given up for another pool": (in_pool_a(*requested()), "deletes=0"),
    "cheaper on-demand is waited for": (
        seen(late_request()[0], None, late_request()[1], prices=DEAR_SPOT),
        "!deletes",
    ),
    "on demand it asks for spot when that pays": (
        seen(ON, 100 * HOUR, ITS),
        "attempt=2 on=Spot creates=0 !deletes",
    ),
    "not for dearer spot": (seen(ON, 100 * HOUR, ITS, prices=DEAR_SPOT), "!creates"),
    "not without slack": (seen(ON, 9 * HOUR + RESERVE + 700, ITS), "!creates"),
    "not before it has saved": (seen(on_demand(durable_step=None)[0], 100 * HOUR, ITS), "!creates"),
    "not just after a loss": (seen(after_loss(1199), 100 * HOUR, ITS), "!creates"),
    "later": (seen(after_loss(1200), 100 * HOUR, ITS), "creates=0"),
    "not with unknown work": (seen(replace(ON, progress=None), 100 * HOUR, ITS), "!creates"),
    "an attempt on spot is kept": (
        seen(on_demand(capacity_type="Spot", pool="cheap")[0], HOUR, ITS, prices=DEAR_SPOT),
        "!deletes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECISIONS)
def test_the_cheaper_capacity_that_is_in_time_is_chosen(name: str) -> None:
    observed, expected = DECISIONS[name]
    follows(expected, observed)


@pytest.mark.parametrize("deadline", [-10.0, 5 * HOUR, 100 * HOUR], ids=["missed", "no slack", "slack"])
def test_a_request_on_demand_that_waits_too_long_is_given_up_for_spot_and_the_other_way_round(
    deadline: float,
) -> None:
    status, pod = late_request()
    follows("deletes=0", seen(status, deadline, pod))
    over = replace(status.attempts[0], cause=Cause.SCHEDULING_TIMEOUT, ended=after(-1))
    follows("on=Spot start=now", seen(between(over), deadline))
    again = "Spot" if deadline == 100 * HOUR else "OnDemand"
    follows(f"on={again}", seen(between(over, refused(number=2)), deadline))


# --- whole lives ----------------------------------------------------------------------------------------


def test_with_no_spot_it_falls_back_in_time_and_is_done_before_its_deadline() -> None:
    life = market(18_000, NEVER)
    life.run(40_000)
    assert life.done_at is not None and life.done_at <= 18_000
    assert life.made[:2] == ["Spot", "OnDemand"] and life.status.attempt == 2
    assert condition(life.status, Condition.ON_TIME).status == "True"


def test_without_a_deadline_it_waits_for_spot_however_long_and_never_pays_for_on_demand() -> None:
    life = market(None, [(200_000.0, 1e9)])
    life.run(400_000)
    assert set(life.made) == {"Spot"} and len(life.made) == 1, "one request, which stays"
    assert life.status.phase == Phase.SUCCEEDED


INTERVALS = st.lists(st.integers(60, 9000), max_size=12)


@given(
    steps=st.integers(60, 1500),
    extra=st.integers(0, 4 * 3600),
    lengths=INTERVALS,
    begins=st.booleans(),
    waits=st.lists(st.integers(0, 880), min_size=1, max_size=4),
    restart=st.integers(0, 300),
    notice=st.sampled_from((0, 120)),
    lag=st.sampled_from((0.1, 2.0, 5.0)),
    pending=st.sampled_from((30, 120, 600)),
    prices=st.sampled_from((PRICES, PRICES, NO_PRICES)),
)
@settings(max_examples=12, deadline=None)
def test_no_job_with_known_work_is_late_while_on_demand_comes_within_its_time(
    steps: int,
    extra: int,
    lengths: list[int],
    begins: bool,
    waits: list[int],
    restart: int,
    notice: int,
    lag: float,
    pending: int,
    prices: PriceList,
) -> None:
    """Whenever spot comes and goes: if on-demand comes within pendingTimeoutSeconds, a start takes no longer
    than is known, and the deadline could be met at the beginning."""
    edges, at = [], 0.0
    for length in lengths:
        edges.append((at, at + length))
        at += length
    deadline = steps * STEP + RESERVE + extra
    life = market(
        deadline,
        edges[0 if begins else 1 :: 2],
        steps=steps,
        waits=waits,
        restart=restart,
        notice=notice,
        lag=lag,
        prices=prices,
        capacity={"cheapest": {"pendingSeconds": pending}},
    )
    life.run(deadline + 7200)
    assert life.done_at is not None and life.done_at <= deadline, life.status.attempts
    assert life.status.phase == Phase.SUCCEEDED and life.status.failures == 0
    assert condition(life.status, Condition.ON_TIME).status == "True"


@pytest.mark.parametrize("extra", (0, 480, 900, 960, 1200, 2400, 4800, 7160))
@pytest.mark.parametrize("lag", [0.1, 5.0])
def test_a_job_is_in_time_though_each_spot_node_comes_late_and_is_lost_before_its_first_save(
    extra: int, lag: float
) -> None:
    """And on-demand takes all of its time. What is reserved suffices, and no part of it is left out."""
    deadline = 60 * STEP + RESERVE + extra
    life = market(deadline, [], steps=60, waits=[895], restart=300, lag=lag, cruel=599)
    life.run(deadline + 7200)
    assert life.done_at is not None and life.done_at <= deadline, life.made
    assert ("Spot" in life.made) == (extra >= 600 + 60 + 300), "it uses the time that it has"


def test_where_on_demand_cannot_be_had_the_job_takes_the_spot_that_comes() -> None:
    life = market(6 * HOUR, [(3 * HOUR, 1e9)], waits=[1e9])
    life.run(60 * HOUR)
    assert life.done_at is not None and life.done_at <= 8 * HOUR, "four hours of work after spot came"
    assert life.status.phase == Phase.SUCCEEDED and life.status.failures == 0


TWINS = [
    POOLS[0] | {"nodeSelector": {"node.kubernetes.io/instance-type": "g5", "zone": zone}} for zone in "abc"
]


@pytest.mark.parametrize("pools", [1, 2, 3])
@pytest.mark.parametrize("pending", [30, 600])
def test_with_unknown_work_each_spot_pool_is_asked_once_and_then_on_demand(pools: int, pending: int) -> None:
    named = [pool | {"name": f"cheap-{number}"} for number, pool in enumerate(TWINS[:pools])]
    capacity = {"pools": [*named, POOLS[1]], "cheapest": {"pendingSeconds": pending}}
    life = market(12 * HOUR, NEVER, capacity=capacity)
    life.status = Status()
    life.run(pools * (pending + 60.0) + 600)
    assert life.made == ["Spot"] * pools + ["OnDemand"]


def test_a_job_that_was_suspended_before_its_pods_decides_again() -> None:
    record = AttemptRecord(number=2, pool="cheap", capacity_type="Spot", workers=1, choice="as of then")
    halted = known(attempt=2, attempts=(refused(86_400), record))
    made = plan(seen(halted, 10 * HOUR + RESERVE))
    status = status_of(made)
    assert status.attempt == 2 and [r.number for r in status.attempts] == [1, 2] and manifests(made)
    assert status.active_since == NOW
    assert chosen(made)[0] == "OnDemand"
    first = known(attempt=1, attempts=(replace(record, number=1),))
    assert chosen(plan(seen(first, 10 * HOUR + RESERVE)))[0] == "OnDemand"


# --- what is learned ------------------------------------------------------------------------------------
def test_the_speed_and_the_length_of_the_training_outlive_an_attempt() -> None:
    begun = status_of(plan(seen(Status(), None)))
    pod = make_pod(created=NOW)
    split = TimeSplit(productive=90, dataWait=6, checkpointStall=4, startup=70, unsaved=90)
    for report, seconds in (
        (sample(31, startStep=10, etaSeconds=6900.0, totalSteps=100), 100.0),
        (sample(31, startStep=10, etaSeconds=6900.0, totalSteps=100, timeSplit=split), 5.0),
    ):
        job = make_job(spec_of(None), status=begun)
        trained = status_of(plan(make_observed(pod, job=job, sample=report)))
        assert trained.progress is not None and trained.progress.step_seconds == seconds
        assert trained.attempts[-1].stepped == NOW and trained.attempts[-1].bound is not None
    job = make_job(spec_of(None), status=trained)
    starting = sample(0, totalSteps=0, state="Starting", startStep=None)
    later = status_of(plan(make_observed(pod, job=job, sample=starting)))
    assert later.progress is not None
    assert (later.progress.step_seconds, later.progress.total_steps) == (Decimal(5), 100)


def test_a_start_that_an_operator_which_was_down_saw_late_is_as_long_as_the_trainer_says() -> None:
    record = AttemptRecord(number=1, pool="cheap", capacity_type="Spot", bound=after(-7500))
    status = replace(known(), attempt=1, attempts=(record,))
    split = TimeSplit(productive=7200, startup=180, restore=20, waiting=30)
    report = sample(700, startStep=0, totalSteps=3600, timeSplit=split)
    for running, seconds in ((after(-7430), 300.0), (after(-7600), 200.0), (NOW, 7500.0)):
        observed = seen(status, None, make_pod(running_since=running))
        shown = status_of(plan(replace(observed, sample=report))).progress
        assert shown is not None and shown.start_seconds == seconds


@pytest.mark.parametrize("start", [None, 0, 36_000])
def test_ranks_that_were_restarted_in_their_pod_are_as_fast_as_before(start: int | None) -> None:
    """Their time split has the seconds of all runs in the pod, and their start step is that of the last."""
    status, pod = on_demand(start_step=0, last_step=36_000, stepped=after(-3600))
    split = TimeSplit(productive=36_100, startup=200)
    report = sample(36_006, 2, startStep=start, totalSteps=46_000, etaSeconds=9994.0, timeSplit=split)
    shown = status_of(plan(replace(seen(status, None, pod), sample=report))).progress
    assert shown is not None and float(shown.step_seconds or 0) == pytest.approx(1.0, abs=0.01)
    last = told(Outcome.INTERRUPTED, 2, step=36_006, startStep=start, timeSplit=split)
    shown = status_of(plan(seen(status, None, last))).progress
    assert shown is not None and float(shown.step_seconds or 0) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("eta", [0.0, 1e-300, 1e300, None])
def test_a_strange_estimate_of_a_trainer_breaks_no_plan(eta: float | None) -> None:
    status, pod = on_demand()
    report = sample(371, 2, startStep=0, etaSeconds=eta, totalSteps=2**53 - 1)
    observed = replace(seen(status, 100 * HOUR, pod), sample=report)
    made = plan(plan_again(observed))
    assert made.reason != "InvalidSpec"


def plan_again(observed: Observed) -> Observed:
    made = plan(observed)
    job = make_job(spec_of(100 * HOUR), status=made.status or observed.job.status)
    return replace(observed, job=job)


@pytest.mark.parametrize(
    ("starts", "seconds"),
    [([], 300.0), ([100], 120.0), ([100, 500], 510.0), ([500, 100], 300.0), ([0], 30.0)],
)
def test_a_start_as_long_as_the_latest_or_a_slower_one_is_reserved(starts: list[int], seconds: float) -> None:
    """It shows in the slack of the next decision, however many attempts have no start since then."""
    status = known(durable=0)
    for number, start in enumerate(starts, 1):
        record = AttemptRecord(
            number=number, pool="cheap", capacity_type="Spot", started=after(-900), bound=after(-start)
        )
        status = replace(status, attempt=number, attempts=(record,))
        report = sample(1, number, startStep=0, totalSteps=3600)
        trained = status_of(plan(replace(seen(status, None, make_pod(number)), sample=report)))
        status = replace(known(durable=0), progress=trained.progress)
        assert status.progress is not None
        status = replace(status, progress=replace(status.progress, step_seconds=Decimal(STEP)))
    requests = tuple(refused(40_000, number=number) for number in range(1, 21))
    status = replace(status, attempt=20, attempts=requests)
    _, why = chosen(plan(seen(status, 10 * HOUR + 900 + 600 + seconds + 3 * HOUR)))
    assert "slack 3.00 h" in why


@pytest.mark.parametrize(
    ("interval", "seconds"), [("10m", 600), ("90s", 90), ("1h", 3600), ("50steps", 500), ("auto", 3600)]
)
def test_the_work_since_the_last_save_is_reserved(interval: str, seconds: float) -> None:
    spec = spec_of(10 * HOUR + 900 + 300 + seconds + 3 * HOUR)
    spec["checkpoint"] = {"uri": "s3://bucket/run", "interval": interval}
    observed = replace(make_observed(job=make_job(spec, status=known())), prices=PRICES)
    assert "slack 3.00 h" in chosen(plan(observed))[1]


def test_max_steps_of_the_spec_count_before_what_a_trainer_has_reported() -> None:
    spec = spec_of(5 * HOUR + 900 + 300 + 600 + 3 * HOUR) | {"training": {"maxSteps": 1800}}
    observed = replace(make_observed(job=make_job(spec, status=known(3600))), prices=PRICES)
    assert "slack 3.00 h" in chosen(plan(observed))[1]


# --- what is said ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("deadline", "expected"),
    [(29 * HOUR, "True/OnSchedule"), (8 * HOUR, "False/BehindSchedule"), (-1, "False/DeadlineMissed")],
)
def test_a_running_job_says_whether_it_is_on_time(deadline: float, expected: str) -> None:
    running, pod = on_demand(capacity_type="Spot", pool="cheap", last_step=360)
    follows(f"OnTime={expected}", seen(running, deadline, pod))


@pytest.mark.parametrize(("deadline", "status"), [(10.0, "True"), (-7200.0, "False")])
def test_a_job_that_is_done_says_whether_it_was_in_time(deadline: float, status: str) -> None:
    done = told(Outcome.DONE, 2, step=3600)
    follows(f"OnTime={status}", seen(on_demand()[0], deadline, done))


def test_a_deadline_that_is_left_out_takes_its_condition_back() -> None:
    running, pod = on_demand()
    first = status_of(plan(seen(running, 100 * HOUR, pod, spotFirst={"returnAfterSeconds": 7200})))
    follows("!OnTime", seen(first, None, pod, spotFirst={"returnAfterSeconds": 7200}))


# --- bad input ------------------------------------------------------------------------------------------
def test_a_deadline_in_the_past_stops_a_job_before_its_first_attempt_alone() -> None:
    follows("Accepted=False/InvalidSpec !creates", seen(Status(), -60))
    follows("Accepted=True", seen(between(refused()), -60))
    follows("Accepted=False !creates", seen(Status(), None, pools=TWO[:2]))


# --- the event loop -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("capacity", "beside"), [({"maxCostUSD": 100}, True), ({}, False)])
async def test_a_plan_that_sums_costs_is_made_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, capacity: dict[str, Any], beside: bool
) -> None:
    """It takes some tenths of a second, in which notices of other jobs must be heard."""
    in_loop: set[bool] = set()

    def spied(observed: Observed) -> Plan:
        in_loop.add(threading.current_thread() is threading.main_thread())
        return plan(observed)

    monkeypatch.setattr("spottrain_operator.control.reconcile.plan", spied)
    world = World({"capacity": capacity})
    await world.settle()
    assert in_loop == {not beside} and world.status.attempts[0].capacity_type == "Spot"


BUSY, BUSY_POD = on_demand(capacity_type="Spot", pool="cheap", last_step=360)
TOLD = (
    *(observed for observed, _ in DECISIONS.values()),
    seen(known(), 20 * HOUR, prices=NO_PRICES),
    seen(requested()[0], 20 * HOUR, requested()[1]),
    seen(requested()[0], 10 * HOUR, replace(requested()[1], created=after(-10))),
    *(seen(BUSY, deadline, BUSY_POD) for deadline in (29 * HOUR, 8 * HOUR, -1)),
    *(seen(BUSY, deadline, told(Outcome.DONE, 2, step=3600)) for deadline in (10.0, -7200.0)),
    seen(Status(), -60),
    seen(Status(), None, pools=TWO[:2]),
)
"""Scenes whose sentences are in tests/unit/sentences.txt."""
