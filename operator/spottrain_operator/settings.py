"""The operator's settings, from environment variables that the chart sets."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from spottrain.contract import bind_address

from spottrain_operator.api import wire
from spottrain_operator.api.job_defaults import KEYS, NO_DEFAULTS, JobDefaults, problem_of
from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import Limits
from spottrain_operator.api.validation import decode
from spottrain_operator.errors import InvalidSpec
from spottrain_operator.names import Platform

DEFAULT_POOL = Pool(name="default", platform=Platform.AUTO)
PREFIX: Final = "SPOTTRAIN_OPERATOR_"
SHOWN: Final = 200
"""Maximum number of characters of a value in an error message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty = all. NAMESPACES, separated by commas."""
    default_pool: Pool = DEFAULT_POOL
    """For jobs without capacity.pools. DEFAULT_POOL, as JSON with the fields of spec.capacity.pools[]."""
    pools: tuple[Pool, ...] = ()
    """Pools that jobs may name. POOLS, as JSON: a list with the fields of spec.capacity.pools[]."""
    job_defaults: JobDefaults = NO_DEFAULTS
    """For what a job's spec and its namespace leave out. JOB_DEFAULTS, as JSON."""
    sync_image: str = "spottrain-sync"
    """Image of the sidecar for checkpoint.mode Sync, and for runtime.inject: the target `sync` of the
    Dockerfile. SYNC_IMAGE."""
    native_gangs: bool = True
    """Whether gangs use Kubernetes' own gang scheduling where the cluster serves it. NATIVE_GANGS."""
    kueue: bool = False
    """Whether jobs with the label of a Kueue queue ask it by a Workload. KUEUE."""
    workers: int = 16
    """Number of jobs that are reconciled at the same time. WORKERS."""
    resync_seconds: float = 300
    """Seconds between two complete LISTs, which correct what a watch has missed. RESYNC_SECONDS."""
    progress_seconds: float = 10
    """Seconds between two queries of a trainer's progress. PROGRESS_SECONDS."""
    progress_write_seconds: float = 60
    """Seconds between two status writes that carry nothing but progress. PROGRESS_WRITE_SECONDS."""
    deadline_margin_seconds: float = 2
    """Seconds between the end of a pod's grace period and its node's deadline. DEADLINE_MARGIN_SECONDS."""
    dead_slack_seconds: float = 30
    """Seconds after a pod's grace period until an unready node counts as dead. DEAD_SLACK_SECONDS."""
    runtime_patience_seconds: float = 300
    """Seconds after a container's start until a silent runtime is missing. RUNTIME_PATIENCE_SECONDS."""
    health_port: int = 8080
    """Port of /livez, /readyz and /metrics. HEALTH_PORT; 0 = any free port."""
    bind_address: str = ""
    """IP address of that port; empty = all. SPOTTRAIN_BIND_ADDRESS, without the prefix of the others."""
    price_file: Path = Path("/etc/spottrain/prices/prices.json")
    """File with a person's own price list (`api.prices`); without it, its prices are unknown. PRICE_FILE."""
    fetched_price_file: Path = Path("/etc/spottrain/prices/fetched.json")
    """File with the prices that the price CronJob fetches; there need not be one. FETCHED_PRICE_FILE."""
    lease_namespace: str = ""
    """Namespace of the Lease that makes one of several replicas the leader. LEASE_NAMESPACE; empty: no Lease,
    and this process leads, so that it must be the only one."""
    lease_name: str = "spottrain-operator"
    """LEASE_NAME."""
    identity: str = ""
    """Who this process is in the Lease; the pod's name. IDENTITY; empty: host name and a random part."""
    lease_seconds: int = 15
    """Seconds without a renewal after which a standby takes over. LEASE_SECONDS."""
    renew_deadline_seconds: float = 12
    """Seconds without a renewal after which the leader's process ends. RENEW_DEADLINE_SECONDS."""
    lease_retry_seconds: float = 2
    """Seconds between two renewals, and between two looks of a standby. LEASE_RETRY_SECONDS."""
    write_timeout_seconds: float = 11
    """Limit of one write. Admission webhooks may take 10 seconds by default. WRITE_TIMEOUT_SECONDS."""
    log_level: str = "INFO"
    """LOG_LEVEL."""

    def __post_init__(self) -> None:
        """Raises ValueError where the times of the Lease do not fit together."""
        if not 0 < self.lease_retry_seconds < self.renew_deadline_seconds < self.lease_seconds:
            raise ValueError(
                f"LEASE_RETRY_SECONDS ({self.lease_retry_seconds:g}) must be above 0 and below "
                f"RENEW_DEADLINE_SECONDS ({self.renew_deadline_seconds:g}), and that below LEASE_SECONDS "
                f"({self.lease_seconds}): the leader must have stopped before another process takes over"
            )
        if not 0 < self.write_timeout_seconds < self.renew_deadline_seconds:
            raise ValueError(
                f"WRITE_TIMEOUT_SECONDS ({self.write_timeout_seconds:g}) must be above 0 and below "
                f"RENEW_DEADLINE_SECONDS ({self.renew_deadline_seconds:g}): "
                "a write must end before its process stops to lead"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Parses the environment; an empty value is the default. Raises ValueError, naming the variable."""
        values: dict[str, Any] = {"bind_address": bind_address(env)}
        for variable, text in env.items():
            if not variable.startswith(PREFIX) or not text or _SERVICE_LINK.fullmatch(f"{variable}={text}"):
                continue
            name = variable.removeprefix(PREFIX)
            parse = _PARSERS.get(name)
            if parse is None:
                known = ", ".join(sorted(_PARSERS))
                raise ValueError(f"{variable} is unknown; after {PREFIX} may follow: {known}")
            try:
                values[name.lower()] = parse(text)
            except (InvalidSpec, ValueError) as error:
                raise ValueError(f"{variable}={text[:SHOWN]}: {error}") from error
        settings = cls(**values)
        if problem := problem_of(settings.job_defaults, [pool.name for pool in settings.pools]):
            raise ValueError(f"{PREFIX}JOB_DEFAULTS: {problem}")
        return settings

    @property
    def limits(self) -> Limits:
        return Limits(
            margin=timedelta(seconds=self.deadline_margin_seconds),
            dead_slack=timedelta(seconds=self.dead_slack_seconds),
            progress_interval=timedelta(seconds=self.progress_write_seconds),
            runtime_patience=timedelta(seconds=self.runtime_patience_seconds),
        )


def _namespaces(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _default_pool(text: str) -> Pool:
    return _pool(wire.encode(DEFAULT_POOL) | _json(text, dict), "")


def _pools(text: str) -> tuple[Pool, ...]:
    return tuple(_named_pool(raw, f"[{i}]") for i, raw in enumerate(_json(text, list)))


def _job_defaults(text: str) -> JobDefaults:
    given = {name: value for name, value in _json(text, dict).items() if value is not None}
    if unknown := sorted(given.keys() - KEYS.keys()):
        raise ValueError(f"it has the unknown field {unknown[0]}; it may have: {', '.join(sorted(KEYS))}")
    return decode(JobDefaults, given, "")


def _pool(raw: object, path: str) -> Pool:
    """Parses a pool. null is absent: in Helm's values it stands for no value."""
    given = {k: v for k, v in raw.items() if v is not None} if isinstance(raw, dict) else raw
    return decode(Pool, given, path)


def _named_pool(raw: object, path: str) -> Pool:
    pool = _pool(raw, path)
    if pool.platform is None:
        raise InvalidSpec(f"{path}: {pool.name} needs a platform")
    return pool


def _json(text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it must be JSON: {error}") from error
    if not isinstance(value, kind):
        raise ValueError(f"it must be a JSON {'object' if kind is dict else 'array'}")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("it must be a whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError("it must be a number of seconds")
    return value


def _yes(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("it must be true or false")
    return text == "true"


def _level(text: str) -> str:
    levels = logging.getLevelNamesMapping()
    if text.upper() not in levels:
        raise ValueError(f"it must be one of {', '.join(levels)}")
    return text.upper()


_BY_NAME: Final[Mapping[str, Callable[[str], object]]] = {
    "namespaces": _namespaces,
    "default_pool": _default_pool,
    "pools": _pools,
    "job_defaults": _job_defaults,
    "log_level": _level,
    "price_file": Path,
    "fetched_price_file": Path,
}
_BY_TYPE: Final[Mapping[str, Callable[[str], object]]] = {
    "str": str,
    "int": _whole,
    "float": _seconds,
    "bool": _yes,
}
_PARSERS: Final[Mapping[str, Callable[[str], object]]] = {
    field.name.upper(): _BY_NAME.get(field.name) or _BY_TYPE[str(field.type)]
    for field in fields(Settings)
    if field.name != "bind_address"
}
_SERVICE_LINK: Final = re.compile(
    rf"{PREFIX}(\w+_)?"
    r"(SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=.*|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=.*|PORT=(tcp|udp|sctp)://.*)"
)
"""Variables that the kubelet adds for Services whose name begins with spottrain-operator."""
