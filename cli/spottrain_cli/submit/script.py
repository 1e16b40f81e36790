"""The TrainingJob of a script. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from spottrain.contract import LAUNCHER_FILE

from spottrain_cli.errors import UsageError

Json = dict[str, Any]

LAUNCHER: Final = f"/spottrain/{LAUNCHER_FILE}"
"""Where the operator mounts the launcher, with runtime.inject."""
OUR_IMAGE: Final = "spottrain-runtime"
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What the user asks for."""

    path: str
    """As given; of a packed folder, relative to it."""
    image: str
    args: tuple[str, ...] = ()
    name: str = ""
    namespace: str = ""
    workers: int = 1
    gpus: int = 1
    cpu: str = ""
    memory: str = ""
    env: tuple[tuple[str, str], ...] = ()
    bucket: str = ""
    endpoint: str = ""
    secret: str = ""
    service_account: str = ""
    sync_path: str = ""
    spot: bool = True
    deadline: str = ""
    max_cost: str = ""
    code: str = ""
    """URI of the packed folder; empty: the script is in the image."""


def manifest(script: Script) -> Json:
    """Raises UsageError where something is missing or contradicts itself."""
    _check(script)
    metadata = {"name": script.name or name_of(script.path)}
    if script.namespace:
        metadata["namespace"] = script.namespace
    spec: Json = {"workers": script.workers} if script.workers > 1 else {}
    spec["gpusPerWorker"] = script.gpus
    if _injects(script):
        spec["runtime"] = {"inject": True}
    if checkpoint := _checkpoint(script, metadata):
        spec["checkpoint"] = checkpoint
    spec["capacity"] = _capacity(script)
    pod: Json = {"containers": [_container(script)]}
    if script.service_account:
        pod["serviceAccountName"] = script.service_account
    spec["template"] = {"spec": pod}
    return {"apiVersion": "spottrain.io/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}


def name_of(path: str) -> str:
    """Returns a job's name from that of its script: `train_gpt.py` becomes train-gpt."""
    stem = re.sub(r"[^a-z0-9]+", "-", PurePath(path).stem.lower()).strip("-")
    return stem[:50].rstrip("-") or "train"


def _check(script: Script) -> None:
    if not script.image:
        raise UsageError(
            "--image is needed: one with Python 3.11 or newer, torch and what the script imports "
            "(docs/own-image.md)"
        )
    if script.name and not NAME.fullmatch(script.name):
        raise UsageError(
            f"--name {script.name!r} must have lower-case letters, digits and -, and begin and end without -"
        )
    if script.sync_path and script.code:
        raise UsageError(
            "--sync-path is for a script in the image: nothing brings a packed folder into that one; add "
            "--no-pack with the script's path in the image"
        )
    if script.sync_path and script.workers > 1:
        raise UsageError(
            "--sync-path is for one worker: a sidecar uploads the folder of one pod (docs/sync.md)"
        )
    if script.deadline and not script.spot:
        raise UsageError("--deadline chooses between spot and on-demand by itself; leave --on-demand out")


def _injects(script: Script) -> bool:
    """Our own image has the runtime; any other one gets it by a volume, unless it has it too."""
    return not script.sync_path and repository(script.image) != OUR_IMAGE


def repository(image: str) -> str:
    """Returns `pytorch` of `registry:5000/team/pytorch:2.6@sha256:...`."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0]


def _container(script: Script) -> Json:
    code = ["--code", script.code] if script.code else []
    words = [script.path, *script.args]
    container: Json = {"name": "trainer", "image": script.image}
    if script.sync_path:
        container["command"] = ["python", *words]
    elif not _injects(script):
        container["args"] = [*code, *words]  # of the image's entry point, spottrain run
    elif code:
        container["command"] = ["python", LAUNCHER, *code, *words]
    else:
        container["command"] = ["python", *words]  # the operator puts the launcher before the script
    if script.env:
        container["env"] = [{"name": name, "value": value} for name, value in script.env]
    requests = {kind: amount for kind, amount in (("cpu", script.cpu), ("memory", script.memory)) if amount}
    if requests:
        container["resources"] = {"requests": requests}
    return container


def _checkpoint(script: Script, metadata: Json) -> Json:
    found: Json = {"mode": "Sync", "syncPath": script.sync_path} if script.sync_path else {}
    if script.bucket:
        place = filter(None, [script.bucket.rstrip("/"), metadata.get("namespace"), metadata["name"]])
        found["uri"] = "/".join(place)
    if script.endpoint:
        found["endpoint"] = script.endpoint
    if script.secret:
        found["credentialsSecretRef"] = {"name": script.secret}
    return found


def _capacity(script: Script) -> Json:
    kind = "Cheapest" if script.deadline else "Spot" if script.spot else "OnDemand"
    found: Json = {"type": kind}
    if script.deadline:
        found["cheapest"] = {"deadline": script.deadline}
    if script.max_cost:
        found["maxCostUSD"] = script.max_cost
    return found
