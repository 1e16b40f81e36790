"""What a pod template may say, and which of its containers is judged. Pure.

Called by api, views, volumes and render.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spottrain_operator.names import TRAINER_CONTAINER


def judged(containers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The container whose end is the attempt's end: the one named trainer, else the first."""
    first = containers[0] if containers else {}
    return next((c for c in containers if c.get("name") == TRAINER_CONTAINER), first)


def trainer_path(pod: Mapping[str, Any]) -> str:
    """Where in the job's spec its trainer is, for people."""
    names = [c["name"] for c in pod["containers"]]
    return f"spec.template.spec.containers[{names.index(judged(pod['containers'])['name'])}]"


def template_problem(template: Mapping[str, Any]) -> str:
    """What the template says of a field that the operator owns, as a sentence; "" where it says nothing."""
    pod, path = template["spec"], "spec.template.spec"
    if pod.get("restartPolicy", "Never") != "Never":
        return f"{path}.restartPolicy must be Never or absent, because a restart is a new pod here"
    for name in ("hostname", "subdomain"):
        if pod.get(name):
            return f"{path}.{name} must be absent, because the operator sets it"
    names = [c["name"] for c in pod["containers"]]
    if len(names) > 1 and TRAINER_CONTAINER not in names:
        return f"{path}.containers must have one named {TRAINER_CONTAINER}, the one that is judged: {names}"
    trainer = judged(pod["containers"])
    where = trainer_path(pod)
    if "terminationMessagePath" in trainer:
        return f"{where}.terminationMessagePath must be absent, because the runtime tells its outcome there"
    if (trainer.get("lifecycle") or {}).get("preStop"):
        return f"{where}.lifecycle.preStop must be absent, because it takes from the time to save"
    return ""
