"""The report on one job: what was spent on what, attempt by attempt, and what of it trained the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from decimal import ROUND_FLOOR, Decimal
from typing import Any, Final

from spottrain.core.log_format import counted, duration

from spottrain_cli import jobs
from spottrain_cli.figures import dollars, lower_bound, table
from spottrain_cli.jobs import BUCKETS, Attempt, Cost, Goodput, Job, percent
from spottrain_cli.timeline import stands

NOT_COUNTED: Final = "Not counted: storage, requests, traffic between zones."
HOUR: Final = Decimal(3600)
MINUTE: Final = Decimal(60)
TENTH: Final = Decimal("0.1")
PARTS: Final = {
    "use": "while pods of the job ran",
    "boot": "from the node's creation until the pod was on it",
    "idle": "from the pods' end to the node's, an hour at most",
}
RESULT: Final = {"Succeeded": "", "Failed": ", without a result"}
"""What is said beside the saving of a job that has ended, by status.phase."""
SO_FAR: Final = ", so far"


def lines(job: Job, *, now: datetime) -> list[str]:
    """Returns the report. `now` ends the duration of an attempt that has its nodes and no end."""
    sections = [
        [_title(job)],
        [*_spent(job)],
        [*_attempts(job, now)],
        [*_time(job)],
        [*_saving(job)],
        [NOT_COUNTED],
    ]
    return [line for section in sections if section for line in [*section, ""]][:-1]


# --- text -----------------------------------------------------------------------------------------------
def node_hours(seconds: Decimal) -> str:
    hours = seconds / HOUR
    if hours < Decimal("0.01"):
        return f"{seconds:,.0f} node-seconds"
    return f"{hours:,.2f} node-hours" if hours < 10 else f"{hours:,.1f} node-hours"


def percents(parts: Sequence[Decimal]) -> list[Decimal]:
    """Returns shares in percent with one digit that add up to 100.0: the largest remainders go up."""
    total = sum(parts)
    if not total:
        return [Decimal(0) for _ in parts]
    exact = [100 * part / total for part in parts]
    shares = [share.quantize(TENTH, ROUND_FLOOR) for share in exact]
    missing = int((100 - sum(shares)) / TENTH)
    by_remainder = sorted(range(len(parts)), key=lambda index: shares[index] - exact[index])
    for index in by_remainder[:missing]:
        shares[index] += TENTH
    return shares


def _title(job: Job) -> str:
    place = f" in namespace {job.namespace}" if job.namespace else ""
    counts = [counted(job.attempt, "attempt"), counted(job.interruptions, "interruption")]
    counts += [counted(job.failures, "failure")] if job.failures else []
    phase = (job.phase or "not seen by the operator yet") + (f" ({job.reason})" if job.reason else "")
    return f"{job.name}{place}: {', '.join([phase, *counts])}"


# --- what was spent -------------------------------------------------------------------------------------
def _spent(job: Job) -> Iterator[str]:
    cost = job.cost
    if cost is None:
        yield _no_cost(job)
        return
    spent = lower_bound(cost.spent, known=cost.known)
    rows = [("Spent", spent, "at the operator's prices; only the bill is exact")]
    rows += [
        (f"  {name}", lower_bound(getattr(cost, name), known=cost.known), about)
        for name, about in PARTS.items()
    ]
    if job.limit is not None:
        rows.append(("Limit", dollars(job.limit), "capacity.maxCostUSD"))
    names, amounts = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, amount_text, about in rows:
        yield f"{name:<{names}}  {amount_text:>{amounts}}  {about}"
    at = f", up to {_minute(cost.updateTime)}" if cost.updateTime else ""
    if cost.known:
        yield f"Prices: known for all node-hours{at}."
    else:
        yield f"Unknown: {_without_price(cost)} without a price{at}."
        yield "They are in no sum. Add their prices to the chart's value `prices`."
    if cost.lostTime:
        yield f"The bookkeeping was lost: up to {_minute(cost.lostTime)}, idle time of nodes may be missing."


def _without_price(cost: Cost) -> str:
    return node_hours(cost.unknownSeconds) if cost.unknownSeconds else "some node-hours"


def _no_cost(job: Job) -> str:
    if not job.ran:
        return "Nothing was spent yet: no node has had pods of the job."
    return (
        "Cost: unknown. The job had nodes and has no status.cost: the operator or the CRD in the cluster is "
        "older than this command. Upgrade the chart, and apply its CRD."
    )


# --- attempts -------------------------------------------------------------------------------------------
def _attempts(job: Job, now: datetime) -> Iterator[str]:
    if not job.attempts:
        return
    head = ["NO.", "NODES", "ZONE", "CAPACITY", "START", "DURATION", "END", "SPENT", "STEPS LOST"]
    yield from table([head, *(_attempt(each, now) for each in job.attempts)])
    first = job.attempts[0].number
    if first > 1:
        forgotten = "Attempt 1 is" if first == 2 else f"Attempts 1 to {first - 1} are"
        yield f"{forgotten} no longer in the status, which keeps the last 10; the sums above have all."


def _attempt(attempt: Attempt, now: datetime) -> list[str]:
    nodes = attempt.instanceType or "-"
    if attempt.workers and attempt.workers > 1:
        nodes = f"{attempt.workers} x {nodes}"
    lost, seconds = attempt.lost_steps, _seconds(attempt, now)
    return [
        str(attempt.number),
        nodes,
        attempt.zone or "-",
        attempt.capacityType or "-",
        f"{attempt.startTime:%m-%d %H:%M}Z" if attempt.startTime else "-",
        "-" if seconds is None else duration(seconds),
        attempt.cause or stands(attempt),
        lower_bound(attempt.spent, known=not attempt.unknownSeconds),
        "-" if lost is None else str(lost),
    ]


def _seconds(attempt: Attempt, now: datetime) -> float | None:
    """Returns how long it had its nodes; None where it had none, or nobody wrote when."""
    if attempt.boundTime is None:
        return None
    return max(0.0, ((attempt.endTime or now) - attempt.boundTime).total_seconds())


def _minute(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M}Z"


# --- where the time went --------------------------------------------------------------------------------
def _time(job: Job) -> Iterator[str]:
    if job.goodput is None:
        yield f"Where the time went: unknown. {_no_goodput(job)}"
        return
    buckets = job.goodput.buckets
    total = sum(buckets.values(), Decimal(0))
    unit, length = ("HOURS", HOUR) if total >= HOUR else ("MINUTES", MINUTE)
    rows = [["WHERE THE TIME WENT", unit, "PERCENT"]]
    for (name, seconds), share in zip(buckets.items(), percents([*buckets.values()]), strict=True):
        rows.append([BUCKETS[name], f"{seconds / length:,.2f}", f"{share:.1f}"])
    rows.append(["all", f"{total / length:,.2f}", "100.0" if total else "0.0"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        yield "  ".join([f"{name:<{widths[0]}}", *map(str.rjust, figures, widths[1:])])
    wanted = job.goodput.wanted
    if wanted and abs(total - wanted) > wanted / 1000:
        yield f"These parts do not add up to the wanted time of {wanted / HOUR:,.2f} h: please report it."
    yield ""
    yield from _goodputs(job.goodput)


def _no_goodput(job: Job) -> str:
    if not job.reports:
        return "The job's image reports nothing (checkpoint.mode Self)."
    if not job.attempt:
        return "No attempt has started."
    return "No trainer has reported it yet, or the operator in the cluster is older than this command."


def _goodputs(goodput: Goodput) -> Iterator[str]:
    rows = {
        "paid": "of the paid node-time trained the model",
        "runtime": "of the time in which all nodes were there",
        "scheduling": "of the wanted time had all nodes",
    }
    for name, about in rows.items():
        value = percent(getattr(goodput, name))
        said = "unknown" if value is None else f"{f'{value} %':>8} {about}"
        yield f"Goodput, {name + ':':<12} {said}"


# --- saving ---------------------------------------------------------------------------------------------
def _saving(job: Job) -> Iterator[str]:
    cost = job.cost
    if cost is None:
        return
    saving = cost.known_saving
    if saving is None or cost.spent is None or cost.onDemandIdeal is None:
        yield f"Saving against on-demand: unknown, because {_why_unknown(cost, job)}."
        return
    result, ideal = RESULT.get(job.phase, SO_FAR), dollars(cost.onDemandIdeal)
    dearer = ", dearer than on-demand," if saving < 0 else ""
    yield f"Saving against on-demand{result}: {saving} %{dearer} = 1 - {dollars(cost.spent)} / {ideal}"
    yield f"  ({ideal}: its productive time and its waits for data at on-demand prices)"
    if result == SO_FAR:
        yield "  Work that no checkpoint has yet counts in it, and may be lost."


def _why_unknown(cost: Cost, job: Job) -> str:
    if not cost.known:
        return f"{_without_price(cost)} have no price"
    if job.goodput is None or percent(job.goodput.runtime) is None:
        return "no trainer has reported where its time went"
    return "an on-demand price of its nodes is missing"


# --- for programs ---------------------------------------------------------------------------------------
def facts(job: Job, *, now: datetime) -> dict[str, Any]:
    """Returns the job's figures: dollars, seconds and percentages as numbers; null is unknown."""
    found = jobs.facts(job) | {"notCounted": NOT_COUNTED}
    for each, attempt in zip(found["attempts"], job.attempts, strict=True):
        each["seconds"] = _seconds(attempt, now)
    if job.cost is not None:
        found["cost"] |= {"known": job.cost.known, "saving": jobs.plain(job.cost.known_saving)}
    if job.goodput is not None:
        names = ("paid", "runtime", "scheduling")
        found["goodput"] |= {name: jobs.plain(percent(getattr(job.goodput, name))) for name in names}
    return found
