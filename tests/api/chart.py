"""The chart's accounts, roles, policies and FlowSchema on the API server, and a kubeconfig for an account.

Used by the tests of this folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.api.kube import APPLY, Kube, Refused
from tests.support.helm import NAMESPACE, Object, render

ADMISSION, RBAC = "/apis/admissionregistration.k8s.io/v1", "/apis/rbac.authorization.k8s.io/v1"
FLOWCONTROL = "/apis/flowcontrol.apiserver.k8s.io/v1"
CLUSTER = {
    "ValidatingAdmissionPolicy": f"{ADMISSION}/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": f"{ADMISSION}/validatingadmissionpolicybindings",
    "FlowSchema": f"{FLOWCONTROL}/flowschemas",
    "ClusterRole": f"{RBAC}/clusterroles",
    "ClusterRoleBinding": f"{RBAC}/clusterrolebindings",
}
NAMESPACED = {
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "Role": (RBAC, "roles"),
    "RoleBinding": (RBAC, "rolebindings"),
}
OPERATOR = f"system:serviceaccount:{NAMESPACE}:spottrain-operator"


def apply(kube: Kube, item: Object) -> None:
    """Applies an object of a kind above; others are left out."""
    meta = item["metadata"]
    if item["kind"] in CLUSTER:
        path = CLUSTER[item["kind"]]
    elif item["kind"] in NAMESPACED:
        root, plural = NAMESPACED[item["kind"]]
        path = f"{root}/namespaces/{meta.get('namespace', NAMESPACE)}/{plural}"
    else:
        return
    kube.call("PATCH", f"{path}/{meta['name']}?fieldManager=tests&force=true", item, kind=APPLY)


def install(kube: Kube, component: str, *settings: str, release: str = "spottrain") -> None:
    """Applies what the chart renders for a component, such as "operator": accounts, roles and policies."""
    try:
        kube.make_namespace(NAMESPACE)
    except Refused as refused:
        assert refused.status == 409, refused
    for item in render(*settings, release=release):
        if item["metadata"].get("labels", {}).get("app.kubernetes.io/component") == component:
            apply(kube, item)


def kubeconfig(kube: Kube, admin: Path, name: str, folder: Path) -> Path:
    """Returns a kubeconfig with a token of a service account, as its pod would have it."""
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 7200},
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{name}/token"
    token = kube.call("POST", path, request)["status"]["token"]
    config: dict[str, Any] = yaml.safe_load(admin.read_text())
    config["users"][0]["user"] = {"token": token}
    written = folder / f"{name}.kubeconfig"
    written.write_text(yaml.safe_dump(config))
    return written
