"""`spottrain doctor` with the real kubectl, of a real API server with what the chart installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from localcluster import layout
from localcluster.apiserver import ApiServer

from tests.api import chart
from tests.api.kube import APPLY, MERGE, Json, Kube, jobs
from tests.api.scene import job_body
from tests.support.helm import NAMESPACE, render

READY = {
    "Deployment": {"replicas": 2, "availableReplicas": 2, "readyReplicas": 2},
    "DaemonSet": {
        "currentNumberScheduled": 0, "numberMisscheduled": 0, "desiredNumberScheduled": 0, "numberReady": 0,
    },
}  # fmt: skip

FOLDER = {"checkpoint": {"uri": "file:///mnt/run"}}
"""Of the pods, which the doctor does not try from here."""


@pytest.fixture(scope="module")
def installed(kube: Kube) -> Kube:
    """With operator and agent of the chart, whose status a test writes, as no controller runs."""
    chart.install(kube, "operator")
    for item in render('jobDefaults={"checkpointPrefix": "file:///mnt/shared", "credentialsSecret": "s3"}'):
        if item["kind"] in READY:
            plural, name = f"{item['kind'].lower()}s", item["metadata"]["name"]
            path = f"/apis/apps/v1/namespaces/{item['metadata'].get('namespace', NAMESPACE)}/{plural}/{name}"
            kube.call("PATCH", f"{path}?fieldManager=tests&force=true", item, kind=APPLY)
            kube.call("PATCH", f"{path}/status", {"status": READY[item["kind"]]}, kind=MERGE)
    return kube


@pytest.fixture
def doctor(server: ApiServer, tmp_path: Path) -> Any:
    path = f"{layout.default_paths().bin}{os.pathsep}{os.environ['PATH']}"

    def run(*words: str, kubeconfig: Path = server.kubeconfig) -> tuple[int, dict[str, list[Json]], str]:
        line = [
            sys.executable,
            "-m",
            "spottrain",
            "doctor",
            f"--kubeconfig={kubeconfig}",
            "-o",
            "json",
            *words,
        ]
        env = os.environ | {"PATH": path}
        ran = subprocess.run(
            line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        found: dict[str, list[Json]] = {}
        for each in json.loads(ran.stdout)["findings"] if ran.stdout else []:
            found.setdefault(each["subject"], []).append(each)
        return ran.returncode, found, ran.stderr

    return run


def levels(found: dict[str, list[Json]]) -> dict[str, str]:
    return {subject: " ".join(each["level"] for each in all_) for subject, all_ in found.items()}


def test_an_installed_cluster_is_well(installed: Kube, namespace: str, doctor: Any) -> None:
    secret = {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "s3"}}
    installed.call("POST", f"/api/v1/namespaces/{namespace}/secrets", secret)
    code, found, said = doctor("-n", namespace)
    assert (code, said) == (0, "")
    assert levels(found) == {
        "cluster": "ok", "definition": "ok", "rights": "ok", "operator": "ok", "agents": "ok", "GPUs": "warn",
        "credentials": "ok", "store": "ok",
    }  # fmt: skip


def test_a_manifest_is_tried_by_the_api_server_and_is_not_created(
    installed: Kube, namespace: str, doctor: Any, tmp_path: Path
) -> None:
    body = {"apiVersion": "spottrain.io/v1alpha1", "kind": "TrainingJob", **job_body("draft", **FOLDER)}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(body))
    _, found, _ = doctor("-n", namespace, "job.yaml")
    assert levels(found)["manifest"] == "ok" and "job" not in found
    assert installed.get(jobs(namespace, "draft")) is None
    body["spec"]["workers"] = -1
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(body))
    code, found, _ = doctor("-n", namespace, "job.yaml")
    assert code == 1 and "spec.workers" in found["manifest"][0]["text"]


def test_a_job_that_no_operator_has_seen_by_an_account_without_rights(
    installed: Kube, server: ApiServer, namespace: str, doctor: Any, tmp_path: Path
) -> None:
    installed.create_job(namespace, job_body("bert", **FOLDER))
    account = chart.kubeconfig(installed, server.kubeconfig, "spottrain-operator", tmp_path)
    code, found, said = doctor(f"{namespace}/bert", kubeconfig=account)
    assert (code, said) == (1, "") and levels(found)["job"] == "fail"
    assert levels(found)["rights"] == "fail" and "create trainingjobs" in found["rights"][0]["text"]
    assert levels(found)["operator"] == "warn" and "agents" not in found, "it may not list Deployments"
