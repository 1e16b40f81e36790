"""The pod of one attempt, from the job's template. Pure; called by plan.py.

What the template says stands, except for what the operator owns (template.py).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from spottrain.contract import CACHE_DIR, DEADLINE_NAME, PODINFO_DIR, PROGRESS_PORT, Env

from spottrain_operator import volumes
from spottrain_operator.api import CapacityType, CompileCache, Job, Pool, Status, TrainingJobSpec
from spottrain_operator.names import (
    API_VERSION,
    ATTEMPT_LABEL,
    AVOIDS_ANNOTATION,
    GPU_RESOURCE,
    HOSTNAME_LABEL,
    ILLEGAL_INSTRUCTION,
    JOB_LABEL,
    JOB_UID_LABEL,
    KIND,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    OUTCOME_FINALIZER,
    ROLE_LABEL,
    ROLE_TRAINER,
    job_label,
    pod_name,
)
from spottrain_operator.template import judged

Json = dict[str, Any]

KEEP_ALIVE: Final = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
"""They stop voluntary disruption; our DELETE is no eviction."""
NODE_SILENCE: Final = 30
"""Seconds for which a node may be silent before its pods are deleted; the default is 300."""
TERMINATION_LOG: Final = "/dev/termination-log"
FS_GROUP: Final = 1000
"""Group of the runtime image's user: it may write what is mounted, and read its cloud token."""


def grace(spec: TrainingJobSpec, default: Pool) -> int:
    """terminationGracePeriodSeconds: the window; less where the template says so, more only on demand."""
    asked, window = spec.template["spec"].get("terminationGracePeriodSeconds"), spec.window(default)
    if asked is None:
        return window
    return min(int(asked), window) if spec.capacity.type is CapacityType.SPOT else int(asked)


def grace_note(spec: TrainingJobSpec, default: Pool) -> str:
    """What a person should know about the grace that was asked for; "" where it equals the window."""
    asked, window = spec.template["spec"].get("terminationGracePeriodSeconds"), spec.window(default)
    if asked is None or spec.capacity.type is not CapacityType.SPOT or asked == window:
        return ""
    if asked > window:
        return f"terminationGracePeriodSeconds {asked} is cut to {window}, the notice window of this capacity"
    return f"terminationGracePeriodSeconds {asked} leaves less than the {window} s that there are for saving"


def pod(job: Job, status: Status, default_pool: Pool, avoid: Sequence[str] = ()) -> Json:
    """The pod of attempt `status.attempt`, kept off the nodes with the host names `avoid`."""
    assert job.spec is not None
    spec, pool = job.spec, job.spec.pool(default_pool)
    body = copy.deepcopy(spec.template["spec"])
    trainer = judged(body["containers"])
    body |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": grace(spec, default_pool)}
    _place(body, pool, avoid)
    ca = spec.checkpoint.ca_bundle
    volumes.equip(body, trainer, ca.source if ca else None)
    _feed(trainer, job, status, default_pool)
    for container in (trainer, *(body.get("initContainers") or ())):
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    _restrict(body)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(job, status, avoid), "spec": body}


def _metadata(job: Job, status: Status, avoid: Sequence[str]) -> Json:
    assert job.spec is not None
    given, key = job.spec.template.get("metadata") or {}, job.key
    labels = {
        JOB_LABEL: job_label(key.name),
        JOB_UID_LABEL: key.uid,
        ATTEMPT_LABEL: str(status.attempt),
        MANAGED_BY_LABEL: MANAGED_BY,
        ROLE_LABEL: ROLE_TRAINER,
    }
    annotations = KEEP_ALIVE | (given.get("annotations") or {})
    annotations.pop(AVOIDS_ANNOTATION, None)  # from the template it would be a rule that never ends
    if avoid:
        annotations[AVOIDS_ANNOTATION] = ",".join(sorted(avoid))
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": key.name, "uid": key.uid}
    return {
        "name": pod_name(key.name, key.uid, status.attempt),
        "namespace": key.namespace,
        "labels": (given.get("labels") or {}) | labels,
        "annotations": annotations,
        "finalizers": [OUTCOME_FINALIZER],
        "ownerReferences": [owner | {"controller": True, "blockOwnerDeletion": True}],
    }


# --- where it runs -----------------------------------------------------------------------------------
def _place(body: Json, pool: Pool, avoid: Sequence[str]) -> None:
    body["nodeSelector"] = (body.get("nodeSelector") or {}) | pool.node_selector
    silence = [  # first, because of several that fit a taint the first one counts
        {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute"}
        | {"tolerationSeconds": NODE_SILENCE}
        for state in ("not-ready", "unreachable")
    ]
    ours = {t["key"] for t in silence}
    given = (*(body.get("tolerations") or ()), *pool.tolerations)
    body["tolerations"] = [*silence, *(t for t in given if t.get("key") not in ours)]
    if avoid:
        _keep_off(body, avoid)


def _keep_off(body: Json, hostnames: Sequence[str]) -> None:
    """A hard rule: a template may tolerate every taint, so a doomed node's taint alone would not do."""
    term = {"key": HOSTNAME_LABEL, "operator": "NotIn", "values": sorted(hostnames)}
    affinity = body.get("affinity") or {}
    node = affinity.get("nodeAffinity") or {}
    required = node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or [{}]  # terms are alternatives: each needs the rule
    kept = [t | {"matchExpressions": [*(t.get("matchExpressions") or ()), term]} for t in terms]
    node["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": kept}
    body["affinity"] = affinity | {"nodeAffinity": node}


# --- what it is told ---------------------------------------------------------------------------------
def _feed(trainer: Json, job: Job, status: Status, default_pool: Pool) -> None:
    assert job.spec is not None
    spec = job.spec
    given = {e.get("name"): e for e in trainer.get("env") or ()}
    told = environment(job, status, grace(spec, default_pool))
    if spec.checkpoint.ca_bundle is not None:
        told[volumes.CA_VARIABLE] = f"{volumes.CA_DIR}/{volumes.CA_NAME}"
    defaults = {k: v for k, v in _WRITABLE.items() if k not in given}
    kept = [e for e in trainer.get("env") or () if e.get("name") not in told]
    trainer["env"] = [*kept, *({"name": k, "value": v} for k, v in (defaults | told).items())]
    if secret := spec.checkpoint.credentials_secret:
        trainer["envFrom"] = [*(trainer.get("envFrom") or ()), {"secretRef": {"name": secret}}]
    port = {"name": "progress", "containerPort": PROGRESS_PORT}
    trainer["ports"] = [*(trainer.get("ports") or ()), port]
    if spec.gpus_per_worker:
        resources = trainer.setdefault("resources", {})
        for kind in ("requests", "limits"):
            resources[kind] = (resources.get(kind) or {}) | {GPU_RESOURCE: str(spec.gpus_per_worker)}


_WRITABLE: Final = {
    "HOME": volumes.HOME_DIR,
    "TMPDIR": volumes.TMP_DIR,
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_DIR}/inductor",
    "TRITON_CACHE_DIR": f"{CACHE_DIR}/triton",
}


def environment(job: Job, status: Status, grace_seconds: int) -> dict[str, str]:
    """The contract's variables (`contract.Env`); those without a value are left out."""
    assert job.spec is not None
    values: dict[Env, str] = {
        Env.JOB_NAME: job.key.name,
        Env.JOB_NAMESPACE: job.key.namespace,
        Env.JOB_UID: job.key.uid,
        Env.ATTEMPT: str(status.attempt),
        Env.GRACE_SECONDS: str(grace_seconds),
        Env.TRAINING: json.dumps(job.spec.training, sort_keys=True),
        Env.DEADLINE_FILE: f"{PODINFO_DIR}/{DEADLINE_NAME}",
        Env.TERMINATION_MESSAGE: TERMINATION_LOG,
        Env.PROGRESS_PORT: str(PROGRESS_PORT),
        Env.CACHE_DIR: CACHE_DIR,
    }
    if job.spec.checkpoint.managed:
        values |= _saving(job.spec, status)
    return {str(name): str(value) for name, value in values.items() if value}


def _saving(spec: TrainingJobSpec, status: Status) -> dict[Env, str]:
    """What only our runtime can do something with."""
    checkpoint, known = spec.checkpoint, status.known_durable_step
    return {
        Env.CHECKPOINT_URI: checkpoint.uri,
        Env.CHECKPOINT_ENDPOINT: checkpoint.endpoint,
        Env.CHECKPOINT_INTERVAL: checkpoint.interval,
        Env.CHECKPOINT_KEEP: str(checkpoint.keep),
        Env.CHECKPOINT_KEEP_BEST: _yes_or_no(checkpoint.keep_best),
        Env.CHECKPOINT_PATH_STYLE: _yes_or_no(checkpoint.path_style),
        Env.CHECKPOINT_KMS_KEY: checkpoint.encryption.kms_key if checkpoint.encryption else "",
        Env.CHECKPOINT_ON_EXISTING: checkpoint.on_existing,
        Env.KNOWN_DURABLE_STEP: "" if known is None else str(known),
        Env.GATE_UNTIL: _unix(status.gate_until),
        Env.COMPILE_CACHE: _compile_cache(checkpoint.compile_cache, status),
        Env.IMAGE_DIGEST: _digest(spec),
    }


def _yes_or_no(value: bool | None) -> str:
    return "" if value is None else str(value).lower()


def _compile_cache(wanted: CompileCache, status: Status) -> str:
    """Not restored after an illegal instruction, until an attempt has ended with another code."""
    codes = [r.exit_code for r in status.attempts if r.exit_code is not None]
    if wanted is CompileCache.NONE:
        return "off"
    return "drop" if codes and codes[-1] == ILLEGAL_INSTRUCTION else "keep"


def _digest(spec: TrainingJobSpec) -> str:
    """Of an image that is pinned by it; a tag may stand for another image at the next pull."""
    image = str(judged(spec.template["spec"]["containers"]).get("image") or "")
    return image.partition("@")[2]


def _unix(time: datetime | None) -> str:
    return str(math.ceil(time.timestamp())) if time else "0"


# --- what it may do ----------------------------------------------------------------------------------
def _restrict(body: Json) -> None:
    """The restricted Pod Security Standard, only where the template is silent."""
    body.setdefault("automountServiceAccountToken", False)  # the trainer talks to no API server
    context = body.setdefault("securityContext", {})
    context.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    context.setdefault("fsGroup", FS_GROUP)
    context.setdefault("fsGroupChangePolicy", "OnRootMismatch")
    _non_root(context)
    for container in [*body["containers"], *(body.get("initContainers") or ())]:
        _restrict_container(container.setdefault("securityContext", {}), context.get("runAsUser"))


def _restrict_container(context: Json, pods_user: int | None) -> None:
    if context.get("runAsUser") == 0:
        _non_root(context)
    if context.get("privileged"):
        return  # the API server refuses the mixture; whoever asks for it means it
    context.setdefault("allowPrivilegeEscalation", False)
    if context.get("runAsUser", pods_user) != 0:  # root without CAP_DAC_OVERRIDE is not what was asked for
        context.setdefault("capabilities", {"drop": ["ALL"]})


def _non_root(context: Json) -> None:
    context.setdefault("runAsNonRoot", context.get("runAsUser") != 0)
