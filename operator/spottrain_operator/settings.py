"""The operator's settings, from environment variables that the chart sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from spottrain_operator.api import wire
from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import Limits
from spottrain_operator.errors import InvalidSpec
from spottrain_operator.names import Platform

DEFAULT_POOL = Pool(name="default", platform=Platform.AUTO)
PREFIX = "SPOTTRAIN_OPERATOR_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty = all. NAMESPACES, separated by commas."""
    default_pool: Pool = DEFAULT_POOL
    """For jobs without capacity.pools. DEFAULT_POOL, as JSON with the fields of spec.capacity.pools[]."""
    pools: tuple[Pool, ...] = ()
    """Pools that jobs may name. POOLS, as JSON: a list with the fields of spec.capacity.pools[]."""
    native_gangs: bool = True
    """Whether gangs use Kubernetes' own gang scheduling where the cluster serves it. NATIVE_GANGS."""
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
    log_level: str = "INFO"
    """LOG_LEVEL."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Parses the environment. Raises ValueError or InvalidSpec, naming what is wrong."""
        given = {k.removeprefix(PREFIX).lower(): v for k, v in env.items() if k.startswith(PREFIX) and v}
        values: dict[str, object] = {}
        for name, text in given.items():
            if name == "namespaces":
                values[name] = tuple(n.strip() for n in text.split(",") if n.strip())
            elif name == "default_pool":
                values[name] = wire.decode(Pool, wire.encode(DEFAULT_POOL) | json.loads(text))
            elif name == "pools":
                values[name] = tuple(_named_pool(raw) for raw in json.loads(text))
            elif name in _NUMBERS:
                values[name] = _NUMBERS[name](text)
            elif name == "native_gangs":
                values[name] = _yes(text)
            elif name == "log_level":
                values[name] = text.upper()
        return cls(**values)  # type: ignore[arg-type]

    @property
    def limits(self) -> Limits:
        return Limits(
            margin=timedelta(seconds=self.deadline_margin_seconds),
            dead_slack=timedelta(seconds=self.dead_slack_seconds),
            progress_interval=timedelta(seconds=self.progress_write_seconds),
            runtime_patience=timedelta(seconds=self.runtime_patience_seconds),
        )


def _named_pool(raw: object) -> Pool:
    pool = wire.decode(Pool, raw, "pools[]")
    if pool.where is None:
        raise InvalidSpec(f"pools[]: {pool.name} needs a platform or a preset")
    return pool


def _yes(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{PREFIX}NATIVE_GANGS is {text!r}: it must be true or false")
    return text == "true"


_NUMBERS = {
    "workers": int,
    "health_port": int,
    "resync_seconds": float,
    "progress_seconds": float,
    "progress_write_seconds": float,
    "deadline_margin_seconds": float,
    "dead_slack_seconds": float,
    "runtime_patience_seconds": float,
}
