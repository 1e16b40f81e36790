"""The chart's admission policies on the real API server: a broken-into agent harms its own node alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api import chart
from tests.api.kube import MERGE, Json, Kube, Refused, wait_for

ACCOUNT = "system:serviceaccount:spottrain-system:spottrain-agent"
OURS = {"spottrain.io/termination-deadline": "2026-01-01T00:00:00Z"}
ADVISED = {"spottrain.io/save-advised": "2026-01-01T00:00:00.000000Z"}
GPU = {"key": "gpu", "value": "x", "effect": "NoSchedule"}
TAINT = {"key": "spottrain.io/terminating", "value": "1", "effect": "NoSchedule"}


def agent(node: str) -> dict[str, str]:
    """Who the API server takes the caller for: what a token bound to an agent's pod says."""
    extra = "Impersonate-Extra-authentication.kubernetes.io%2Fnode-name"
    groups = "system:serviceaccounts"
    return {"Impersonate-User": ACCOUNT, "Impersonate-Group": groups, extra: node}


def patch(kube: Kube, path: str, body: Json, *, node: str) -> Json:
    return kube.call("PATCH", path, body, kind=MERGE, headers=agent(node))


@pytest.fixture(scope="module")
def guarded(kube: Kube) -> Kube:
    """The API server with the agent's role and policies, two nodes, and a trainer on each."""
    chart.install(kube, "agent")
    kube.make_namespace("guarded")
    for node in ("own", "other"):
        taints: Any = {"taints": [GPU]}
        kube.call("POST", "/api/v1/nodes", {"metadata": {"name": node}, "spec": taints})
        kube.call("POST", "/api/v1/namespaces/guarded/pods", trainer(node))
    wait_for("the policies to be in force", lambda: _refused(kube, "/api/v1/nodes/other"))
    return kube


def trainer(node: str) -> Json:
    safe = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {"name": "trainer", "image": "x:1", "securityContext": safe}
    spec = {"nodeName": node, "tolerations": [{"operator": "Exists"}], "containers": [container]}
    return {"metadata": {"name": f"on-{node}"}, "spec": spec}


def _refused(kube: Kube, path: str) -> bool:
    try:
        patch(kube, path, {"metadata": {"annotations": OURS}}, node="own")
    except Refused as refused:
        return "own node" in str(refused)
    return False


OWN, OTHER = "/api/v1/nodes/own", "/api/v1/nodes/other"
OWN_POD, OTHER_POD = "/api/v1/namespaces/guarded/pods/on-own", "/api/v1/namespaces/guarded/pods/on-other"


@pytest.mark.parametrize("path", [OWN, OWN_POD])
def test_an_agent_may_announce_the_end_of_its_own_node_and_of_the_pods_there(
    guarded: Kube, path: str
) -> None:
    told = patch(guarded, path, {"metadata": {"annotations": OURS}}, node="own")
    assert told["metadata"]["annotations"].items() >= OURS.items()


def test_an_agent_may_advise_a_save_on_its_own_node_and_take_it_back(guarded: Kube) -> None:
    told = patch(guarded, OWN, {"metadata": {"annotations": ADVISED}}, node="own")
    assert told["metadata"]["annotations"].items() >= ADVISED.items()
    gone = patch(guarded, OWN, {"metadata": {"annotations": dict.fromkeys(ADVISED)}}, node="own")
    assert ADVISED.keys().isdisjoint(gone["metadata"].get("annotations", {}))


def test_an_agent_may_list_the_trainers_of_its_node_and_no_other_kind(guarded: Kube) -> None:
    query = "fieldSelector=spec.nodeName%3Down"
    listed = guarded.call("GET", f"/api/v1/pods?{query}", headers=agent("own"))
    assert [pod["metadata"]["name"] for pod in listed["items"]] == ["on-own"]
    for path in ("/api/v1/secrets", "/api/v1/configmaps", "/api/v1/nodes"):
        with pytest.raises(Refused) as refused:
            guarded.call("GET", path, headers=agent("own"))
        assert refused.value.status == 403


def test_an_agent_may_taint_its_own_node_and_take_the_taint_off(guarded: Kube) -> None:
    there = guarded.call("GET", OWN)["spec"]["taints"]  # ours, and what the API server puts on a new node
    for taints in ([*there, TAINT], there):
        assert patch(guarded, OWN, {"spec": {"taints": taints}}, node="own")["spec"]["taints"] == taints


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (OTHER, {"metadata": {"annotations": OURS}}),
        (OTHER_POD, {"metadata": {"annotations": OURS}}),
        (OTHER, {"metadata": {"annotations": ADVISED}}),
        (OWN, {"metadata": {"annotations": {"theirs": "1"}}}),
        (OWN, {"metadata": {"labels": {"x": "1"}}}),
        (OWN, {"spec": {"unschedulable": True}}),
        (OWN, {"spec": {"taints": []}}),
        (OWN_POD, {"metadata": {"annotations": {"spottrain.io/trainer-container": "sidecar"}}}),
        (OWN_POD, {"metadata": {"labels": {"x": "1"}}}),
        (OWN_POD, {"metadata": {"finalizers": ["theirs.io/x"]}}),
        (OWN_POD, {"spec": {"activeDeadlineSeconds": 1}}),
    ],
    ids=lambda value: str(value).rpartition("/")[2][:40],
)
def test_an_agent_may_change_nothing_else(guarded: Kube, path: str, body: Json) -> None:
    with pytest.raises(Refused, match="the notice agent may") as refused:
        patch(guarded, path, body, node="own")
    assert refused.value.status == 403
