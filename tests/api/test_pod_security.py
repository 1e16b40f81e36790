"""Pod Security admission on the real API server: a restricted namespace admits our pods, but no agent."""

from __future__ import annotations

import pytest

from tests.api.kube import Json, Kube, Refused
from tests.support.helm import Object, render

SPACE = "restricted"


@pytest.fixture(scope="module")
def restricted(kube: Kube) -> Kube:
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE, "labels": labels}})
    accounts = f"/api/v1/namespaces/{SPACE}/serviceaccounts"
    for item in render("priceJob.enabled=true"):
        if item["kind"] == "ServiceAccount":
            kube.call("POST", accounts, {"metadata": {"name": item["metadata"]["name"]}})
    return kube


def pods() -> dict[str, Json]:
    """The specs of all pods that the chart makes, by the name of their container."""

    def spec(item: Object) -> Json | None:
        if item["kind"] == "Pod":
            found: Json = item["spec"]
        elif item["kind"] == "CronJob":
            found = item["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        elif item["kind"] in ("Deployment", "DaemonSet", "Job"):
            found = item["spec"]["template"]["spec"]
        else:
            return None
        # The class is made by a cluster's controllers, and is no matter of security.
        return {k: v for k, v in found.items() if k != "priorityClassName"}

    specs = [found for item in render("priceJob.enabled=true") if (found := spec(item))]
    return {found["containers"][0]["name"]: found for found in specs}


def admit(kube: Kube, name: str, spec: Json) -> None:
    body = {"metadata": {"name": f"{name}-dry"}, "spec": spec | {"restartPolicy": "Never"}}
    kube.call("POST", f"/api/v1/namespaces/{SPACE}/pods?dryRun=All&fieldValidation=Strict", body)


@pytest.mark.parametrize("name", ["operator", "price-job", "uninstall", "test"])
def test_our_pods_pass_the_level_restricted(restricted: Kube, name: str) -> None:
    admit(restricted, name, pods()[name])


def test_the_agent_breaks_it_by_the_nodes_network_alone(restricted: Kube) -> None:
    assert pods().keys() == {"operator", "agent", "price-job", "uninstall", "test"}
    agent = pods()["agent"]
    with pytest.raises(Refused, match="violates PodSecurity") as refused:
        admit(restricted, "agent", agent)
    reasons = str(refused.value).partition('violates PodSecurity "restricted:latest": ')[2]
    assert reasons == "host namespaces (hostNetwork=true)"
    admit(restricted, "agent", {k: v for k, v in agent.items() if k != "hostNetwork"})
