"""What a test asks Karpenter for, and what it has done. Used by the tests of this folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from spottrain_operator.names import HOSTNAME_LABEL, ZONE_LABEL

from tests.api.kube import Json, Kube, wait_for
from tests.api.scene import Scene

NODE_CLASS: Final = "KWOKNodeClass"
POOL_LABEL: Final = "karpenter.sh/nodepool"
CAPACITY_LABEL: Final = "karpenter.sh/capacity-type"
DISRUPTED: Final = "karpenter.sh/disrupted"
_API: Final = "/apis/karpenter.sh/v1"
SCALING: Final = 120.0
"""Bound of a wait for nodes; 4 to 15 s are usual."""
DISRUPTING: Final = 240.0
"""Bound of a wait for Karpenter to disrupt a node: it looks every 10 s, twice, 15 s apart; 45 s are usual."""


@dataclass(frozen=True, kw_only=True)
class Autoscaler:
    kube: Kube
    audit_log: Path

    # --- what it is told ---
    def make_pool(self, name: str, instance: str, *, consolidate_after: str, **template: Any) -> None:
        """`template`: of its nodes' spec, e.g. taints. It may use spot and on demand, in every zone."""
        requirements = [
            {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": [instance]},
            {"key": CAPACITY_LABEL, "operator": "In", "values": ["spot", "on-demand"]},
        ]
        reference = {"group": "karpenter.kwok.sh", "kind": NODE_CLASS, "name": "default"}
        spec = {"nodeClassRef": reference, "requirements": requirements, "expireAfter": "Never"} | template
        disruption = {
            "consolidationPolicy": "WhenEmptyOrUnderutilized",
            "consolidateAfter": consolidate_after,
            "budgets": [{"nodes": "100%"}],
        }
        body = {
            "apiVersion": "karpenter.sh/v1",
            "kind": "NodePool",
            "metadata": {"name": name},
            "spec": {"template": {"spec": spec}, "disruption": disruption},
        }
        self.kube.call("POST", f"{_API}/nodepools?fieldValidation=Strict", body)

    def delete_claim(self, claim: str) -> None:
        """As its provider for AWS does where it reads of a spot interruption."""
        self.kube.call("DELETE", f"{_API}/nodeclaims/{claim}")

    # --- what it has done ---
    def claims(self, pool: str) -> list[Json]:
        return self._list(f"{_API}/nodeclaims", pool)

    def nodes(self, pool: str) -> list[Json]:
        return self._list("/api/v1/nodes", pool)

    def _list(self, path: str, pool: str) -> list[Json]:
        selector = quote(f"{POOL_LABEL}={pool}")
        found: list[Json] = self.kube.call("GET", f"{path}?labelSelector={selector}")["items"]
        return found

    def node(self, name: str) -> Json | None:
        return self.kube.get(f"/api/v1/nodes/{name}")

    def claim_of(self, node: str) -> Json:
        """Looked up as Karpenter does it: their names differ."""
        claims: list[Json] = self.kube.call("GET", f"{_API}/nodeclaims")["items"]
        return next(c for c in claims if c.get("status", {}).get("nodeName") == node)

    def claims_ever_made(self) -> int:
        """By the audit log: also those that are gone."""
        lines = (json.loads(line) for line in self.audit_log.read_text().splitlines())
        return sum(
            entry["verb"] == "create"
            and (entry.get("objectRef") or {}).get("resource") == "nodeclaims"
            and (entry.get("responseStatus") or {}).get("code") == 201
            for entry in lines
        )

    # --- the kubelets' part ---
    def start(self, scene: Scene, attempt: int, size: int) -> list[Json]:
        """The attempt's pods, by rank, when the scheduler has bound all; they are running then."""

        def bound() -> list[Json] | None:
            pods = scene.wait_gang(attempt, size)
            return pods if all(pod["spec"].get("nodeName") for pod in pods) else None

        pods: list[Json] = wait_for(
            f"nodes for the {size} pods of attempt {attempt} of {scene.job}", bound, seconds=SCALING
        )
        for pod in pods:
            scene.report_running(pod)
        return pods


def deleted(scene: Scene, pod: Json) -> bool:
    live = scene.kube.get(scene.path(pod))
    return live is None or "deletionTimestamp" in live["metadata"]


def disrupted(node: Json | None) -> bool:
    """Whether Karpenter takes it out of service, or has."""
    if node is None or "deletionTimestamp" in node["metadata"]:
        return True
    return any(t["key"] == DISRUPTED for t in node["spec"].get("taints") or ())


def zone(node: Json) -> str:
    label: str = node["metadata"]["labels"][ZONE_LABEL]
    return label


def hostname(node: Json) -> str:
    label: str = node["metadata"]["labels"][HOSTNAME_LABEL]
    return label
