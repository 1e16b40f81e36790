"""The pods of a job, as kubectl returns them: their labels, and the container that trains. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

JOB_LABEL: Final = "spottrain.io/job"
JOB_UID_LABEL: Final = "spottrain.io/job-uid"
ATTEMPT_LABEL: Final = "spottrain.io/attempt"
RANK_LABEL: Final = "spottrain.io/rank"
TRAINER_ANNOTATION: Final = "spottrain.io/trainer-container"
TRAINERS: Final = "app.kubernetes.io/managed-by=spottrain,spottrain.io/role=trainer"
"""Label selector of trainer pods."""


def trainer_container(pod: Mapping[str, Any]) -> str:
    """Returns the name of the container whose end is the attempt's end."""
    name: str = (pod["metadata"].get("annotations") or {}).get(TRAINER_ANNOTATION, "trainer")
    return name


def trainer_state(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the state of that container; empty before the kubelet has told one."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    name = trainer_container(pod)
    return next((each.get("state") or {} for each in statuses if each.get("name") == name), {})
