"""A status that a newer operator and a newer definition have written, and the rollback of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from localcluster.apiserver import ApiServer
from spottrain_operator.control.apply import UNDECLARED
from spottrain_operator.names import API_VERSION, FIELD_MANAGER, KIND

from tests.api.conftest import CRD
from tests.api.kube import APPLY, Json, Kube, Refused, jobs, wait_for
from tests.api.scene import OperatorProcess, Scene

CONDITION = {
    "type": "EnergyKept",
    "status": "True",
    "reason": "Below",
    "message": "as a newer version says it",
}
SINCE = {"lastTransitionTime": "2026-03-01T12:00:00Z"}


@pytest.fixture
def newer(kube: Kube, tmp_path: Path) -> Iterator[None]:
    body = yaml.safe_load(CRD.read_text())
    status = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    status["energy"] = {"type": "object", "properties": {"joules": {"type": "string"}}}
    status["attempts"]["items"]["properties"]["energyJoules"] = {"type": "string"}
    path = tmp_path / "newer.yaml"
    path.write_text(yaml.safe_dump(body))
    kube.install(path)
    yield
    kube.install(CRD)


def write(scene: Scene, status: Json) -> Json:
    """As the newer operator, which has the same field manager."""
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": scene.job}, "status": status}
    path = f"{jobs(scene.namespace, scene.job)}/status?fieldManager={FIELD_MANAGER}&force=true"
    return scene.kube.call("PATCH", path, body, kind=APPLY)


def as_newer(scene: Scene) -> bool:
    """Writes the newer fields; False while the definition that has them is not served yet."""
    status = scene.status()
    status["energy"] = {"joules": "12"}
    status["attempts"][0]["energyJoules"] = "7"
    status["conditions"].append(CONDITION | SINCE)
    try:
        return "energy" in write(scene, status)["status"]
    except Refused as refused:
        assert refused.status == 409 or UNDECLARED in str(refused), refused
        return False


@pytest.mark.usefixtures("newer")
def test_fields_and_conditions_of_a_newer_version_survive_but_for_those_of_attempts(
    kube: Kube, server: ApiServer, namespace: str
) -> None:
    """Nor do they go with its definition: this one keeps unknown fields, for the sake of what 0.3 wrote."""
    scene = Scene(kube=kube, namespace=namespace, job="job")
    with OperatorProcess(kubeconfig=server.kubeconfig, namespace=namespace) as operator:
        operator.wait_ready()
        first = scene.run()
        scene.wait_condition("Running", "True")
        wait_for("the newer fields to be written", lambda: as_newer(scene))
        scene.end(first, 137)
        second = scene.wait_attempt(2)
        assert scene.status()["energy"] == {"joules": "12"} and scene.status()["attempts"][0]["cause"]
        assert CONDITION.items() <= scene.condition("EnergyKept").items()
        kube.install(CRD)
        scene.bind(second)
        scene.wait_condition("Running", "True")
        scene.end(second, 137)
        scene.wait_attempt(3)
        assert scene.condition("EnergyKept")["status"] == "True"
