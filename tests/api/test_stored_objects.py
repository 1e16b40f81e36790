"""An object that was stored with a value that no longer exists is refused by a condition."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from localcluster.apiserver import ApiServer
from spottrain_operator.names import Condition, Reason

from tests.api.conftest import CRD
from tests.api.kube import APPLY, Json, Kube, Refused, wait_for
from tests.api.scene import OperatorProcess, Scene, job_body

OLD: Json = {"capacity": {"type": "spot"}}
"""As an older schema allowed it."""


def _permissive(schema: Any) -> Any:
    """The schema without what refuses values and fills in defaults."""
    if isinstance(schema, list):
        return [_permissive(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    dropped = ("x-kubernetes-validations", "enum", "default")
    return {name: _permissive(value) for name, value in schema.items() if name not in dropped}


@contextmanager
def _schema_that_accepts_anything(kube: Kube) -> Iterator[None]:
    body = copy.deepcopy(yaml.safe_load(CRD.read_text()))
    schema = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    schema["spec"] = _permissive(schema["spec"])
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{body['metadata']['name']}"
    try:
        kube.call("PATCH", f"{path}?fieldManager=tests&force=true", body, kind=APPLY)
        yield
    finally:
        kube.install(CRD)


def _create_once_accepted(kube: Kube, namespace: str, body: Json) -> None:
    """The API server takes a new schema a moment after it was PATCHed."""
    give_up = time.monotonic() + 30
    while True:
        try:
            kube.create_job(namespace, body)
            return
        except Refused:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)


def test_it_is_refused_by_name_until_it_is_rewritten(kube: Kube, server: ApiServer, namespace: str) -> None:
    body = job_body("old", **OLD)
    with pytest.raises(Refused) as refusal:
        kube.create_job(namespace, body)
    assert "spec.capacity.type: Unsupported value" in str(refusal.value)
    with _schema_that_accepts_anything(kube):
        _create_once_accepted(kube, namespace, body)
    scene = Scene(kube=kube, namespace=namespace, job="old")
    with OperatorProcess(kubeconfig=server.kubeconfig, namespace=namespace) as operator:
        operator.wait_ready()
        refused = scene.wait_condition(Condition.ACCEPTED, "False", Reason.INVALID_SPEC)
        assert "spec.capacity.type" in refused["message"] and "Spot" in refused["message"]
        assert scene.status()["phase"] == "Invalid" and not scene.pods()
        scene.change(capacity={"type": "Spot"})
        scene.wait_condition(Condition.ACCEPTED, "True")
        scene.wait_attempt(1)


def test_a_running_job_whose_stored_spec_cannot_be_read_any_more_is_told_of_its_nodes_end(
    kube: Kube, server: ApiServer, namespace: str
) -> None:
    scene = Scene(kube=kube, namespace=namespace, job="runs")
    with OperatorProcess(kubeconfig=server.kubeconfig, namespace=namespace) as operator:
        operator.wait_ready()
        scene.create()
        pod = scene.wait_attempt(1)
        node = scene.bind(pod)
        with _schema_that_accepts_anything(kube):
            wait_for("the schema to take any type", lambda: _changed(scene, **OLD))
        scene.wait_condition(Condition.ACCEPTED, "False", Reason.INVALID_SPEC)
        scene.give_notice(node)
        wait_for("its DELETE", lambda: "deletionTimestamp" in (scene.pod(1) or pod)["metadata"])
        scene.end(pod, 1)
        wait_for("its end to be counted", lambda: scene.counters() == (1, 0, 1))


def test_a_running_job_of_0_3_goes_on_with_its_deadline_and_its_limit_and_new_ones_are_refused(
    kube: Kube, server: ApiServer, namespace: str
) -> None:
    pools = [{"name": "a", "preset": "EKS"}, {"name": "b", "preset": "EKS", "type": "OnDemand"}]
    old = {"type": "Cheapest", "deadline": "2099-01-01T00:00:00Z", "maxCost": 120, "pools": pools}
    scene = Scene(kube=kube, namespace=namespace, job="runs")
    with pytest.raises(Refused, match=r"moved to capacity\.cheapest\.deadline"):
        scene.create(capacity=old)
    with _schema_that_accepts_anything(kube):
        _create_once_accepted(kube, namespace, job_body("runs", capacity=old))
    with OperatorProcess(kubeconfig=server.kubeconfig, namespace=namespace) as operator:
        operator.wait_ready()
        pod = scene.wait_attempt(1)
        assert pod["spec"]["nodeSelector"]["eks.amazonaws.com/capacityType"] == "SPOT"
        scene.bind(pod)
        scene.end(pod, 1)
        scene.wait_attempt(2)
        assert "(120)" in scene.wait_condition("Accepted", "True", "PriceUnknown")["message"]
        assert scene.condition("OnTime")["status"] == "Unknown", "it has a deadline"


def _changed(scene: Scene, **spec: Any) -> bool:
    try:
        scene.change(**spec)
    except Refused:
        return False
    return True
