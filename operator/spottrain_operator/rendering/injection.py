"""Renders spec.runtime.inject: an init container that writes the runtime to a volume of the trainer. Pure."""

from __future__ import annotations

from typing import Any, Final

from spottrain_operator.api import injected
from spottrain_operator.names import INJECT_CONTAINER

Json = dict[str, Any]

RESOURCES: Final = {"cpu": "500m", "memory": "128Mi"}
"""As requests and limits: a pod that is Guaranteed remains so. It counts only where the trainer has less."""
LIKE_THE_TRAINER: Final = ("runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile", "seLinuxOptions")
"""Parts of its security context, so that the pod is admitted, and its volume used, as the trainer is."""


def add(body: Json, trainer: Json, image: str) -> None:
    """Adds the init container before others, and the launcher to the command; after `volumes.equip`."""
    mount = {"name": INJECT_CONTAINER, "mountPath": injected.FOLDER}
    container = {
        "name": INJECT_CONTAINER,
        "image": image,
        "command": ["spottrain", "inject", injected.FOLDER],
        "resources": {"requests": RESOURCES, "limits": RESOURCES},
        "securityContext": security(trainer),
        "volumeMounts": [mount],
    }
    trainer["command"] = injected.launched(injected.words_of(trainer))
    trainer.pop("args", None)
    trainer["volumeMounts"] = [*trainer["volumeMounts"], mount | {"readOnly": True}]
    body["volumes"] = [*body["volumes"], {"name": INJECT_CONTAINER, "emptyDir": {}}]
    body["initContainers"] = [container, *(body.get("initContainers") or ())]


def security(trainer: Json) -> Json:
    """Returns the security context of a container of our image beside the trainer, without privileges."""
    own = trainer.get("securityContext") or {}
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    } | {name: own[name] for name in LIKE_THE_TRAINER if name in own}
