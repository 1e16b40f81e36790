"""What a job's template must not have, because the operator sets it or because it would be lost. Pure.

Two volumes, containers, ports or mounts of one name are refused by the API server, in the dry run of the pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from spottrain.contract import Env, SyncEnv

from spottrain_operator.api import sync, volumes
from spottrain_operator.api.template import trainer_path
from spottrain_operator.api.training_job import TrainingJobSpec
from spottrain_operator.names import DOMAIN, HOSTNAME_LABEL, QUEUE_LABEL, TRAINER_CONTAINER

POD: Final = "spec.template.spec"
RANK_VARIABLES: Final = frozenset({"MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK"})
"""Variables that the operator sets in each pod of a gang, and with PET_ before them for torchrun."""


def problem(spec: TrainingJobSpec) -> str:
    """Returns a sentence about the template; "" where it is valid."""
    checks = (_owned, _keys, _variables, _checkpoint_folder)
    return next((words for check in checks for words in check(spec)), "")


# --- what the operator sets itself ------------------------------------------------------------------------
def _owned(spec: TrainingJobSpec) -> Iterator[str]:
    pod, trainer, where = spec.pod, spec.trainer, trainer_path(spec.pod)
    if pod.get("restartPolicy", "Never") != "Never":
        yield f"{POD}.restartPolicy must be Never or absent, because a restart is a new pod here"
    if pod.get("nodeName"):
        yield (
            f"{POD}.nodeName must be absent, because it places pods past the scheduler; name the node in "
            f"{POD}.nodeSelector: {HOSTNAME_LABEL}"
        )
    names = [c["name"] for c in pod["containers"]]
    if len(names) > 1 and TRAINER_CONTAINER not in names:
        yield f"{POD}.containers must have one named {TRAINER_CONTAINER}, whose end ends the attempt: {names}"
    if (trainer.get("lifecycle") or {}).get("preStop"):
        yield f"{where}.lifecycle.preStop must be absent, because it shortens the time to save"


def _keys(spec: TrainingJobSpec) -> Iterator[str]:
    """Keys of ours would take effect: a deadline annotation would end each attempt at once."""
    metadata = spec.template.get("metadata") or {}
    for kind in ("annotations", "labels"):
        for key in metadata.get(kind) or {}:
            if f".{key.partition('/')[0]}".endswith(f".{DOMAIN}"):
                where = f"spec.template.metadata.{kind}"
                yield f"{where} must not have {key}: keys of {DOMAIN} are the operator's; leave it out"
    if QUEUE_LABEL in (metadata.get("labels") or {}):
        yield (
            f"spec.template.metadata.labels must not have {QUEUE_LABEL}: set that label on the TrainingJob, "
            "which asks the queue for all of its pods"
        )


def _variables(spec: TrainingJobSpec) -> Iterator[str]:
    checkpoint, trainer, where = spec.checkpoint, spec.trainer, trainer_path(spec.pod)
    ours = {str(name) for name in Env if checkpoint.ours or not name.startswith("SPOTTRAIN_CHECKPOINT_")}
    ours -= {Env.AUTO_ATTACH} | ({Env.DATA_CACHE} if spec.data_cache is None else set())
    if spec.workers > 1:
        ours |= RANK_VARIABLES | {f"PET_{name}" for name in RANK_VARIABLES}
    if checkpoint.ca_bundle is not None:
        ours.add(volumes.CA_VARIABLE)
    if checkpoint.synced:
        ours |= {str(name) for name in SyncEnv}
    for variable in trainer.get("env") or ():
        if variable.get("name") in ours:
            yield f"{where}.env must not have {variable['name']}, because the operator sets it; leave it out"


# --- folders ------------------------------------------------------------------------------------------------
def _checkpoint_folder(spec: TrainingJobSpec) -> Iterator[str]:
    """Rejects a file:// URI on spot whose data is lost with its node."""
    uri, pod = spec.checkpoint.uri, spec.pod
    if not spec.on_spot or not uri.startswith("file:"):
        return
    trainer, where = spec.trainer, trainer_path(spec.pod)
    path = sync.uri_folder(spec.checkpoint)
    mounts = {
        volumes.clean(m.get("mountPath")): str(m.get("name")) for m in trainer.get("volumeMounts") or ()
    }
    found = {str(v.get("name")): v for v in pod.get("volumes") or ()}
    ours = volumes.OWN_PATHS if volumes.read_only(trainer) else volumes.OWN_PATHS - volumes.READ_ONLY_PATHS
    nearest = max((at for at in {*mounts, *ours} if volumes.within(path, at)), key=len, default="")
    what = f"spec.checkpoint.uri {uri} is on"
    todo = "spot capacity needs a persistentVolumeClaim there, or an s3:// or gs:// URI (docs/checkpoints.md)"
    name = mounts.get(nearest)
    if name is None:
        yield f"{what} no volume of {where}: {todo}"
    elif name not in found:
        yield f"{what} volume {name}, which {POD}.volumes does not have"
    elif not volumes.DURABLE & found[name].keys():
        kind = next((kind for kind in found[name] if kind != "name"), "emptyDir")
        yield f"{what} volume {name} ({kind}), which ends with its node: {todo}"
