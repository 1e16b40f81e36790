"""Helm on a real API server: the release of 0.3.0 is upgraded with a job running, by Helm 3 and by Helm 4.

`helm3` is built when it is missing (minutes, once).
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from localcluster.apiserver import ApiServer, api_server, ensure_programs
from localcluster.layout import default_paths
from spottrain.contract import Outcome
from spottrain_operator.names import (
    API_VERSION,
    ATTEMPT_LABEL,
    FIELD_MANAGER,
    GROUP,
    JOB_LABEL,
    JOB_UID_LABEL,
    KIND,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    OUTCOME_FINALIZER,
    PLURAL,
    RANK_LABEL,
    ROLE_LABEL,
    ROLE_TRAINER,
    TRAINER_ANNOTATION,
)

from tests.api import chart
from tests.api.kube import APPLY, Json, Kube, jobs, wait_for
from tests.api.scene import OperatorProcess, Scene
from tests.builders import word
from tests.support import optional
from tests.support.helm import CHART, KUBERNETES, NAMESPACE, Object

OLD = Path(__file__).with_name("spottrain-0.3.0.tgz")
"""`helm package` of charts/spottrain as of 0.3.0."""
CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    with optional.built():
        ensure_programs(default_paths(), frozenset({"helm", "helm3"}))


def run(program: str, *words: str | Path) -> str:
    command = [default_paths().bin / program, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.stderr}"
    return done.stdout


@pytest.fixture
def fresh() -> Iterator[ApiServer]:
    """An API server of its own: what Helm finds there must be Helm's."""
    with api_server() as server:
        yield server


def started_by_0_3_0(scene: Scene) -> Json:
    """A job with a pod that runs, as the operator of 0.3.0 wrote both."""
    job = scene.create(capacity={"maxCost": 120})["metadata"]
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": "job", "uid": job["uid"], "controller": True}
    labels = {JOB_LABEL: "job", JOB_UID_LABEL: job["uid"], ATTEMPT_LABEL: "1", RANK_LABEL: "0"}
    meta = {
        "name": f"job-{hashlib.sha256(job['uid'].encode()).hexdigest()[:8]}-1-0",
        "labels": labels | {MANAGED_BY_LABEL: MANAGED_BY, ROLE_LABEL: ROLE_TRAINER},
        "annotations": {TRAINER_ANNOTATION: "trainer"},
        "finalizers": [OUTCOME_FINALIZER],
        "ownerReferences": [owner | {"blockOwnerDeletion": True}],
    }
    spec = scene.raw()["spec"]["template"]["spec"] | {"restartPolicy": "Never"}
    pod = scene.kube.call("POST", "/api/v1/namespaces/ml/pods", {"metadata": meta, "spec": spec})
    node = scene.bind(pod)
    now = job["creationTimestamp"]
    conditions = [
        {"type": kind, "status": "True", "reason": reason, "message": "-", "lastTransitionTime": now}
        for kind, reason in (("Accepted", "Valid"), ("Scheduled", "Bound"), ("Running", "WaitingForRuntime"))
    ]
    attempt = {"number": 1, "pod": meta["name"], "node": node, "started": now}
    attempt |= {"pool": "default", "capacityType": "Spot", "platform": "AWS", "workers": 1}
    status: Json = {"observedGeneration": 1, "attempt": 1, "failures": 0, "interruptions": 0}
    status |= {"attempts": [attempt], "conditions": conditions, "phase": "Running", "ready": "1/1"}
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "job"}, "status": status}
    path = f"{jobs('ml', 'job')}/status?fieldManager={FIELD_MANAGER}&force=true"
    scene.kube.call("PATCH", path, body, kind=APPLY)
    return pod


@pytest.mark.parametrize("upgrader", ["helm3", "helm"])
def test_an_upgrade_from_0_3_0_leaves_a_running_job_alone(
    fresh: ApiServer, upgrader: str, tmp_path: Path
) -> None:
    kube = Kube.from_kubeconfig(fresh.kubeconfig)
    release = ("spottrain", "--namespace", NAMESPACE, "--kubeconfig", fresh.kubeconfig)
    run(upgrader, "install", release[0], OLD, *release[1:], "--create-namespace")
    wait_for("the CRD to be served", lambda: (kube.get(CRD) or {}).get("status", {}).get("acceptedNames"))
    kube.make_namespace("ml")
    scene = Scene(kube=kube, namespace="ml", job="job")
    pod = started_by_0_3_0(scene)
    uid, generation = pod["metadata"]["uid"], scene.raw()["metadata"]["generation"]

    run(upgrader, "upgrade", release[0], CHART, *release[1:])
    crd = yaml.safe_load((CHART / "files" / "trainingjobs.yaml").read_text())
    names = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"].keys()
    served = kube.call("GET", CRD)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    assert served["spec"]["properties"].keys() == names, "the definition is upgraded too"
    account = chart.kubeconfig(kube, fresh.kubeconfig, "spottrain-operator", tmp_path)
    with OperatorProcess(kubeconfig=account, namespace="ml") as after:
        after.wait_ready()
        scene.change(failurePolicy={"maxFailures": 9})
        wait_for("the job to be looked at", lambda: scene.status()["observedGeneration"] > generation)
        assert scene.counters() == (1, 0, 0)
        assert "120" in scene.wait_condition("Accepted", "True", "PriceUnknown")["message"], (
            "the limit of 0.3 holds"
        )
        assert [p["metadata"]["uid"] for p in scene.pods()] == [uid]
        scene.end(pod, 0, word(Outcome.DONE))
        scene.wait_condition("Succeeded", "True")


def test_helm_3_renders_what_helm_4_renders() -> None:
    def order(body: Object) -> tuple[str, str]:
        return body["kind"], body["metadata"]["name"]

    def rendered(program: str) -> list[Object]:
        words = ("--namespace", NAMESPACE, *KUBERNETES)
        text = run(program, "template", "spottrain", CHART, *words)
        return sorted((body for body in yaml.load_all(text, yaml.CSafeLoader) if body), key=order)

    run("helm3", "lint", "--strict", *KUBERNETES, CHART)
    assert rendered("helm3") == rendered("helm")
