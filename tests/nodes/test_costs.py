"""What a job costs on real nodes, where its time went and what it saved, beside sums by hand."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from processcluster.install import DOLLARS_PER_HOUR, ON_DEMAND_DOLLARS_PER_HOUR
from spottrain.contract import TerminationMessage, TimeSplit

from tests.support.lab import Lab, Raw

PARTS = (
    "productive", "startup", "dataWait", "checkpointStall", "restore", "rollback", "waiting", "other",
)  # fmt: skip
CENT = Decimal("0.01")


def seconds(since: str, until: str) -> Decimal:
    begin, end = (datetime.fromisoformat(text) for text in (since, until))
    return Decimal(int((end - begin).total_seconds()))


def dollars(since: str, until: str) -> Decimal:
    return seconds(since, until) * DOLLARS_PER_HOUR / 3600


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of a pod that has ended, as its kubelet reported them."""

    bound: str
    began: str
    ended: str
    split: TimeSplit


def times(pod: Raw) -> Times:
    state = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    word = TerminationMessage.from_json(state["message"])
    assert word is not None and word.timeSplit is not None
    return Times(bound=bound(pod), began=state["startedAt"], ended=state["finishedAt"], split=word.timeSplit)


def bound(pod: Raw) -> str:
    conditions = pod["status"]["conditions"]
    return str(next(c["lastTransitionTime"] for c in conditions if c["type"] == "PodScheduled"))


def share_of(cost: Raw) -> Decimal:
    return Decimal(1) / int(cost["nodes"][0]["gpus"])


def test_a_job_costs_what_its_times_say_to_the_cent(lab: Lab) -> None:
    lab.apply(lab.job())
    status = lab.wait_for_phase("Succeeded")
    cost, pod = status["cost"], times(lab.pods()[0])
    spent, use, boot = (Decimal(cost[name]) for name in ("spent", "use", "boot"))
    node = cost["nodes"][0]
    assert (node["instanceType"], node["capacityType"], node["used"]) == ("local.gpu", "Spot", 1)
    share = share_of(cost)
    assert spent == use and boot == Decimal(cost["idle"]) == 0, "its node was there before it"
    assert share * Decimal(cost["wholeNodes"]) == use
    run = dollars(pod.bound, pod.ended)
    assert run <= use / share <= run + Decimal("0.05"), "or the seconds until its end was seen"
    assert cost["state"] == "Estimated"
    assert [Decimal(attempt["spent"]) for attempt in status["attempts"]] == [spent]
    assert Decimal(cost["onDemandUse"]) == 3 * use


def test_the_time_of_a_job_is_what_its_trainer_measured_and_its_saving_follows(lab: Lab) -> None:
    lab.apply(lab.job())
    status = lab.wait_for_phase("Succeeded")
    goodput, cost, pod = status["goodput"], status["cost"], times(lab.pods()[0])
    parts = {name: Decimal(goodput[name]) for name in PARTS}
    started, ran = seconds(pod.bound, pod.began), seconds(pod.began, pod.ended)
    assert sum(parts.values()) == Decimal(goodput["wanted"]) == seconds(status["activeSince"], pod.ended)
    assert Decimal(goodput["allocated"]) == started + ran
    # Times of Kubernetes are whole seconds: if these are fewer than the trainer's, its report is scaled down.
    measured = Decimal(pod.split.total)
    scale = min(Decimal(1), ran / measured)
    assert measured <= ran + 1, "its process is in its container"
    for name, value in {"productive": pod.split.productive, "dataWait": pod.split.dataWait}.items():
        assert abs(parts[name] - Decimal(value) * scale) <= CENT, name
    assert abs(parts["startup"] - started - Decimal(pod.split.startup) * scale) <= CENT
    assert parts["productive"] >= 5 and parts["rollback"] == 0, "100 steps of 50 ms and more"
    ideal = share_of(cost) * (parts["productive"] + parts["dataWait"]) * ON_DEMAND_DOLLARS_PER_HOUR / 3600
    assert abs(Decimal(cost["onDemandIdeal"]) - ideal) <= CENT
    saving = 100 * (1 - Decimal(cost["spent"]) / Decimal(cost["onDemandIdeal"]))
    assert cost["saving"] == f"{saving:.1f}%"


def test_the_bill_of_a_reclaimed_job_is_divided_between_its_attempts(lab: Lab) -> None:
    lab.apply(lab.slow_job())
    lab.wait_for_step(40)
    first, first_bound = lab.node_of(), bound(lab.pods()[0])
    lab.cluster.reclaim(first, 40)
    status = lab.wait_for_phase("Succeeded", seconds=150)
    cost, goodput, attempts = status["cost"], status["goodput"], status["attempts"]
    second = times(lab.pods()[-1])
    share = share_of(cost)
    used = [seconds(first_bound, attempts[0]["ended"]), seconds(second.bound, second.ended)]
    overlap = max(Decimal(0), seconds(second.bound, attempts[0]["ended"]))
    assert Decimal(goodput["allocated"]) == sum(used)
    assert Decimal(goodput["wanted"]) == seconds(status["activeSince"], second.ended) + overlap
    assert sum(Decimal(goodput[name]) for name in PARTS) == Decimal(goodput["wanted"])
    assert Decimal(goodput["productive"]) >= 10 and Decimal(goodput["rollback"]) < 1, "it had saved"
    spent = [Decimal(attempt["spent"]) for attempt in attempts]
    assert sum(spent) == Decimal(cost["spent"])
    assert spent[1] == Decimal(attempts[1]["useSeconds"]) * DOLLARS_PER_HOUR / 3600
    paid_first = share * Decimal(sum(used[:1])) * DOLLARS_PER_HOUR / 3600
    refunded = Decimal(cost["refunded"])
    assert spent[0] == 0 < refunded or spent[0] >= paid_first, "an hour old, or not billed by AWS"
    for attempt, time in zip(attempts, used, strict=True):
        assert 0 <= Decimal(attempt["useSeconds"]) / share - time <= 5
    assert Decimal(cost["onDemandUse"]) == 3 * Decimal(cost["use"])
    saving = 100 * (1 - Decimal(cost["spent"]) / Decimal(cost["onDemandIdeal"]))
    assert cost["saving"] == f"{saving:.1f}%"
