"""What a job costs on real nodes, beside a sum by hand."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal

from demo.target import LOCAL_DOLLARS_PER_HOUR

from tests.cluster.steps import Lab


def dollars(since: str, until: str) -> Decimal:
    begin, end = (datetime.fromisoformat(text) for text in (since, until))
    seconds = Decimal(int((end - begin).total_seconds()))
    return seconds * LOCAL_DOLLARS_PER_HOUR / 3600


def test_a_job_costs_what_its_times_say_to_the_cent(lab: Lab) -> None:
    lab.apply(lab.job())
    cost = lab.wait_for_phase("Succeeded")["cost"]
    pod = lab.pods()[0]["status"]
    bound = next(c["lastTransitionTime"] for c in pod["conditions"] if c["type"] == "PodScheduled")
    ended = pod["containerStatuses"][0]["state"]["terminated"]["finishedAt"]
    spent, use, boot = (Decimal(cost[name]) for name in ("spent", "use", "boot"))
    node = cost["nodes"][0]
    assert (node["instanceType"], node["capacityType"], node["used"]) == ("local.gpu", "Spot", 1)
    share = Decimal(1) / node["gpus"]
    assert spent == share * dollars(bound, cost["time"]) and boot == 0, "its node was there before it"
    assert Decimal(cost["wholeNodes"]) == dollars(bound, cost["time"])
    assert dollars(bound, ended) <= use / share <= dollars(bound, ended) + Decimal("0.05")
    assert cost["state"] == "Estimated"
