"""Environment variables of the contract that more than one container gets. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from spottrain.contract import DEFAULTS, Env

from spottrain_operator.api.training_job import CheckpointSpec, Job, Status, TrainingJobSpec

Json = dict[str, Any]

TERMINATION_LOG: Final = "/dev/termination-log"
POD_UID: Final = {"name": str(Env.POD_UID), "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}


def identity(job: Job, status: Status) -> dict[str, str]:
    """Returns the variables that say which job and attempt it is."""
    return {
        Env.JOB_NAME: job.key.name,
        Env.JOB_NAMESPACE: job.key.namespace,
        Env.JOB_UID: job.key.uid,
        Env.ATTEMPT: str(status.attempt),
    }


def store(spec: TrainingJobSpec, status: Status) -> dict[str, str]:
    """Returns the variables that say where checkpoints are, how many are kept, and what is known of them."""
    checkpoint, known = spec.checkpoint, status.known_durable_step
    return {
        Env.CHECKPOINT_URI: checkpoint.uri,
        Env.CHECKPOINT_ENDPOINT: checkpoint.endpoint,
        Env.CHECKPOINT_KEEP: str(checkpoint.keep),
        **of_s3(checkpoint),
        Env.CHECKPOINT_ON_EXISTING: checkpoint.on_existing,
        Env.KNOWN_DURABLE_STEP: "" if known is None else str(known),
        Env.GATE_UNTIL: _unix(status.gate_until),
    }


def of_s3(checkpoint: CheckpointSpec) -> dict[str, str]:
    """Returns the variables for what is particular to a server of S3, or to a bucket."""
    return {
        Env.CHECKPOINT_PATH_STYLE: yes_or_no(checkpoint.path_style),
        Env.CHECKPOINT_KMS_KEY: checkpoint.encryption.kms_key if checkpoint.encryption else "",
    }


def yes_or_no(value: bool | None) -> str:
    return "" if value is None else str(value).lower()


def _unix(time: datetime | None) -> str:
    return str(math.ceil(time.timestamp())) if time else "0"


def given(values: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that have a value other than the default."""
    return {str(name): str(value) for name, value in values.items() if value and value != DEFAULTS.get(name)}


def listed(values: Mapping[str, str]) -> list[Json]:
    """Returns them as a container's `env`."""
    return [{"name": name, "value": value} for name, value in values.items()]
