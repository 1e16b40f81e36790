"""The TrainingJob as dataclasses, field by field the schema of crds/trainingjobs.yaml.

tests/contract compares the two; `validation` fills them. A job is parsed once, when it enters the cache.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import Field
from spottrain.contract import OnExisting, SyncWhen

from spottrain_operator import names
from spottrain_operator.api import gpus, volumes, wire
from spottrain_operator.api.bookkeeping import TimeParts
from spottrain_operator.api.node_pools import CapacityType, Pool
from spottrain_operator.api.template import trainer_of
from spottrain_operator.api.volumes import DataCache, ObjectRef
from spottrain_operator.names import Condition

CHOICE_LIMIT: Final = 1024
REASON_LIMIT: Final = 128
STATE_LIMIT: Final = 63
TIME_LIMIT: Final = 64
URI_LIMIT: Final = 2048
WARNING_LIMIT: Final = 1024
INTERRUPT_LIMIT: Final = 64
"""Characters that the schema allows in a status. The API server would reject the whole status for one longer
text, so texts from containers are cut on receipt."""


class CheckpointMode(StrEnum):
    """`spec.checkpoint.mode`: who saves and restores."""

    RUNTIME = "Runtime"
    """The spottrain runtime in the image. It also reports progress and the outcome."""
    SELF = "Self"
    """The image itself, or nobody."""
    SYNC = "Sync"
    """A sidecar of the operator's, which uploads a folder of the pod and reports what is durable."""


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
class SpotFirst:
    """When type SpotFirst uses on-demand, and for how long."""

    interruptions: int = 3
    pending_seconds: int = 600
    return_after_seconds: int = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Cheapest:
    deadline: datetime | None = None
    """When the job must be done."""
    pending_seconds: int = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacitySpec:
    type: CapacityType = CapacityType.SPOT
    spot_first: SpotFirst = SpotFirst()
    cheapest: Cheapest = Cheapest()
    same_zone: bool = True
    pending_timeout_seconds: int = 900
    max_cost_usd: Annotated[Decimal, Field(gt=0, lt=10**9)] | None = None
    """None: without limit."""
    pools: tuple[Pool, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Encryption:
    kms_key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSpec:
    inject: bool = False
    """Whether the operator brings the runtime into the trainer's container, whose image lacks it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InitFrom:
    """Weights that the job's first attempt begins from. Either `uri` or `path` is set."""

    uri: str = ""
    """Checkpoint URI of another job."""
    path: str = ""
    """Absolute path in the container."""
    ignore: tuple[str, ...] = ()
    """Patterns of parameter names that are not loaded."""

    @property
    def source(self) -> str:
        return self.uri or self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSpec:
    mode: CheckpointMode = CheckpointMode.RUNTIME
    sync_path: str = ""
    sync_when: SyncWhen | None = None
    resume_args: tuple[str, ...] = ()
    uri: str = ""
    interval: str = "10m"
    keep: int = 3
    keep_best: bool = True
    on_existing: OnExisting = OnExisting.FAIL
    init_from: InitFrom | None = None
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

    @property
    def synced(self) -> bool:
        """Whether our sidecar uploads a folder of the pod."""
        return self.mode is CheckpointMode.SYNC

    @property
    def ours(self) -> bool:
        """Whether a program of ours saves and reports, in the image or beside it."""
        return self.mode is not CheckpointMode.SELF


@dataclass(frozen=True, kw_only=True, slots=True)
class FailurePolicy:
    max_failures: int = 3
    max_interruptions: int = 100
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
    runtime: RuntimeSpec = RuntimeSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    data_cache: DataCache | None = None
    capacity: CapacitySpec = CapacitySpec()
    failure_policy: FailurePolicy = FailurePolicy()
    suspend: bool = False
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    deletion_policy: DeletionPolicy = DeletionPolicy.RETAIN

    @property
    def pod(self) -> dict[str, Any]:
        """The template's PodSpec."""
        found: dict[str, Any] = self.template["spec"]
        return found

    @property
    def trainer(self) -> dict[str, Any]:
        """The template's container whose end is the attempt's end."""
        return trainer_of(self.pod["containers"])

    @property
    def gpus(self) -> gpus.Gpus:
        return gpus.of(self.pod, self.gpus_per_worker)

    @property
    def replaces_during_notice(self) -> bool:
        """Whether the next attempt starts before the old one has ended.

        Only our runtime can wait until its predecessor has saved. A gang is excluded: its survivors occupy
        the nodes that its next attempt needs until they have saved.
        """
        return self.workers == 1 and self.checkpoint.managed

    @property
    def on_spot(self) -> bool:
        return self.capacity.type is CapacityType.SPOT or self.capacity.type.mixes

    @property
    def service_account(self) -> str:
        """The template's; "" where it names none."""
        return str(self.pod.get("serviceAccountName") or self.pod.get("serviceAccount") or "")

    def with_defaults(self, defaults: AppliedDefaults) -> TrainingJobSpec:
        """Returns the spec with the place of its checkpoints and its service account filled in."""
        spec, place, account = self, defaults.checkpoint, defaults.service_account_name
        if place is not None and not spec.checkpoint.uri:
            given = spec.checkpoint
            checkpoint = replace(
                given,
                uri=place.uri,
                endpoint=given.endpoint or place.endpoint,
                credentials_secret_ref=given.credentials_secret_ref or place.credentials_secret_ref,
            )
            spec = replace(spec, checkpoint=checkpoint)
        if account and not spec.service_account:
            spec = replace(
                spec, template=spec.template | {"spec": spec.pod | {"serviceAccountName": account}}
            )
        return spec


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDefaults:
    """Where checkpoints are, for a job whose spec names no URI."""

    uri: str = ""
    endpoint: str = ""
    credentials_secret_ref: ObjectRef | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedDefaults:
    """What was filled in at acceptance where the spec is silent; it never changes afterwards."""

    checkpoint: CheckpointDefaults | None = None
    service_account_name: str = ""
    pools: tuple[str, ...] = ()
    """Names of the chart's pools."""


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
    """A pod of an attempt whose trainer ended with another exit code than that of rank 0."""

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
    choice: str = ""
    """Why, where capacity.type is Cheapest."""
    pool: str = ""
    platform: str = ""
    notice_seconds: int | None = None
    node_labels: tuple[str, ...] = ()
    workers: int = 0
    started: datetime | None = None
    bound: datetime | None = None
    """When the last of its pods got a node; None while one waits."""
    stepped: datetime | None = None
    """When it was first seen to have done a step of its own."""
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
    ran: bool | None = None
    """Whether a container of it that can write checkpoints ran, or may have; None: no pod of it was seen."""
    start_step: int | None = None
    last_step: int | None = None
    durable_step: int | None = None
    signal_to_durable_seconds: Decimal | None = None
    """Between rank 0's first request to stop and its last step in the store; None where it did not save."""
    spent: Decimal = Decimal(0)
    """US dollars of its nodes."""
    unknown_seconds: Decimal = Decimal(0)
    """Node-seconds of it whose price is not known; they are not in `spent`."""
    created_workers: int = 0
    """How many of its pods have been seen. Once all have, one that is missing is lost."""
    ranks: tuple[RankRecord, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all of its pods have been seen."""
        return self.created_workers >= max(self.workers, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressStatus:
    state: str = ""
    step: int | None = None
    total_steps: int | None = None
    loss: Decimal | None = None
    samples_per_second: Decimal | None = None
    eta_seconds: Decimal | None = None
    step_seconds: Decimal | None = None
    """Seconds of a step, with evaluations and saves; the predecessor's until an attempt has its own."""
    start_seconds: Decimal | None = None
    """Seconds from bound pods to a first step: of the latest start, or of a slower one not long ago."""
    durable_step: int | None = None
    durable_time: str = ""
    checkpoint_uri: str = ""
    save_seconds: Decimal | None = None
    emergency_seconds: Decimal | None = None
    grace_seconds: Decimal | None = None
    warning: str = ""
    waiting_for: str = ""
    ignored_settings: str = ""
    """Fields of spec.training that the script's loop does not apply, separated by commas."""
    steps: str = ""
    """For display: `120/500`; with mode Sync `checkpoint 12`."""
    remaining: str = ""
    """For display: `eta_seconds` as `1h30m`."""
    poll_time: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputStatus:
    uri: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostStatus:
    """Sums of a job, in US dollars."""

    spent: Decimal = Decimal(0)
    """use + boot + idle."""
    use: Decimal = Decimal(0)
    boot: Decimal = Decimal(0)
    idle: Decimal = Decimal(0)
    unknown_seconds: Decimal = Decimal(0)
    """Node-seconds whose price is not known; they are in none of the sums."""
    on_demand_ideal: Decimal = Decimal(0)
    """The part of it that a run without interruptions pays too (policies/saving.py)."""
    saving: str = ""
    """1 - spent / on_demand_ideal, as 61.7%; Unknown where any price or the trainer's time is."""
    update_time: datetime | None = None
    """Up to when the sums are."""
    lost_time: datetime | None = None
    """Until then the sums are those that the status had, because the bookkeeping was lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GoodputStatus(TimeParts):
    """Where the time went, in seconds. Its parts add up to `wanted`."""

    wanted: Decimal = Decimal(0)
    """From the first start to the end without suspensions; attempts that overlap count twice."""
    allocated: Decimal = Decimal(0)
    """Of these, while an attempt had all of its nodes."""
    runtime: str = ""
    """productive / allocated, as 93.4%; Unknown where no trainer has reported."""
    scheduling: str = ""
    """allocated / wanted."""
    paid: str = ""
    """Productive node-seconds / paid node-seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InterruptStatus:
    """What became of the last request for an interruption (policies/interrupt.py)."""

    request: str = ""
    """Value of the annotation, cut to INTERRUPT_LIMIT."""
    attempt: int | None = None
    """The attempt that was interrupted; None where none was."""
    message: str = ""
    """Why none was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    observed_generation: int | None = None
    phase: str = ""
    workers: int | None = None
    """Number of pods of the current attempt."""
    ready_workers: int = 0
    """How many of them run."""
    conditions: tuple[ConditionStatus, ...] = ()
    defaults: AppliedDefaults | None = None
    template_hash: str = ""
    """`Job.template_hash` when the job could change it last."""
    attempt: int = 0
    failures: int = 0
    interruptions: int = 0
    failed_starts: int = 0
    no_progress: int = 0
    interrupted_at_step: int | None = None
    interruption_time: datetime | None = None
    """Since when no attempt trains because of an interruption; None while one does, or none has trained."""
    store_unreachable_time: datetime | None = None
    """Since when the checkpoint store does not respond."""
    active_since: datetime | None = None
    completion_time: datetime | None = None
    gate_until: datetime | None = None
    next_start: datetime | None = None
    known_durable_step: int | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    progress: ProgressStatus | None = None
    output: OutputStatus | None = None
    interrupt: InterruptStatus | None = None
    cost: CostStatus | None = None
    goodput: GoodputStatus | None = None

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

    @property
    def current(self) -> AttemptRecord | None:
        """The record of the attempt `attempt`."""
        return self.record(self.attempt)

    @property
    def previous(self) -> AttemptRecord | None:
        """The record of the attempt before `attempt`."""
        return next((r for r in reversed(self.attempts) if r.number < self.attempt), None)

    @property
    def over(self) -> tuple[AttemptRecord, ...]:
        """The attempts that were given up, without requests."""
        return tuple(r for r in self.attempts if r.cause and r.number <= self.attempt)

    @property
    def asked(self) -> tuple[AttemptRecord, ...]:
        """Requests for spot that were made beside the current attempt (policies/handover.py)."""
        return tuple(r for r in self.attempts if r.number > self.attempt)

    @property
    def asking(self) -> AttemptRecord | None:
        """The one that is open."""
        return next((r for r in self.asked if not r.cause), None)

    @property
    def next_number(self) -> int:
        """The number of the next attempt or request. None is used twice: it is in the names of pods."""
        return max((self.attempt, *(r.number for r in self.attempts))) + 1

    @property
    def state(self) -> str:
        """The trainer's state; "" where it is not known."""
        return self.progress.state if self.progress is not None else ""

    def record(self, number: int) -> AttemptRecord | None:
        return next((r for r in reversed(self.attempts) if r.number == number), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobKey:
    """Identity of a job; a job that is created again under the same name has another key."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}/{self.uid[:8]}"

    @classmethod
    def of_owner(cls, meta: Mapping[str, Any]) -> JobKey | None:
        """Returns the job that controls an object; None where something else does, or nothing."""
        owners = (owner for owner in meta.get("ownerReferences") or () if owner.get("controller"))
        owner: dict[str, str] = next(owners, {})
        ours = owner.get("kind") == names.KIND and owner.get("apiVersion", "").startswith(f"{names.GROUP}/")
        return cls(namespace=meta["namespace"], name=owner["name"], uid=owner["uid"]) if ours else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A TrainingJob as the cache holds it."""

    key: JobKey
    resource_version: int
    generation: int
    created: datetime | None
    deleted: datetime | None
    """When its deletion was requested."""
    holds_checkpoints: bool
    """Whether our finalizer keeps it until its checkpoints are gone."""
    spec: TrainingJobSpec | None
    """With the defaults of its status filled in."""
    invalid: str
    """A sentence about why `spec` is None."""
    status: Status
    template_hash: str = ""
    """Of what must not change under a running attempt; "" where `spec` is None."""
    team: str = ""
    """Its label `spottrain.io/team`."""
    queue: str = ""
    """Name of the Kueue LocalQueue that must admit it, from its label; "" without one."""
    queue_priority: str = ""
    """Name of its WorkloadPriorityClass, from its label."""
    interrupt: str = ""
    """Value of its annotation `spottrain.io/interrupt`, cut to INTERRUPT_LIMIT."""
    old_status: Mapping[str, Any] | None = None
    """A status as version 0.3 wrote it, until this version has written it."""

    @property
    def valid_spec(self) -> TrainingJobSpec:
        """The spec of a job that has one."""
        assert self.spec is not None, self.invalid
        return self.spec

    @property
    def deleting(self) -> bool:
        return self.deleted is not None

    @property
    def managed(self) -> bool:
        """Whether its spec can be read, and says that our runtime is in the image."""
        return self.spec is not None and self.spec.checkpoint.managed

    @property
    def synced(self) -> bool:
        """Whether its spec can be read, and says that our sidecar uploads a folder."""
        return self.spec is not None and self.spec.checkpoint.synced

    @property
    def takes_defaults(self) -> bool:
        """Whether defaults may still be filled in: never accepted, and its spec leaves something out."""
        spec, status = self.spec, self.status
        if spec is None or self.deleting or status.terminal:
            return False
        if status.attempt or status.defaults is not None or status.is_true(Condition.ACCEPTED):
            return False
        complete = spec.checkpoint.uri or not spec.checkpoint.ours
        return not (complete and spec.capacity.pools and spec.service_account)

    # --- names of its objects ---
    def pod_name(self, attempt: int, rank: int = 0) -> str:
        return names.pod_name(self.key.name, self.key.uid, attempt, rank)

    @property
    def service_name(self) -> str:
        """Of a gang's headless Service; it begins with a letter (RFC 1035)."""
        return names.object_name(self.key.name, self.key.uid, prefix="gang-")

    def group_name(self, attempt: int) -> str:
        """Of an attempt's PodGroup."""
        return names.object_name(self.key.name, self.key.uid, suffix=f"-{attempt}")

    @property
    def workload_name(self) -> str:
        return names.object_name(self.key.name, self.key.uid, suffix="-workload")

    @property
    def books_name(self) -> str:
        """Of the ConfigMap with the bookkeeping."""
        return names.object_name(self.key.name, self.key.uid, suffix="-books")

    @property
    def cleanup_name(self) -> str:
        """Of the pod that deletes the checkpoints of a deleted job."""
        return names.object_name(self.key.name, self.key.uid, suffix="-cleanup")


KEPT_ATTEMPTS: Final = 10
"""Number of latest attempts in the status. Its other counters tell of the earlier ones."""
KEPT_WHOLE: Final = 2
"""Number of latest attempts whose texts are kept whole."""
EVIDENCE_LIMIT: Final = 800
OLD_EVIDENCE_LIMIT: Final = 120


def with_record(status: Status, record: AttemptRecord) -> Status:
    if status.record(record.number) == record:
        return status
    others = [r for r in status.attempts if r.number != record.number]
    every = sorted((*others, record), key=lambda r: r.number)
    current = status.attempt  # stays whole, however many requests came after it
    kept = [r for r in every[:-KEPT_ATTEMPTS] if r.number == current] + every[-KEPT_ATTEMPTS:]
    recent, newest = {r.number for r in kept[-KEPT_WHOLE:]}, kept[-1].number

    def shown(record: AttemptRecord) -> AttemptRecord:
        """Returns the record of an attempt that is over without what only a running one needs."""
        if record.number in (current, newest):
            return record
        if record.number in recent:
            return replace(record, choice="")
        evidence = textwrap.shorten(record.evidence, OLD_EVIDENCE_LIMIT, placeholder=" ...")
        return replace(
            record, evidence=evidence, pod="", choice="", platform="", notice_seconds=None, ranks=()
        )

    return replace(status, attempts=tuple(map(shown, kept)))
