"""The TrainingJob as dataclasses, field by field the schema of crds/trainingjobs.yaml.

tests/contract compares the two. A job is parsed once, when it enters the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from spottrain.contract import OnExisting

from spottrain_operator.api import gpus, volumes, wire
from spottrain_operator.api.data_cache import DataCache
from spottrain_operator.api.node_pools import CapacityType, Pool, type_asked_for
from spottrain_operator.api.template import collision, template_problem
from spottrain_operator.api.volumes import ObjectRef
from spottrain_operator.errors import InvalidSpec
from spottrain_operator.names import CHECKPOINTS_FINALIZER, Condition

REASON_LIMIT: Final = 128
STATE_LIMIT: Final = 63
TIME_LIMIT: Final = 64
URI_LIMIT: Final = 2048
WARNING_LIMIT: Final = 1024
"""Characters that the schema allows in a status. The API server would reject the whole status for one longer
text, so texts from containers are cut on receipt."""


class CheckpointMode(StrEnum):
    """`spec.checkpoint.mode`: who saves and restores."""

    RUNTIME = "Runtime"
    """The spottrain runtime in the image. It also reports progress and the outcome."""
    SELF = "Self"
    """The image itself, or nobody."""


class CompileCache(StrEnum):
    """The value is not `Off`: YAML 1.1 reads a bare `Off` as a boolean."""

    KEEP = "Keep"
    NONE = "None"


class Logs(StrEnum):
    KEEP = "Keep"
    NONE = "None"


class DeletionPolicy(StrEnum):
    RETAIN = "Retain"
    DELETE = "Delete"


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDemandAfter:
    """When SpotFirst switches to on-demand for a while."""

    interruptions: int | None = 3
    within_seconds: int = 3600
    pending_seconds: int | None = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacitySpec:
    type: CapacityType = CapacityType.SPOT
    replace_during_notice: bool = True
    same_zone: bool = True
    pending_timeout_seconds: int = 900
    on_demand_after: OnDemandAfter = OnDemandAfter()
    return_to_spot_after_seconds: int = 3600
    pools: tuple[Pool, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Encryption:
    kms_key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSpec:
    mode: CheckpointMode = CheckpointMode.RUNTIME
    uri: str = ""
    interval: str = "10m"
    keep: int = 3
    keep_best: bool = True
    on_existing: OnExisting = OnExisting.FAIL
    endpoint: str = ""
    path_style: bool | None = None
    credentials_secret_ref: ObjectRef | None = None
    encryption: Encryption | None = None
    ca_bundle: volumes.CABundle | None = None
    compile_cache: CompileCache = CompileCache.KEEP
    logs: Logs = Logs.KEEP

    @property
    def managed(self) -> bool:
        """Whether our runtime is in the image. If not, only their order keeps attempts from overlapping."""
        return self.mode is CheckpointMode.RUNTIME


@dataclass(frozen=True, kw_only=True, slots=True)
class FailurePolicy:
    max_failures: int = 3
    max_interruptions: int = 100
    within_seconds: int | None = None
    max_no_progress: int | None = 10
    backoff_seconds: int = 10
    start_timeout_seconds: int = 300
    hang_timeout_seconds: int | None = None
    store_outage_seconds: int = 86400


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJobSpec:
    template: dict[str, Any]
    """{metadata?, spec}, as given; rendering/trainer_pod.py completes it."""
    training: dict[str, Any] = field(default_factory=dict)
    """Passed to the runtime unchanged; the schema has validated it."""
    workers: int = 1
    gpus_per_worker: int | None = None
    """None: as in the template, by default one (gpus.py)."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    data_cache: DataCache | None = None
    capacity: CapacitySpec = CapacitySpec()
    failure_policy: FailurePolicy = FailurePolicy()
    suspend: bool = False
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    deletion_policy: DeletionPolicy = DeletionPolicy.RETAIN
    queue_name: str = ""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> TrainingJobSpec:
        """Parses and validates a spec. Raises InvalidSpec for what the CRD's schema cannot reject."""
        if problem := removed(raw):
            raise InvalidSpec(problem)
        spec = wire.decode(cls, raw, "spec")
        if not isinstance(spec.template.get("spec"), dict):
            raise InvalidSpec("spec.template.spec must be a pod's spec")
        if problem := spec._problem():
            raise InvalidSpec(problem)
        return spec

    def _problem(self) -> str:
        """Returns a sentence about an error that the schema cannot detect; "" where the spec is valid."""
        pod, checkpoint = self.template["spec"], self.checkpoint
        if problem := template_problem(self.template) or gpus.problem(pod, self.gpus_per_worker):
            return problem
        if problem := self._other_capacity() or self._collision():
            return problem
        if checkpoint.ca_bundle is not None and (problem := volumes.ca_problem(pod)):
            return problem
        if self.data_cache is not None and (problem := self.data_cache.problem(pod, checkpoint.uri)):
            return problem
        spot_folder = self.on_spot and checkpoint.uri.startswith("file:")
        return volumes.folder_problem(pod, checkpoint.uri) if spot_folder else ""

    def _collision(self) -> str:
        managed, queue = self.checkpoint.managed, self.queue_name
        return collision(self.template, gang=self.workers > 1, managed=managed, queue=queue)

    def _other_capacity(self) -> str:
        """Rejects a node selector for another capacity type than spec.capacity's."""
        asked, wanted = type_asked_for(self.template["spec"].get("nodeSelector") or {}), self.capacity.type
        if asked is None or asked[1] is wanted:
            return ""
        label, kind = asked
        return (
            f"spec.template.spec.nodeSelector has {label}, and spec.capacity.type is {wanted}: "
            f"leave the label out, or set capacity.type to {kind}"
        )

    @property
    def gpus(self) -> gpus.Gpus:
        return gpus.of(self.template["spec"], self.gpus_per_worker)

    @property
    def replaces_during_notice(self) -> bool:
        """Whether the next attempt starts before the old one has ended.

        Only our runtime can wait until its predecessor has saved. A gang is excluded: its survivors occupy
        the nodes that its next attempt needs until they have saved.
        """
        alone = self.workers == 1 and not self.queue_name
        queued = self.template["spec"].get("schedulerName") == "volcano"
        return self.capacity.replace_during_notice and self.checkpoint.managed and alone and not queued

    def pools(self, default: Pool, named: Mapping[str, Pool]) -> tuple[Pool, ...]:
        """Returns the job's pools in order of preference. Raises InvalidSpec.

        A pool with only a name refers to one of the chart's. All pools get the job's type, unless it is
        SpotFirst.
        """
        pools = tuple(_known(pool, named) for pool in self.capacity.pools) or self._of_default(default)
        if self.capacity.type is not CapacityType.SPOT_FIRST:
            for pool in pools:
                _type_problem(pool, self.capacity.type)
            pools = tuple(replace(pool, type=self.capacity.type) for pool in pools)
            return self._agreed(pools)
        for kind in (CapacityType.SPOT, CapacityType.ON_DEMAND):
            if not any(pool.type is kind for pool in pools):
                raise InvalidSpec(
                    f"spec.capacity.pools has no pool of type {kind}, and capacity.type SpotFirst needs one: "
                    f"{', '.join(f'{p.name} is {p.type}' for p in pools)}"
                )
        return self._agreed(pools)

    def _agreed(self, pools: tuple[Pool, ...]) -> tuple[Pool, ...]:
        """Raises InvalidSpec where a pool and the template require different values of one label."""
        given = self.template["spec"].get("nodeSelector")
        for pool in pools:
            for label, value in pool.selector.items() if isinstance(given, dict) else ():
                if given.get(label, value) != value:
                    raise InvalidSpec(
                        f"spec.template.spec.nodeSelector has {label}: {given[label]}, and pool {pool.name} "
                        f"has {label}: {value}; leave it out of one of them"
                    )
        return pools

    def _of_default(self, default: Pool) -> tuple[Pool, ...]:
        """Returns the default pool; for SpotFirst with detected labels, one pool per type."""
        if self.capacity.type is not CapacityType.SPOT_FIRST or not default.finds_labels:
            return (default,)
        on_demand = replace(default, name=f"{default.name}-on-demand", type=CapacityType.ON_DEMAND)
        return (replace(default, type=CapacityType.SPOT), on_demand)

    @property
    def on_spot(self) -> bool:
        return self.capacity.type in (CapacityType.SPOT, CapacityType.SPOT_FIRST)


REMOVED: Final = {
    "checkpoint.managed": (
        "checkpoint.managed was replaced by mode in spottrain 0.2; write mode: Runtime in place of true, "
        "mode: Self in place of false"
    ),
    "checkpoint.credentialsSecret": (
        "checkpoint.credentialsSecret was replaced by credentialsSecretRef in spottrain 0.2; write "
        "credentialsSecretRef with the Secret's name in its field name"
    ),
    "checkpoint.caBundle.configMap": (
        "caBundle.configMap was replaced by configMapKeyRef in spottrain 0.2; "
        "write configMapKeyRef with name and key"
    ),
    "checkpoint.caBundle.secret": (
        "caBundle.secret was replaced by secretKeyRef in spottrain 0.2; write secretKeyRef with name and key"
    ),
    "checkpoint.caBundle.key": (
        "caBundle.key moved into configMapKeyRef and secretKeyRef in spottrain 0.2; write it there"
    ),
    "dataCache.claimName": (
        "dataCache.claimName was replaced by claimRef in spottrain 0.2; write claimRef with the claim's name "
        "in its field name"
    ),
    "training.data.workers": (
        "training.data.workers was renamed to numWorkers in spottrain 0.2; write numWorkers"
    ),
}
"""Fields of spottrain 0.1, with the schema's sentences. Objects that were stored then may still have them."""


def removed(raw: Any) -> str:
    """Returns a sentence about a field that no longer exists; "" where the spec has none."""
    for path, sentence in REMOVED.items():
        part = raw
        for step in path.split("."):
            part = part.get(step) if isinstance(part, Mapping) else None
        if part is not None:
            return f"spec.{path}: {sentence}"
    return ""


def _type_problem(pool: Pool, wanted: CapacityType) -> None:
    """Raises InvalidSpec where a pool's type contradicts the job's; spot, the default, is ignored."""
    if pool.type not in (CapacityType.SPOT, wanted):
        raise InvalidSpec(
            f"spec.capacity.pools: {pool.name} is of type {pool.type}, and spec.capacity.type is {wanted}, "
            f"which holds for all pools; set capacity.type to {pool.type} or SpotFirst, or leave the pool out"
        )


def _known(pool: Pool, named: Mapping[str, Pool]) -> Pool:
    if pool.where is not None:
        return pool
    if pool.name not in named:
        known = f"it knows {', '.join(sorted(named))}" if named else "it knows none"
        raise InvalidSpec(
            f"spec.capacity.pools: {pool.name} has neither platform nor preset, and the operator knows no "
            f"pool of this name ({known}; the chart's value pools names them)"
        )
    given = {name: value for name in ("node_selector", "tolerations") if (value := getattr(pool, name))}
    return replace(named[pool.name], **given)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionStatus:
    type: str
    status: str
    reason: str
    last_transition_time: datetime
    message: str = ""
    observed_generation: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """One pod of an attempt, recorded once it was seen."""

    rank: int
    node: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """One attempt and how it ended. `cause` is set when it is given up, `ended` when all pods have ended.

    `stopping`: the cause for which its pods were asked to stop, while some still run; `evidence`, `charged`
    and `reason` then refer to it. pod, node, zone, instance_type and exit_code are rank 0's.
    """

    number: int
    pod: str = ""
    node: str = ""
    zone: str = ""
    instance_type: str = ""
    capacity_type: str = ""
    pool: str = ""
    platform: str = ""
    notice_seconds: int | None = None
    node_labels: tuple[str, ...] = ()
    workers: int = 0
    started: datetime | None = None
    ended: datetime | None = None
    cause: str = ""
    evidence: str = ""
    charged: bool | None = None
    reason: str = ""
    stopping: str = ""
    faulty_node: str = ""
    """Name of the node whose hardware fault ended it; the next attempts avoid it."""
    start_error_since: datetime | None = None
    """Since when the kubelet fails to start it; None without a failure, or after a later success."""
    exit_code: int | None = None
    start_step: int | None = None
    last_step: int | None = None
    durable_step: int | None = None
    ranks: tuple[RankRecord, ...] = ()


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
    waiting_for: str = ""
    time: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputStatus:
    uri: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    observed_generation: int | None = None
    phase: str = ""
    ready: str = ""
    conditions: tuple[ConditionStatus, ...] = ()
    attempt: int = 0
    failures: int = 0
    interruptions: int = 0
    interruption_times: tuple[datetime, ...] = ()
    spot_reclaims: tuple[datetime, ...] = ()
    no_progress: int = 0
    interrupted_at_step: int | None = None
    active_since: datetime | None = None
    completion_time: datetime | None = None
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
    """Identity of a job; a job that is created again under the same name has another key."""

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
    deleted: datetime | None
    """When its deletion was requested."""
    holds_checkpoints: bool
    """Whether our finalizer keeps it until its checkpoints are gone."""
    spec: TrainingJobSpec | None
    invalid: str
    """A sentence about why `spec` is None."""
    status: Status

    @property
    def deleting(self) -> bool:
        return self.deleted is not None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Job:
        meta = raw["metadata"]
        spec, invalid = _parse_spec(raw.get("spec"))
        return cls(
            key=JobKey(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"]),
            resource_version=int(meta["resourceVersion"]),
            generation=int(meta.get("generation", 1)),
            deleted=wire.timestamp(meta["deletionTimestamp"]) if "deletionTimestamp" in meta else None,
            holds_checkpoints=CHECKPOINTS_FINALIZER in (meta.get("finalizers") or ()),
            spec=spec,
            invalid=invalid,
            status=Status.parse(raw.get("status") or {}),
        )


def _parse_spec(raw: Any) -> tuple[TrainingJobSpec | None, str]:
    try:
        return TrainingJobSpec.parse(raw), ""
    except InvalidSpec as error:
        return None, str(error)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # A template that the schema accepted must not stop the operator, which serves the other jobs.
        return (
            None,
            f"spec cannot be read ({type(error).__name__}: {error}); compare spec.template with a PodSpec",
        )


KEPT_ATTEMPTS = 20
KEPT_RANKS = 3
"""Number of latest attempts that keep a record of each pod; a gang may have a thousand."""


def with_record(status: Status, record: AttemptRecord) -> Status:
    others = [r for r in status.attempts if r.number != record.number]
    kept = sorted((*others, record), key=lambda r: r.number)[-KEPT_ATTEMPTS:]
    old = [replace(r, ranks=()) if r.ranks else r for r in kept[:-KEPT_RANKS]]
    return replace(status, attempts=(*old, *kept[-KEPT_RANKS:]))
