"""What kstatus (sigs.k8s.io/cli-utils) says of an object that it has no rule of its own for.

Flux' `wait`, `helm --wait` and `kubectl kapply` read this.
"""

from __future__ import annotations

from typing import Any


def kstatus(raw: dict[str, Any]) -> str:
    meta, status = raw["metadata"], raw.get("status") or {}
    if meta.get("deletionTimestamp"):
        return "Terminating"
    if status.get("observedGeneration", meta["generation"]) != meta["generation"]:
        return "InProgress"
    for condition in status.get("conditions") or ():
        if condition["status"] == "True" and condition["type"] in ("Reconciling", "Stalled"):
            return "InProgress" if condition["type"] == "Reconciling" else "Failed"
    return "Current"
