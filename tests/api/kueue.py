"""Kueue as a test plays it: two small definitions of its API's names, and a status as the real one writes it.

They are not Kueue's definitions: any field is accepted, and nothing of its validation happens. The real Kueue
is tried in tests/kueue.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from tests.api.kube import MERGE, Json, Kube, Refused, wait_for

GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
ROOT = f"/apis/{GROUP}/{VERSION}"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def install(kube: Kube) -> None:
    """Serves Workload and ResourceFlavor, with any fields."""
    for plural, kind, scope in (
        ("workloads", "Workload", "Namespaced"),
        ("resourceflavors", "ResourceFlavor", "Cluster"),
    ):
        kube.call("POST", DEFINITIONS, _definition(plural, kind, scope))
    wait_for("Kueue's definitions to be served", lambda: _served(kube))


def remove(kube: Kube) -> None:
    for plural in ("workloads", "resourceflavors"):
        kube.call("DELETE", f"{DEFINITIONS}/{plural}.{GROUP}")
    wait_for("Kueue's definitions to go", lambda: not kube.answers(f"{ROOT}/workloads"))


def _served(kube: Kube) -> bool:
    return all(kube.answers(f"{ROOT}/{plural}") for plural in ("workloads", "resourceflavors"))


def _definition(plural: str, kind: str, scope: str) -> Json:
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": VERSION, "served": True, "storage": True, "schema": schema}
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": names,
            "scope": scope,
            "versions": [version | {"subresources": {"status": {}}}],
        },
    }


@dataclass(frozen=True, kw_only=True)
class Queues:
    """What Kueue does with the Workloads of a namespace."""

    kube: Kube
    namespace: str

    def make_flavor(self, name: str, labels: dict[str, str], tolerations: list[Json]) -> None:
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "ResourceFlavor", "metadata": {"name": name}}
        spec = {"nodeLabels": labels, "tolerations": tolerations}
        self.kube.call("POST", f"{ROOT}/resourceflavors", body | {"spec": spec})

    def of(self, job: str) -> Json | None:
        """The job's Workload."""
        items = self.kube.call("GET", f"{ROOT}/namespaces/{self.namespace}/workloads")["items"]
        return next((w for w in items if w["metadata"]["ownerReferences"][0]["name"] == job), None)

    def wait(self, job: str) -> Json:
        workload: Json = wait_for(f"the Workload of {job}", lambda: self.of(job))
        return workload

    def conditions(self, job: str) -> dict[str, str]:
        status = self.wait(job).get("status", {})
        return {c["type"]: f"{c['status']} {c['reason']}" for c in status.get("conditions", ())}

    def keep_waiting(self, job: str, message: str) -> None:
        self._say(job, {"QuotaReserved": ("False", "Pending", message)})

    def admit(self, job: str, flavor: str) -> None:
        workload = self.wait(job)
        count = workload["spec"]["podSets"][0]["count"]
        assignment = {"name": "main", "flavors": {"cpu": flavor}, "count": count}
        admission = {"clusterQueue": "all", "podSetAssignments": [assignment]}
        said = {"QuotaReserved": ("True", "QuotaReserved", ""), "Admitted": ("True", "Admitted", "")}
        if "Evicted" in self.conditions(job):
            said["Evicted"] = ("False", "QuotaReserved", "")
        self._say(job, said, admission=admission)

    def evict(self, job: str, message: str) -> None:
        self._say(job, {"Evicted": ("True", "Preempted", message)})

    def _say(self, job: str, said: dict[str, tuple[str, str, str]], **status: Any) -> None:
        """Writes the status; after a write of the operator in between it does so again, as Kueue does."""

        def written() -> bool:
            try:
                self._say_once(job, said, status)
            except Refused as refused:
                if refused.status != HTTPStatus.CONFLICT:
                    raise
                return False
            return True

        wait_for("the status of the Workload to be written", written)

    def _say_once(self, job: str, said: dict[str, tuple[str, str, str]], status: Json) -> None:
        workload = self.wait(job)
        known = {c["type"]: c for c in workload.get("status", {}).get("conditions", ())}
        for kind, (value, reason, message) in said.items():
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            words = {"type": kind, "status": value, "reason": reason, "message": message}
            known[kind] = words | {"lastTransitionTime": now}
        meta = {"resourceVersion": workload["metadata"]["resourceVersion"]}
        patch = {"metadata": meta, "status": status | {"conditions": list(known.values())}}
        path = f"{ROOT}/namespaces/{self.namespace}/workloads/{workload['metadata']['name']}/status"
        self.kube.call("PATCH", path, patch, kind=MERGE)
