"""The operator's settings, from environment variables that the chart sets."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, PositiveInt, model_validator
from pydantic_settings import SettingsConfigDict
from spottrain.contract import BIND_ADDRESS, bind_address

from spottrain_operator.api import wire
from spottrain_operator.api.job_defaults import KEYS, NO_DEFAULTS, JobDefaults, problem_of
from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import Limits
from spottrain_operator.api.wire import decode
from spottrain_operator.environment import EnvironmentSettings, Seconds, Words, from_text
from spottrain_operator.names import Platform

DEFAULT_POOL = Pool(name="default", platform=Platform.AUTO)
PREFIX: Final = "SPOTTRAIN_OPERATOR_"


def _job_defaults(text: str) -> JobDefaults:
    given = {name: value for name, value in _json(text, dict).items() if value is not None}
    if unknown := sorted(given.keys() - KEYS.keys()):
        raise ValueError(f"it has the unknown field {unknown[0]}; it may have: {', '.join(sorted(KEYS))}")
    return decode(JobDefaults, given, "")


def _pools(text: str) -> tuple[Pool, ...]:
    pools = tuple(_pool(raw, f"[{i}]") for i, raw in enumerate(_json(text, list)))
    for i, pool in enumerate(pools):
        if pool.platform is None:
            raise ValueError(f"[{i}]: {pool.name} needs a platform")
    return pools


def _pool(raw: object, path: str) -> Pool:
    """Parses a pool. null is absent: in Helm's values it stands for no value."""
    given = {k: v for k, v in raw.items() if v is not None} if isinstance(raw, dict) else raw
    return decode(Pool, given, path)


def _json(text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it must be JSON: {error}") from error
    if not isinstance(value, kind):
        raise ValueError(f"it must be a JSON {'object' if kind is dict else 'array'}")
    return value


class Settings(EnvironmentSettings):
    """Each is the variable of its name in capitals, after PREFIX."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    namespaces: Words = ()
    """Namespaces to watch; empty = all."""
    default_pool: Annotated[
        Pool, from_text(lambda text: _pool(wire.encode(DEFAULT_POOL) | _json(text, dict), ""))
    ] = DEFAULT_POOL
    """For jobs without capacity.pools: JSON with the fields of spec.capacity.pools[]."""
    pools: Annotated[tuple[Pool, ...], from_text(_pools)] = ()
    """Pools that jobs may name: a JSON list with the fields of spec.capacity.pools[]."""
    job_defaults: Annotated[JobDefaults, from_text(_job_defaults)] = NO_DEFAULTS
    """For what a job's spec and its namespace leave out, as JSON."""
    sync_image: str = "spottrain-sync"
    """Image of the sidecar for checkpoint.mode Sync, and for runtime.inject: the target `sync` of the
    Dockerfile."""
    native_gangs: bool = True
    """Whether gangs use Kubernetes' own gang scheduling where the cluster serves it."""
    kueue: bool = False
    """Whether jobs with the label of a Kueue queue ask it by a Workload."""
    workers: PositiveInt = 16
    """Number of jobs that are reconciled at the same time."""
    resync_seconds: Seconds = 300
    """Between two LISTs of the jobs, and at most between two reconciles of one."""
    progress_seconds: Seconds = 10
    """Between two queries of a trainer's progress."""
    progress_write_seconds: Seconds = 60
    """Between two status writes that carry nothing but progress."""
    dead_slack_seconds: Seconds = 30
    """From a pod's grace period until an unready node counts as dead."""
    runtime_patience_seconds: Seconds = 300
    """From a container's start until a silent runtime is missing."""
    health_port: int = Field(default=8080, ge=0, le=65535)
    """Port of /livez, /readyz and /metrics; 0 = any free port."""
    bind_address: Annotated[str, AfterValidator(lambda text: bind_address({BIND_ADDRESS: text}))] = Field(
        default="", validation_alias=BIND_ADDRESS
    )
    """IP address of that port; empty = all. The variable has no prefix, because trainers read it too."""
    price_file: Path = Path("/etc/spottrain/prices/prices.json")
    """File with a person's own price list (`api.prices`); without it, its prices are unknown."""
    fetched_price_file: Path = Path("/etc/spottrain/prices/fetched.json")
    """File with the prices that the price CronJob fetches; there need not be one."""
    lease_namespace: str = ""
    """Namespace of the Lease that makes one of several replicas the leader. Empty: no Lease, and this process
    leads, so that it must be the only one."""
    lease_name: str = "spottrain-operator"
    identity: str = ""
    """Who this process is in the Lease; the pod's name. Empty: host name and a random part."""
    lease_seconds: int = Field(default=15, ge=2, le=3600)
    """Without a renewal for so long, a standby takes over. `control.leader.Times` derives the other times."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    @model_validator(mode="after")
    def _job_defaults_name_known_pools(self) -> Self:
        if problem := problem_of(self.job_defaults, [pool.name for pool in self.pools]):
            raise ValueError(f"{PREFIX}JOB_DEFAULTS: {problem}")
        return self

    @property
    def limits(self) -> Limits:
        return Limits(
            dead_slack=timedelta(seconds=self.dead_slack_seconds),
            progress_interval=timedelta(seconds=self.progress_write_seconds),
            runtime_patience=timedelta(seconds=self.runtime_patience_seconds),
        )
