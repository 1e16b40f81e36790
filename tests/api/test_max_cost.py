"""capacity.maxCostUSD on a real API server: the job is stopped in time, and goes on when it is raised."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from pathlib import Path

import pytest
from localcluster.apiserver import ApiServer
from spottrain.contract import Outcome

from tests.api.kube import Kube, Refused, wait_for
from tests.api.scene import OperatorProcess, Scene, job_body
from tests.api.test_costs import A_DOLLAR_A_SECOND, add_node
from tests.builders import word


def test_a_job_that_has_cost_its_limit_is_suspended_and_raised_it_goes_on_though_the_operator_is_killed(
    kube: Kube, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(A_DOLLAR_A_SECOND))
    with OperatorProcess(
        kubeconfig=server.kubeconfig, namespace=namespace, price_file=str(prices)
    ) as operator:
        operator.wait_ready()
        scene = Scene(kube=kube, namespace=namespace, job="limited")
        scene.create(capacity={"maxCostUSD": "2.5"})
        pod = scene.wait_attempt(1)
        scene.bind(pod, add_node(scene, kube)["metadata"]["name"])
        wait_for("the stop", lambda: "deletionTimestamp" in scene.pods()[0]["metadata"])
        (record,) = scene.status()["attempts"]
        assert record["stopping"] == "Suspended" and record["reason"] == "MaxCostReached"
        operator.kill()  # between the order to stop and the end
        scene.end(pod, 75, word(Outcome.INTERRUPTED, step=40, durableStep=40))
        operator.start()
        operator.wait_ready()
        found = scene.wait_condition("Suspended", "True", "MaxCostReached")
        assert "capacity.maxCostUSD (2.5)" in found["message"]
        assert scene.status()["phase"] == "Suspended" and scene.status()["knownDurableStep"] == 40
        assert scene.counters() == (1, 0, 0), "nothing is charged"
        assert Decimal(scene.status()["cost"]["spent"]) >= Decimal("2.5")
        assert scene.raw()["spec"]["suspend"] is False, "what GitOps wrote stays as it is"
        time.sleep(1)  # nothing comes by itself
        assert scene.counters() == (1, 0, 0) and not scene.pod(2)
        scene.change(capacity={"maxCostUSD": 4000})
        scene.wait_attempt(2)
        scene.wait_condition("Suspended", "False", "Resumed")
        events = kube.call("GET", f"/api/v1/namespaces/{namespace}/events")["items"]
        said = [e["type"] for e in events if e["reason"] == "MaxCostReached"]
        assert said == ["Warning"], "once"


NO_SUMS = (-1, 0, 10**9, 0.5, True, {"usd": 3}, "0", "-3", "3 dollars", "", "NaN", "1e20", "1.999", "1" * 10)


@pytest.mark.parametrize("value", NO_SUMS, ids=str)
def test_the_api_server_refuses_what_is_no_sum_of_dollars(kube: Kube, value: object) -> None:
    with pytest.raises(Refused, match=r"spec\.capacity\.maxCostUSD"):
        kube.create_job("default", job_body("limited", capacity={"maxCostUSD": value}), query="dryRun=All")


@pytest.mark.parametrize("value", [120, "120", "35.50", "0.01", 10**9 - 1, "999999999.99"], ids=str)
def test_whole_numbers_and_decimal_strings_are_accepted(kube: Kube, value: object) -> None:
    body = job_body("limited", capacity={"maxCostUSD": value})
    kept = kube.create_job("default", body, query="fieldValidation=Strict&dryRun=All")
    assert kept["spec"]["capacity"]["maxCostUSD"] == value
