"""Validation of the pod template, and which of its containers is the trainer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from spottrain.contract import PROGRESS_PORT, Env

from spottrain_operator.names import DOMAIN, HOSTNAME_LABEL, QUEUE_LABEL, TRAINER_CONTAINER

PROGRESS_NAME: Final = "progress"
"""Name of the port on which the trainer serves its progress."""
RANK_VARIABLES: Final = frozenset(
    {
        "MASTER_ADDR",
        "MASTER_PORT",
        "NNODES",
        "NODE_RANK",
        "PET_NNODES",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
    }
)
"""Variables that the operator sets for torch and torchrun in each pod of a gang."""


def judged(containers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the container whose end is the attempt's end: the one named trainer, otherwise the first."""
    first = containers[0] if containers else {}
    return next((c for c in containers if c.get("name") == TRAINER_CONTAINER), first)


def trainer_path(pod: Mapping[str, Any]) -> str:
    """Returns the trainer's field path in the job's spec, for messages."""
    names = [c["name"] for c in pod["containers"]]
    return f"spec.template.spec.containers[{names.index(judged(pod['containers'])['name'])}]"


def admission_words(words: str) -> str:
    """Adds the remedy to a rejection by Pod Security admission."""
    if "violates PodSecurity" not in words or "runAsNonRoot != true" not in words:
        return words
    return (
        f"{words}. This namespace takes pods of the restricted Pod Security Standard only: set "
        "spec.template.spec.securityContext.runAsNonRoot to true, and the operator fills in the rest; the "
        "image must then run as another user than root, by its USER (a number) or by runAsUser"
    )


def template_problem(template: Mapping[str, Any]) -> str:
    """Returns a sentence about a template field that the operator owns; "" where the template is valid."""
    pod, path = template["spec"], "spec.template.spec"
    if pod.get("restartPolicy", "Never") != "Never":
        return f"{path}.restartPolicy must be Never or absent, because a restart is a new pod here"
    for name in ("hostname", "subdomain"):
        if pod.get(name):
            return f"{path}.{name} must be absent, because the operator sets it"
    if pod.get("nodeName"):
        return (
            f"{path}.nodeName must be absent, because it places pods past the scheduler, also on a node that "
            f"ends soon or takes no pods; name the node in {path}.nodeSelector: {HOSTNAME_LABEL}"
        )
    names = [c["name"] for c in pod["containers"]]
    if len(names) > 1 and TRAINER_CONTAINER not in names:
        return (
            f"{path}.containers must have one named {TRAINER_CONTAINER}, whose end ends the attempt: {names}"
        )
    trainer = judged(pod["containers"])
    where = trainer_path(pod)
    if "terminationMessagePath" in trainer:
        return f"{where}.terminationMessagePath must be absent, because the runtime writes its outcome there"
    if (trainer.get("lifecycle") or {}).get("preStop"):
        return f"{where}.lifecycle.preStop must be absent, because it shortens the time to save"
    return ""


def collision(template: Mapping[str, Any], *, gang: bool, managed: bool) -> str:
    """Returns a sentence about a template entry that conflicts with the operator's own; "" without one."""
    taken = _key_taken(template) or _port_taken(template["spec"])
    return taken or _variable_taken(template["spec"], gang, managed)


def _key_taken(template: Mapping[str, Any]) -> str:
    """Rejects keys of ours, which would take effect: a deadline annotation would end each attempt at once."""
    metadata = template.get("metadata") or {}
    for kind in ("annotations", "labels"):
        for key in metadata.get(kind) or {}:
            if f".{key.partition('/')[0]}".endswith(f".{DOMAIN}"):
                where = f"spec.template.metadata.{kind}"
                return f"{where} must not have {key}: keys of {DOMAIN} are the operator's; leave it out"
    if QUEUE_LABEL in (metadata.get("labels") or {}):
        return (
            f"spec.template.metadata.labels must not have {QUEUE_LABEL}: set that label on the TrainingJob, "
            "which asks the queue for all of its pods"
        )
    return ""


def _port_taken(pod: Mapping[str, Any]) -> str:
    trainer = judged(pod["containers"])
    for i, port in enumerate(trainer.get("ports") or ()):
        if port.get("name") == PROGRESS_NAME and port.get("containerPort") != PROGRESS_PORT:
            return (
                f"{trainer_path(pod)}.ports[{i}] must not be named {PROGRESS_NAME}, the name of the port "
                f"{PROGRESS_PORT} on which the trainer serves its progress; give it another name"
            )
    for kind in ("containers", "initContainers"):
        for container in pod.get(kind) or ():
            numbers = [port.get("containerPort") for port in container.get("ports") or ()]
            if container is not trainer and PROGRESS_PORT in numbers:
                where = f"spec.template.spec.{kind}, {container['name']}"
                return (
                    f"{where} has containerPort {PROGRESS_PORT}, on which the trainer serves its progress; "
                    "take another number"
                )
    return ""


def _variable_taken(pod: Mapping[str, Any], gang: bool, managed: bool) -> str:
    ours = {str(name) for name in Env if managed or not name.startswith("SPOTTRAIN_CHECKPOINT_")}
    # The template's own volume may be the cache (data_cache.py rejects two).
    ours -= {Env.DATA_CACHE, Env.AUTO_ATTACH}
    for variable in judged(pod["containers"]).get("env") or ():
        name = variable.get("name")
        if name in ours or (gang and name in RANK_VARIABLES):
            return f"{trainer_path(pod)}.env must not have {name}, because the operator sets it; leave it out"
    return ""
