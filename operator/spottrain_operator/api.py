"""The TrainingJob as dataclasses, field by field the schema of crds/trainingjobs.yaml.

tests/contract compares the two. Parsed once, in the job cache; everything after it works on these. Called
by caches, plan and status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from spottrain.contract import OnExisting

from spottrain_operator import volumes, wire
from spottrain_operator.errors import InvalidSpec
from spottrain_operator.names import NOTICE_WINDOW, ON_DEMAND_WINDOW, Condition, Platform
from spottrain_operator.template import template_problem

REASON_LIMIT: Final = 128
STATE_LIMIT: Final = 63
TIME_LIMIT: Final = 64
URI_LIMIT: Final = 2048
WARNING_LIMIT: Final = 1024
"""Characters that the schema allows in a status. The API server would refuse a longer word with all the rest,
so what a container says is cut where it comes in."""


class CapacityType(StrEnum):
    SPOT = "spot"
    ON_DEMAND = "onDemand"


class CompileCache(StrEnum):
    """Not `off`: a manifest's bare `off` is a boolean."""

    KEEP = "keep"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """A group of nodes, and how pods get onto it."""

    name: str
    platform: Platform
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacitySpec:
    type: CapacityType = CapacityType.SPOT
    replace_during_notice: bool = True
    pools: tuple[Pool, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Encryption:
    kms_key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CABundle:
    """One of `config_map` and `secret` is set."""

    config_map: str = ""
    secret: str = ""
    key: str = volumes.CA_NAME

    @property
    def source(self) -> dict[str, Any]:
        """A volume with nothing but the certificates, under a name of ours."""
        items = [{"key": self.key, "path": volumes.CA_NAME}]
        if self.secret:
            return {"secret": {"secretName": self.secret, "items": items}}
        return {"configMap": {"name": self.config_map, "items": items}}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSpec:
    managed: bool = True
    """Whether our runtime is in the image. If not, nothing gates and fences attempts but their order."""
    uri: str = ""
    interval: str = "10m"
    keep: int = 3
    keep_best: bool = True
    on_existing: OnExisting = OnExisting.FAIL
    endpoint: str = ""
    path_style: bool | None = None
    credentials_secret: str = ""
    encryption: Encryption | None = None
    ca_bundle: CABundle | None = None
    compile_cache: CompileCache = CompileCache.KEEP


@dataclass(frozen=True, kw_only=True, slots=True)
class FailurePolicy:
    max_failures: int = 3
    max_interruptions: int = 100
    backoff_seconds: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJobSpec:
    template: dict[str, Any]
    """{metadata?, spec}, as given; render.py fills it in."""
    training: dict[str, Any] = field(default_factory=dict)
    """Goes to the runtime as it is; the schema has checked it."""
    gpus_per_worker: int = 1
    checkpoint: CheckpointSpec = CheckpointSpec()
    capacity: CapacitySpec = CapacitySpec()
    failure_policy: FailurePolicy = FailurePolicy()

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> TrainingJobSpec:
        """Raises InvalidSpec. The API server has refused most of it already."""
        spec = wire.decode(cls, raw, "spec")
        if not isinstance(spec.template.get("spec"), dict):
            raise InvalidSpec("spec.template.spec must be a pod's spec")
        if problem := spec._problem():
            raise InvalidSpec(problem)
        return spec

    def _problem(self) -> str:
        """What the schema cannot see, as a sentence; "" where all is well."""
        pod, checkpoint = self.template["spec"], self.checkpoint
        if problem := template_problem(self.template):
            return problem
        if checkpoint.ca_bundle is not None and (problem := volumes.ca_problem(pod)):
            return problem
        spot_folder = self.capacity.type is CapacityType.SPOT and checkpoint.uri.startswith("file:")
        return volumes.folder_problem(pod, checkpoint.uri) if spot_folder else ""

    @property
    def replaces_during_notice(self) -> bool:
        """Only our runtime waits at a gate until its predecessor has saved."""
        return self.capacity.replace_during_notice and self.checkpoint.managed

    def pool(self, default: Pool) -> Pool:
        return self.capacity.pools[0] if self.capacity.pools else default

    def window(self, default: Pool) -> int:
        """Seconds of grace that a pod of this job can count on."""
        spot = self.capacity.type is CapacityType.SPOT
        return NOTICE_WINDOW[self.pool(default).platform] if spot else ON_DEMAND_WINDOW


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionStatus:
    type: str
    status: str
    reason: str
    last_transition_time: datetime
    message: str = ""
    observed_generation: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """One start and how it ended. `cause` is set when it is given up, `ended` when its trainer has ended."""

    number: int
    pod: str = ""
    node: str = ""
    zone: str = ""
    instance_type: str = ""
    capacity_type: str = ""
    started: datetime | None = None
    ended: datetime | None = None
    cause: str = ""
    evidence: str = ""
    charged: bool | None = None
    exit_code: int | None = None
    start_step: int | None = None
    last_step: int | None = None
    durable_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressStatus:
    state: str = ""
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    eta_seconds: float | None = None
    durable_step: int | None = None
    durable_time: str = ""
    checkpoint_uri: str = ""
    save_seconds: float | None = None
    emergency_seconds: float | None = None
    grace_seconds: float | None = None
    warning: str = ""
    time: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputStatus:
    uri: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    observed_generation: int | None = None
    phase: str = ""
    conditions: tuple[ConditionStatus, ...] = ()
    attempt: int = 0
    failures: int = 0
    interruptions: int = 0
    gate_until: datetime | None = None
    next_start: datetime | None = None
    known_durable_step: int | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    progress: ProgressStatus | None = None
    output: OutputStatus | None = None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Status:
        return wire.decode(cls, raw, "status")

    def to_json(self) -> dict[str, Any]:
        encoded: dict[str, Any] = wire.encode(self)
        return encoded

    def condition(self, kind: Condition) -> ConditionStatus | None:
        return next((c for c in self.conditions if c.type == kind), None)

    def is_true(self, kind: Condition) -> bool:
        found = self.condition(kind)
        return found is not None and found.status == "True"

    @property
    def terminal(self) -> bool:
        return self.is_true(Condition.SUCCEEDED) or self.is_true(Condition.FAILED)

    def record(self, number: int) -> AttemptRecord | None:
        return next((r for r in self.attempts if r.number == number), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobKey:
    """One life of one job: a job made again under the same name is another key."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}/{self.uid[:8]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A TrainingJob as the cache holds it."""

    key: JobKey
    resource_version: int
    generation: int
    deleting: bool
    spec: TrainingJobSpec | None
    invalid: str
    """Why `spec` is None, as a sentence."""
    status: Status

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Job:
        meta = raw["metadata"]
        spec, invalid = _parse_spec(raw.get("spec"))
        return cls(
            key=JobKey(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"]),
            resource_version=int(meta["resourceVersion"]),
            generation=int(meta.get("generation", 1)),
            deleting="deletionTimestamp" in meta,
            spec=spec,
            invalid=invalid,
            status=Status.parse(raw.get("status") or {}),
        )


def _parse_spec(raw: Any) -> tuple[TrainingJobSpec | None, str]:
    try:
        return TrainingJobSpec.parse(raw), ""
    except InvalidSpec as error:
        return None, str(error)
