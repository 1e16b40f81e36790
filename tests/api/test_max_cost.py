"""capacity.maxCost on a real API server: the job is stopped in time, and goes on when the limit is raised."""

from __future__ import annotations

import json
import time
from dataclasses import replace
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
        scene.create(capacity={"maxCost": 2.5})
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
        assert "capacity.maxCost (2.5 US dollars)" in found["message"]
        assert scene.status()["phase"] == "Suspended" and scene.status()["knownDurableStep"] == 40
        assert scene.counters() == (1, 0, 0), "nothing is charged"
        assert Decimal(scene.status()["cost"]["spent"]) >= Decimal("2.5")
        assert scene.raw()["spec"]["suspend"] is False, "what GitOps wrote stays as it is"
        time.sleep(1)  # nothing comes by itself
        assert scene.counters() == (1, 0, 0) and not scene.pod(2)
        scene.change(capacity={"maxCost": "4000"})
        scene.wait_attempt(2)
        scene.wait_condition("Suspended", "False", "Resumed")
        events = kube.call("GET", f"/api/v1/namespaces/{namespace}/events")["items"]
        said = [e["type"] for e in events if e["reason"] == "MaxCostReached"]
        assert said == ["Warning"], "once"


@pytest.mark.parametrize("value", [-1, 0, 10**12, "1" * 21, "1." + "0" * 19], ids=str)
def test_the_api_server_refuses_what_is_out_of_bounds(kube: Kube, value: object) -> None:
    with pytest.raises(Refused, match=r"spec\.capacity\.maxCost"):
        kube.create_job("default", job_body("limited", capacity={"maxCost": value}), query="dryRun=All")


NO_SUMS = (
    *(True, {"usd": 3}, 0.001, 1e-300),
    *("-3", "3 dollars", "", "NaN", "1e200000000", "1e99999999999999", "1e-100000000"),
)


def test_what_is_no_sum_of_money_is_said_to_be_wrong_and_other_jobs_go_on(kube: Kube, scene: Scene) -> None:
    wrong = [replace(scene, job=f"{scene.job}-{number}") for number in range(len(NO_SUMS))]
    for job, value in zip(wrong, NO_SUMS, strict=True):
        job.create(capacity={"maxCost": value})
    scene.create()
    scene.wait_attempt(1)
    for job, value in zip(wrong, NO_SUMS, strict=True):
        found = job.wait_condition("Accepted", "False", "InvalidSpec")
        assert "spec.capacity.maxCost" in found["message"] and not job.pods(), value
        assert len(found["message"]) < 300, value


@pytest.mark.parametrize(
    "value", [120, "120", 35.5, "35.50", "0.01", 0.01, 10**9 - 1, "999999999.9999999999"], ids=str
)
def test_numbers_and_decimal_strings_are_accepted(kube: Kube, value: object) -> None:
    body = job_body("limited", capacity={"maxCost": value})
    kept = kube.create_job("default", body, query="fieldValidation=Strict&dryRun=All")
    assert kept["spec"]["capacity"]["maxCost"] == value
