"""Environment variables of a job's containers: the contract's, and those of torchrun. Pure."""

from __future__ import annotations

import json
import math
import posixpath
from collections.abc import Mapping
from typing import Any, Final

from spottrain.contract import (
    CACHE_DIR,
    DEADLINE_NAME,
    DEFAULTS,
    PODINFO_DIR,
    PROGRESS_PORT,
    SAVE_ADVISED_NAME,
    STORE_WAIT_SECONDS,
    Env,
    LastExit,
    OnExisting,
    SyncEnv,
    library_homes,
)

from spottrain_operator import names
from spottrain_operator.api import injected, sync, volumes
from spottrain_operator.api.training_job import (
    CheckpointSpec,
    CompileCache,
    Job,
    Logs,
    Status,
    TrainingJobSpec,
)

Json = dict[str, Any]

PROCESSES: Final = "PET_NPROC_PER_NODE"
"""torchrun's flag --nproc-per-node as an environment variable."""
POD_UID: Final = {"name": str(Env.POD_UID), "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
RESTORED_FILE: Final = f"{volumes.TMP_DIR}/spottrain-restored.json"
"""On a volume of the pod, so that a sidecar that is started again does not restore again."""


# --- by container -------------------------------------------------------------------------------------
def of_trainer(job: Job, status: Status, grace_seconds: int, rank: int = 0) -> dict[str, str]:
    """Returns the variables of the trainer that the operator owns."""
    spec, gpus = job.valid_spec, job.valid_spec.gpus.count
    values = _identity(job, status) | {
        Env.GPUS: "" if gpus is None else str(gpus),
        Env.TRAINING: json.dumps(spec.training, sort_keys=True),
        Env.DEADLINE_FILE: f"{PODINFO_DIR}/{DEADLINE_NAME}",
        Env.SAVE_ADVISED_FILE: f"{PODINFO_DIR}/{SAVE_ADVISED_NAME}",
        Env.CACHE_DIR: CACHE_DIR,
        Env.DATA_CACHE: spec.data_cache.path if spec.data_cache is not None else "",
    }
    if spec.checkpoint.synced:
        folder = sync.folder(spec.checkpoint)
        return given(values | {SyncEnv.PATH: folder, SyncEnv.RESUMED: resumed(spec, status)})
    values |= _reporting(grace_seconds)
    if spec.checkpoint.managed:
        values |= _store(spec, status) | _saving(spec, status)
    if spec.checkpoint.ca_bundle is not None:
        values[volumes.CA_VARIABLE] = volumes.CA_FILE
    return given(values) | (_gang(job, status, rank) if spec.workers > 1 else {})


def for_libraries(spec: TrainingJobSpec, trainer: Mapping[str, Any]) -> dict[str, str]:
    """Returns variables of the trainer that the template overrides."""
    gpus, found = spec.gpus.count, dict[str, str]()
    if not _run_by_us(trainer):  # auto: torchrun counts a DRA claim's
        found[PROCESSES] = "auto" if gpus is None else str(max(gpus, 1))
    if volumes.read_only(trainer):  # otherwise files in the image's own home would not be found
        found |= {"HOME": volumes.HOME_DIR, "TMPDIR": volumes.TMP_DIR}
    # env overrides envFrom, which may have these names; then the runtime sets those that are unset.
    if spec.data_cache is not None and not trainer.get("envFrom"):
        found |= library_homes(spec.data_cache.path)
    return found


def of_sidecar(job: Job, status: Status, grace_seconds: int) -> dict[str, str]:
    """Returns the variables of the sidecar of checkpoint.mode Sync that the operator owns."""
    spec, checkpoint = job.valid_spec, job.valid_spec.checkpoint
    values = _identity(job, status) | _reporting(grace_seconds) | _store(spec, status)
    values |= {
        Env.DEADLINE_FILE: f"{PODINFO_DIR}/{DEADLINE_NAME}",
        SyncEnv.PATH: sync.folder(checkpoint),
        SyncEnv.WHEN: checkpoint.sync_when.to_json() if checkpoint.sync_when is not None else "",
        SyncEnv.RESULT_FILE: RESTORED_FILE,
        SyncEnv.LAST_EXIT: _last_exit(status),
    }
    if checkpoint.resume_args:  # the script's arguments are chosen before it is known what is restored
        values[SyncEnv.RESUMED] = resumed(spec, status)
    return given(values)


def given(values: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that have a value other than the default."""
    return {str(name): str(value) for name, value in values.items() if value and value != DEFAULTS.get(name)}


def listed(values: Mapping[str, str]) -> list[Json]:
    """Returns them as a container's `env`."""
    return [{"name": name, "value": value} for name, value in values.items()]


# --- by subject ---------------------------------------------------------------------------------------
def _identity(job: Job, status: Status) -> dict[str, str]:
    return {
        Env.JOB_NAME: job.key.name,
        Env.JOB_UID: job.key.uid,
        Env.ATTEMPT: str(status.attempt),
    }


def _reporting(grace_seconds: int) -> dict[str, str]:
    return {
        Env.GRACE_SECONDS: str(grace_seconds),
        Env.TERMINATION_MESSAGE: "/dev/termination-log",
        Env.PROGRESS_PORT: str(PROGRESS_PORT),
    }


def _store(spec: TrainingJobSpec, status: Status) -> dict[str, str]:
    """Returns where checkpoints are, how many are kept, and what is known of them."""
    checkpoint, known, gate = spec.checkpoint, status.known_durable_step, status.gate_until
    return {
        Env.CHECKPOINT_URI: checkpoint.uri,
        Env.CHECKPOINT_ENDPOINT: checkpoint.endpoint,
        Env.CHECKPOINT_KEEP: str(checkpoint.keep),
        **of_s3(checkpoint),
        Env.CHECKPOINT_ON_EXISTING: checkpoint.on_existing,
        Env.KNOWN_DURABLE_STEP: "" if known is None else str(known),
        Env.GATE_UNTIL: "" if gate is None else str(math.ceil(gate.timestamp())),
        Env.STORE_WAIT: str(min(STORE_WAIT_SECONDS, spec.failure_policy.store_outage_seconds)),
    }


def of_s3(checkpoint: CheckpointSpec) -> dict[str, str]:
    """Returns what is particular to a server of S3, or to a bucket."""
    return {
        Env.CHECKPOINT_PATH_STYLE: _yes_or_no(checkpoint.path_style),
        Env.CHECKPOINT_KMS_KEY: checkpoint.encryption.kms_key if checkpoint.encryption else "",
    }


def _saving(spec: TrainingJobSpec, status: Status) -> dict[str, str]:
    """Returns the variables that only our runtime reads."""
    checkpoint, first = spec.checkpoint, spec.checkpoint.init_from
    image = str(spec.trainer.get("image") or "")
    return {
        Env.INIT_FROM: first.source if first else "",
        Env.INIT_IGNORE: ",".join(first.ignore) if first else "",
        Env.CHECKPOINT_INTERVAL: checkpoint.interval,
        Env.CHECKPOINT_KEEP_BEST: _yes_or_no(checkpoint.keep_best),
        Env.COMPILE_CACHE: _compile_cache(checkpoint.compile_cache, status),
        Env.IMAGE_DIGEST: image.partition("@")[2],  # a tag may change with the next pull
        Env.HANG_TIMEOUT: str(spec.failure_policy.hang_timeout_seconds or ""),
        Env.LOGS: "keep" if checkpoint.logs is Logs.KEEP else "off",
    }


def _gang(job: Job, status: Status, rank: int) -> dict[str, str]:
    """Returns the variables for our launcher, custom launchers, and torchrun (PET_...: its flags).

    Each attempt has its own rank 0 host name, so that no rank connects to a pod of the previous attempt.
    """
    host = f"{job.pod_name(status.attempt)}.{job.service_name}.{job.key.namespace}.svc"
    port, workers = str(names.RENDEZVOUS_PORT), str(job.valid_spec.workers)
    ours = {Env.WORKER_INDEX: str(rank), Env.WORKERS: workers, Env.RENDEZVOUS: f"{host}:{port}"}
    common = {"NODE_RANK": str(rank), "NNODES": workers, "MASTER_ADDR": host, "MASTER_PORT": port}
    flags = {} if _run_by_us(job.valid_spec.trainer) else {f"PET_{k}": v for k, v in common.items()}
    return {str(name): value for name, value in ours.items()} | common | flags


def _run_by_us(trainer: Mapping[str, Any]) -> bool:
    """Returns whether `spottrain run` starts the ranks: nobody reads torchrun's flags then."""
    words = injected.words_of(trainer)
    ours = posixpath.basename(words[0]) == "spottrain" if words else False
    return ours and words[1:2] in (["run"], ["profile"]) and not any("PET_" in word for word in words)


def resumed(spec: TrainingJobSpec, status: Status) -> str:
    """Returns whether a folder is restored, or "" where only the sidecar knows.

    An earlier attempt may have committed what the operator has not seen. With `resumeArgs` that is "false":
    a sidecar that finds a checkpoint then ends the attempt, and the next one knows.
    """
    if status.known_durable_step is not None:
        return "true"
    first = status.attempt <= 1 and spec.checkpoint.on_existing is not OnExisting.RESUME
    return "false" if first or spec.checkpoint.resume_args else ""


def _last_exit(status: Status) -> str:
    """Returns the newest exit code that is known, with its attempt; "" if none is."""
    known = [LastExit(attempt=r.number, code=r.exit_code) for r in status.attempts if r.exit_code is not None]
    past = [each for each in known if each.attempt < status.attempt]
    return str(max(past, key=lambda each: each.attempt)) if past else ""


def _compile_cache(wanted: CompileCache, status: Status) -> str:
    """Returns "drop" (do not restore) after an illegal instruction, until another exit code follows."""
    codes = [r.exit_code for r in status.attempts if r.exit_code is not None]
    if wanted is CompileCache.NONE:
        return "off"
    return "drop" if codes and codes[-1] == names.ILLEGAL_INSTRUCTION else "keep"


def _yes_or_no(value: bool | None) -> str:
    return "" if value is None else str(value).lower()
