"""Defaults of a team for what a job's spec leaves out: from the chart, or its namespace's ConfigMap. Pure.

The place of checkpoints, its endpoint and its credentials belong together. Whoever names the place, the job
by its URI or a level by its prefix, names all three: what a level further out says about them is not used.
A nearer level may replace the endpoint or the credentials alone.

The URI ends with the job's namespace and name, which contain no slash. So two namespaces never get the same
URI, whatever the prefixes are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from spottrain.contract import AZURE, NO_AZURE

from spottrain_operator.api.training_job import (
    AppliedDefaults,
    CheckpointDefaults,
    Job,
    JobKey,
    TrainingJobSpec,
)
from spottrain_operator.api.validation import unknown_pool
from spottrain_operator.api.volumes import ObjectRef
from spottrain_operator.api.wire import camel
from spottrain_operator.errors import InvalidSpec
from spottrain_operator.names import DEFAULTS_CONFIG_MAP

POOLS_LIMIT: Final = 16
SHOWN: Final = 30
_BUCKET: Final = r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]|gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"
_NAME: Final = (r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", 253, "the name of an object in the namespace")
_RULES: Final = {
    # With the longest namespace and name the URI is as long as the schema allows.
    "checkpoint_prefix": (
        rf"({_BUCKET}|file:///[^/?#\s]+)(/[^/?#\s]+)*/?",
        700,
        "s3://bucket/prefix, gs://bucket/prefix or file:///folder, of at most 700 characters without //",
    ),
    "checkpoint_endpoint": (
        r"https?://[^/?#\s]+(/\S*)?",
        1024,
        "the URL of a server, such as https://minio.example.com:9000",
    ),
    "credentials_secret": _NAME,
    "service_account_name": _NAME,
}
"""Pattern and length of each text, and what it must be, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDefaults:
    """One level of defaults. Empty: this level has none."""

    checkpoint_prefix: str = ""
    """checkpoint.uri is `<prefix>/<namespace>/<name>`."""
    checkpoint_endpoint: str = ""
    credentials_secret: str = ""
    """Name of a Secret in the job's namespace."""
    service_account_name: str = ""
    """For templates that name none."""
    pools: tuple[str, ...] = ()
    """Names of the chart's pools, in order of preference."""


NO_DEFAULTS: Final = JobDefaults()
KEYS: Final = {camel(field.name): field.name for field in fields(JobDefaults)}


def of_config_map(raw: Mapping[str, Any] | None, namespace: str, pools: Collection[str]) -> JobDefaults:
    """Parses the ConfigMap of a namespace. Raises InvalidSpec, naming the key.

    Args:
        raw: The ConfigMap; None where there is none.
        namespace: The namespace, for messages.
        pools: Names of the chart's pools.
    """
    data = (raw or {}).get("data") or {}
    where = f"ConfigMap {namespace}/{DEFAULTS_CONFIG_MAP}"
    if unknown := sorted(data.keys() - KEYS.keys()):
        raise InvalidSpec(f"{where} has the unknown key {unknown[0]}; it may have: {', '.join(sorted(KEYS))}")
    values: dict[str, Any] = {KEYS[key]: str(text).strip() for key, text in data.items()}
    if "pools" in values:
        values["pools"] = tuple(name for part in values["pools"].split(",") if (name := part.strip()))
    found = JobDefaults(**values)
    if problem := problem_of(found, pools):
        raise InvalidSpec(f"{where}: {problem}")
    return found


def problem_of(level: JobDefaults, pools: Collection[str]) -> str:
    """Returns a sentence about a value that cannot be used; "" where there is none."""
    for name, (pattern, longest, must) in _RULES.items():
        text = getattr(level, name)
        if AZURE.match(text):
            return f"{camel(name)} is {text[:SHOWN]}: {NO_AZURE}"
        if text and (len(text) > longest or not re.fullmatch(pattern, text)):
            return f"{camel(name)} must be {must}, and is {text[:SHOWN]}"
    if len(level.pools) > POOLS_LIMIT:
        return f"pools has {len(level.pools)} names; the most is {POOLS_LIMIT}"
    unknown = next((name for name in level.pools if name not in pools), "")
    return unknown_pool("pools", unknown, pools) if unknown else ""


def applied(job: Job, namespace: JobDefaults, chart: JobDefaults) -> AppliedDefaults:
    """Returns what the job's spec leaves out and a level has; the namespace comes before the chart."""
    assert job.spec is not None
    account = namespace.service_account_name or chart.service_account_name
    return AppliedDefaults(
        checkpoint=_place(job.spec, job.key, namespace, chart),
        service_account_name="" if job.spec.service_account else account,
        pools=() if job.spec.capacity.pools else namespace.pools or chart.pools,
    )


def _place(
    spec: TrainingJobSpec, key: JobKey, namespace: JobDefaults, chart: JobDefaults
) -> CheckpointDefaults | None:
    if spec.checkpoint.uri or not spec.checkpoint.ours:
        return None
    levels = (namespace,) if namespace.checkpoint_prefix else (namespace, chart)
    prefix = levels[-1].checkpoint_prefix
    if not prefix:
        return None
    endpoint = next((level.checkpoint_endpoint for level in levels if level.checkpoint_endpoint), "")
    secret = next((level.credentials_secret for level in levels if level.credentials_secret), "")
    own = spec.checkpoint
    return CheckpointDefaults(
        uri=f"{prefix.rstrip('/')}/{key.namespace}/{key.name}",
        endpoint="" if own.endpoint else endpoint,
        credentials_secret_ref=ObjectRef(name=secret) if secret and not own.credentials_secret_ref else None,
    )
