"""The pod template: which of its containers is the trainer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from spottrain_operator.names import TRAINER_CONTAINER

PROGRESS_NAME: Final = "progress"
"""Name of the port on which the trainer serves its progress."""


def trainer_of(containers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the container whose end is the attempt's end: the one named trainer, otherwise the first."""
    first = containers[0] if containers else {}
    return next((c for c in containers if c.get("name") == TRAINER_CONTAINER), first)


def trainer_path(pod: Mapping[str, Any]) -> str:
    """Returns the trainer's field path in the job's spec, for messages."""
    names = [c["name"] for c in pod["containers"]]
    return f"spec.template.spec.containers[{names.index(trainer_of(pod['containers'])['name'])}]"


def admission_words(words: str) -> str:
    """Adds the remedy to a rejection by Pod Security admission."""
    if "violates PodSecurity" not in words or "runAsNonRoot != true" not in words:
        return words
    return (
        f"{words}. This namespace takes pods of the restricted Pod Security Standard only: set "
        "spec.template.spec.securityContext.runAsNonRoot to true, and the operator fills in the rest; the "
        "image must then run as another user than root, by its USER (a number) or by runAsUser"
    )
