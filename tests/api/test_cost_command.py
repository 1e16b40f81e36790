"""`spottrain cost` with the real kubectl, of jobs whose status a real API server checks by the CRD."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from localcluster import layout
from localcluster.apiserver import ApiServer
from spottrain.contract import Outcome, TerminationMessage, TimeSplit
from spottrain_cli.jobs import BUCKETS

from tests.api.kube import MERGE, Json, Kube, jobs, wait_for
from tests.api.scene import OperatorProcess, Scene, job_body
from tests.api.test_costs import LABELS, add_node, open_nodes
from tests.support.costs import COST, ENDED

Ran = subprocess.CompletedProcess[str]


@pytest.fixture
def command(server: ApiServer) -> Any:
    path = f"{layout.default_paths().bin}{os.pathsep}{os.environ['PATH']}"

    def run(*words: str) -> Ran:
        line = [sys.executable, "-m", "spottrain", "cost", "--kubeconfig", str(server.kubeconfig), *words]
        env = os.environ | {"PATH": path}
        return subprocess.run(line, env=env, capture_output=True, text=True, timeout=120, check=False)

    return run


def put(kube: Kube, namespace: str, name: str, status: Json, *, team: str = "") -> None:
    kube.create_job(namespace, job_body(name))
    if team:
        labels = {"metadata": {"labels": {"spottrain.io/team": team}}}
        kube.call("PATCH", jobs(namespace, name), labels, kind=MERGE)
    path = f"{jobs(namespace, name)}/status?fieldValidation=Strict"
    kube.call("PATCH", path, {"status": status}, kind=MERGE)


def test_a_job_s_report_has_the_figures_that_the_api_server_keeps(
    kube: Kube, namespace: str, command: Any
) -> None:
    put(kube, namespace, "gpt", ENDED)
    ran: Ran = command("gpt", "-n", namespace)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"gpt in namespace {namespace}: Succeeded, 2 attempts, 1 interruption\n")
    for figure in ("$12.70", "86.2", "62.0 % = 1 - $12.70 / $33.40"):
        assert figure in ran.stdout
    facts = json.loads(command("gpt", "-n", namespace, "-o", "json").stdout)
    assert facts["cost"]["spent"] == 12.7 and facts["goodput"]["paid"] == 86.9
    assert [each["lostSteps"] for each in facts["attempts"]] == [12, 0]


def test_a_namespace_and_all_of_them_are_summed_by_team(kube: Kube, namespace: str, command: Any) -> None:
    put(kube, namespace, "known", ENDED, team="vision")
    unknown = COST | {"unknownSeconds": "3600"}
    put(kube, namespace, "unknown", ENDED | {"cost": unknown}, team="audio")
    said = command("--namespace", namespace).stdout.splitlines()
    assert "2 jobs: at least $25.40, 1.00 node-hours without a price" in said
    assert "  team vision, 1 job: $12.70" in said
    everywhere = json.loads(command("--all-namespaces", "-o", "json").stdout)
    assert {"known", "unknown"} <= {
        job["name"] for job in everywhere["jobs"] if job["namespace"] == namespace
    }


def test_a_namespace_without_jobs_says_so(namespace: str, command: Any) -> None:
    assert command("-n", namespace).stdout == f"There is no TrainingJob in namespace {namespace}.\n"


# --- figures of the operator ----------------------------------------------------------------------------
TYPE = LABELS["node.kubernetes.io/instance-type"]
PRICES = [
    {"instanceType": TYPE, "capacityType": "Spot", "usdPerHour": 3600},
    {"instanceType": TYPE, "capacityType": "OnDemand", "usdPerHour": 144000},
]
"""A dollar a second, and forty."""


def word(outcome: Outcome, split: TimeSplit, **more: Any) -> str:
    return TerminationMessage(outcome=outcome, timeSplit=split, **more).to_json()


def run_job(scene: Scene, kube: Kube) -> None:
    """Two attempts on one node: the first is interrupted and loses half of its work, the second is done."""
    scene.create()
    node = add_node(scene, kube)["metadata"]["name"]
    first = scene.wait_attempt(1)
    scene.bind(first, node)
    wait_started(scene, 1)
    time.sleep(1.1)  # times of the API server are whole seconds
    lost = TimeSplit(startup=0.5, productive=0.5, unsaved=0.25)
    scene.end(first, 79, word(Outcome.INTERRUPTED_LOST, lost, step=9, durableStep=7))
    second = scene.wait_attempt(2)
    scene.bind(second, node)
    wait_started(scene, 2)
    time.sleep(1.1)
    done = TimeSplit(productive=0.5, dataWait=0.25)
    scene.end(second, 0, word(Outcome.DONE, done, step=20, durableStep=20))
    kube.call("DELETE", f"/api/v1/nodes/{node}")
    scene.wait_condition("Succeeded", "True")
    wait_for("the end of the node", lambda: not open_nodes(scene))


def wait_started(scene: Scene, number: int) -> None:
    """The operator has seen when the trainer started; its end, here, comes with another time."""
    wait_for(f"the start of attempt {number}", lambda: scene.condition("Running").get("status") == "True")


def test_the_report_of_a_job_that_the_operator_ran_adds_up(
    kube: Kube, server: ApiServer, namespace: str, tmp_path: Path, command: Any
) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(PRICES))
    with OperatorProcess(
        kubeconfig=server.kubeconfig, namespace=namespace, price_file=str(prices)
    ) as operator:
        operator.wait_ready()
        run_job(Scene(kube=kube, namespace=namespace, job="ran"), kube)
    facts = json.loads(command("ran", "-n", namespace, "-o", "json").stdout)
    spent, parts = facts["cost"], facts["goodput"]
    assert spent["known"] and spent["spent"] == spent["use"] + spent["boot"] + spent["idle"]
    assert spent["spent"] >= 2, "a dollar a second, of both attempts"
    assert sum(each["spent"] for each in facts["attempts"]) == pytest.approx(spent["spent"])
    assert sum(parts[name] for name in BUCKETS) == pytest.approx(parts["wanted"])
    assert (parts["productive"], parts["dataWait"]) == (0.75, 0.25) and parts["rollback"] >= 0.25
    assert spent["onDemandIdeal"] == 40.0, "the second that a run without interruptions has too"
    assert spent["saving"] == pytest.approx(100 * (1 - spent["spent"] / 40), abs=0.0501), "one digit"
    assert [each["lostSteps"] for each in facts["attempts"]] == [2, 0]
    text = command("ran", "-n", namespace).stdout
    assert f"= 1 - ${spent['spent']:.2f} / $40.00" in text and "do not add up" not in text
