"""What one reconcile observes, as frozen dataclasses: `Observed` and its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from spottrain.contract import Progress

from spottrain_operator.api.bookkeeping import NO_BOOKS, Bookkeeping
from spottrain_operator.api.kueue import NOTHING as NOTHING_ASSIGNED
from spottrain_operator.api.kueue import Admission, Assigned
from spottrain_operator.api.node_pools import NOTHING, Found, Pool
from spottrain_operator.api.prices import NO_PRICES, PriceList
from spottrain_operator.api.resources import NO_RESOURCES, Resources
from spottrain_operator.api.training_job import AppliedDefaults, Job, JobKey
from spottrain_operator.names import TRAINER_CONTAINER, Cause, Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a container ended, as the kubelet reports it."""

    exit_code: int
    reason: str = ""
    message: str = ""
    started: datetime | None = None
    finished: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncView:
    """The sidecar that restores and uploads a pod's folder (checkpoint.mode Sync)."""

    running: bool = False
    ended: Ended | None = None
    """How it ended; where the kubelet is about to restart it, how it ended last. None while it runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Why a container does not run yet, as the kubelet reports it."""

    reason: str
    message: str = ""
    container: str = ""
    """Name of the container; "" where the whole pod waits, for example for a volume."""

    @property
    def error(self) -> bool:
        """Whether the kubelet reports a failure; otherwise startup is in progress."""
        return self.reason not in ORDINARY_WAITS


ORDINARY_WAITS: Final = frozenset({"ContainerCreating", "PodInitializing", ""})
"""Waiting reasons of a normal startup."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodEvents:
    """Facts from a pod's Events that its status does not have."""

    trouble: Waiting | None = None
    """Why the kubelet cannot set up the pod's volumes or sandbox."""
    slow: str = ""
    """What is slow without an error, such as attaching a volume."""
    set_up: bool = False
    """Volumes and sandbox are ready, containers are being started: from now on the status is complete."""
    pulling: bool = False
    """An image is being pulled now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """An announced termination of a node or pod."""

    deadline: datetime
    source: str
    seen: datetime | None = None
    assumed: bool = False
    """Whether nobody has announced the deadline: it is what is usual on the platform."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodView:
    """The fields of a pod that decisions need."""

    name: str
    namespace: str
    uid: str
    job: JobKey
    resource_version: int
    attempt: int
    rank: int = 0
    created: datetime
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    node: str = ""
    ip: str = ""
    grace: int = 30
    trainer: str = TRAINER_CONTAINER
    """Name of the container whose end is the attempt's end."""
    others_run: bool = False
    """Whether a container other than the trainer runs."""
    memory_limit: str = ""
    """Memory limit of the trainer's container."""
    gpus: int = 0
    """GPUs of the trainer's container."""
    requests: Resources = NO_RESOURCES
    """CPU and memory of the whole pod."""
    deleted: datetime | None = None
    """deletionTimestamp: time of the delete request plus `deletion_grace` (seconds)."""
    deletion_grace: int = 0
    holds_outcome: bool = False
    """Whether it has our finalizer."""
    notice: Notice | None = None
    save_advised: str = ""
    """Time of the last advice to save that was annotated on it."""
    running_since: datetime | None = None
    bound: datetime | None = None
    """When it was bound to its node; None where unknown."""
    waiting: Waiting | None = None
    """The first error of any container, init containers first; otherwise why its trainer waits."""
    ended: Ended | None = None
    """How its trainer ended. With a sidecar that uploads, only when that has ended too."""
    sync: SyncView | None = None
    """None without such a sidecar."""
    uploading: Ended | None = None
    """How its trainer ended, while that sidecar goes on."""
    unschedulable: str = ""
    queued: bool = False
    """Whether a scheduling gate, such as Kueue's, holds it back from the scheduler."""
    disruption: str = ""
    """Reason and message of DisruptionTarget=True."""
    disrupted: datetime | None = None
    """Since when that is True."""
    unhealthy: str = ""
    """Which device of its trainer a device plugin reports as unhealthy."""
    init_failure: str = ""
    """A sentence about which init container failed, and how."""
    lost: str = ""
    """A sentence about a container whose end the kubelet does not know: its exit code is made up."""
    avoids: tuple[str, ...] = ()
    """Host names that its node affinity excludes, because of notices when it was created."""
    grouped: bool = False
    """Whether it refers to a group of Kubernetes' own gang scheduling."""


def without_reports(pod: PodView) -> PodView:
    """Returns a pod without the texts that its containers wrote."""

    def silent(ended: Ended | None) -> Ended | None:
        return replace(ended, message="") if ended is not None else None

    sync = replace(pod.sync, ended=silent(pod.sync.ended)) if pod.sync is not None else None
    ended, uploading = silent(pod.ended), silent(pod.uploading)
    return replace(pod, ended=ended, uploading=uploading, sync=sync, waiting=None, init_failure="")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """The fields of a node that decisions need."""

    name: str
    resource_version: int
    ready: bool = True
    unready: str = ""
    """Why it is not ready, and since when, from its condition."""
    fault: str = ""
    """A health monitor's report of faulty GPUs; "" where nothing is wrong."""
    hostname: str = ""
    zone: str = ""
    instance_type: str = ""
    created: datetime | None = None
    gpus: int = 0
    """GPUs that pods can request there, whole or in parts."""
    allocatable: Resources = NO_RESOURCES
    notice: Notice | None = None
    save_advised: str = ""
    """Time of a rebalance recommendation."""
    leaving: str = ""
    """A sentence about what takes it out of service without a deadline; "" where nothing does."""
    cordoned: bool = False
    """Whether it takes no new pods, as during a drain."""
    out_of_service: bool = False
    """Whether an administrator marked the machine as off."""
    karpenter: bool = False
    """Whether Karpenter provisioned it."""
    found: Found = NOTHING
    """Its capacity labels and platform."""

    @property
    def usable(self) -> bool:
        """Whether new pods can run there for long: it is ready and not cordoned, and nothing takes it out of
        service."""
        return self.ready and self.notice is None and not (self.leaving or self.cordoned)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The API server's rejection of one of our objects, remembered for the status and the next retry."""

    generation: int
    reason: Reason
    message: str
    at: datetime
    retry: timedelta
    """Delay before a retry although the job has not changed: the cluster may have."""

    @property
    def accepted(self) -> bool:
        """Whether the job itself is valid: an exceeded quota is a matter of the cluster, not of the job."""
        return self.reason is Reason.QUOTA_EXCEEDED


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Durations that the settings may change."""

    margin: timedelta = timedelta(seconds=2)
    """Between the end of a pod's grace period and its node's deadline."""
    annotation_lead: timedelta = timedelta(seconds=1)
    """Between a pod's annotation and its DELETE: an update at the same instant never reaches its file."""
    gate_slack: timedelta = timedelta(seconds=10)
    """After the old pod's deletion deadline, until the next attempt stops waiting for it."""
    dead_slack: timedelta = timedelta(seconds=30)
    """After a pod's deletion deadline, until a node that is not ready counts as dead."""
    progress_interval: timedelta = timedelta(seconds=60)
    """Between two status writes that carry nothing but progress."""
    cost_interval: timedelta = timedelta(minutes=5)
    """Between two status writes that carry nothing but costs."""
    books_interval: timedelta = timedelta(minutes=10)
    """Between two writes of the bookkeeping while no attempt ends."""
    runtime_patience: timedelta = timedelta(minutes=5)
    """For a script's imports and preparation, before an unseen runtime is reported as missing."""

    def spread(self, interval: timedelta) -> Limits:
        """Returns these, with so long at least between two writes of a job's figures, and twice as long
        between two of its bookkeeping, which is needed after a restart alone."""
        return replace(
            self,
            progress_interval=max(self.progress_interval, interval),
            cost_interval=max(self.cost_interval, interval),
            books_interval=max(self.books_interval, 2 * interval),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A response of a trainer's /progress."""

    progress: Progress
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """The last query of a trainer's progress failed."""

    pod_uid: str
    refused: bool
    """The pod was reached, but our runtime does not listen there. False: it may not have been reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """All inputs of a decision about one job."""

    now: datetime
    job: Job
    pods: tuple[PodView, ...] = ()
    predecessors: tuple[PodView, ...] = ()
    """Pods of deleted jobs of the same name; filled before the first attempt only."""
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    """By name: nodes of all these pods and of earlier ranks, nodes that a pending pod avoids, and
    all nodes that are faulty or about to end. A pod's node that is missing here does not exist."""
    default_pool: Pool
    pools: Mapping[str, Pool] = field(default_factory=dict)
    """The chart's pools, by name."""
    applied: AppliedDefaults | None = None
    """Defaults that are filled in at the job's acceptance; None where it was accepted, or needs none."""
    books: Bookkeeping = NO_BOOKS
    admitted: bool = False
    """Whether the API server has accepted a dry run of this generation's pod."""
    refusal: Refusal | None = None
    sample: Sample | None = None
    silence: Silence | None = None
    watched_since: datetime | None = None
    """Since when this process polls trainers for their progress."""
    others: tuple[PodView, ...] = ()
    """Pods of other jobs on nodes where this one is only paying for idle time, or shares by their number."""
    cleanup: Ended | None = None
    """How the pod that deletes the checkpoints of a deleted job has ended."""
    cleaning: bool = False
    """Whether that pod exists."""
    cleanup_refused: str = ""
    """Why that pod can never be created: its namespace is being deleted."""
    cleanup_trouble: str = ""
    """Why that pod is rejected for now, cannot start, or how it failed last; "" where nothing is wrong."""
    annotated_at: Mapping[str, datetime] = field(default_factory=dict)
    """By UID of a pod of the current attempt: when this process first saw its deadline annotation, or first
    failed to write it. The pod's DELETE comes `Limits.annotation_lead` later."""
    alone_since: datetime | None = None
    """Since when this process has seen no pod of an earlier attempt that may still write checkpoints. By its
    own clock, as the trainers' responses are; the times of pods are by others."""
    sync_image: str = ""
    """Image of the sidecar that uploads a folder (checkpoint.mode Sync)."""
    zoned: bool = True
    """Whether this cluster's nodes have a zone label."""
    claims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Access modes of the pods' claims by name, where they decide something; () where they are not known."""
    heard: Mapping[str, PodEvents] = field(default_factory=dict)
    """By pod UID: its Events, where `policies.starting` requested them and they could be read."""
    has_gangs: bool = False
    """Whether this cluster serves Kubernetes' own gang scheduling."""
    admission: Admission | None = None
    """By Kueue; None where the job names no queue and has no Workload."""
    karpenter: bool = False
    """Whether Karpenter provisioned any of the cluster's nodes."""
    found: Found = NOTHING
    """Detected so far from all nodes and Karpenter's NodePools."""
    limits: Limits = Limits()
    prices: PriceList = NO_PRICES

    def first(self, attempt: int) -> PodView | None:
        """Returns the pod of an attempt's rank 0."""
        return next((p for p in self.pods if p.attempt == attempt and p.rank == 0), None)

    @property
    def rejected(self) -> bool:
        """Whether the API server rejected this generation, and the retry is not due yet."""
        no = self.refusal
        return no is not None and no.generation == self.job.generation and self.now < no.at + no.retry


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A Kubernetes Event on the job."""

    warning: bool
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Why an attempt ended."""

    cause: Cause | str
    """A cause that this operator does not know is kept as a string."""
    evidence: str
    charged: bool = False
    node: str = ""
    """Name of the node whose hardware failed."""
    reason: str = ""
    """Reason for the job's condition, if the trainer gave one; otherwise the cause is used."""
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Scheduling constraints of one pod of an attempt, in addition to its pool."""

    rank: int = 0
    avoid: Sequence[str] = ()
    """Host names to exclude."""
    preferred_node: str = ""
    """Host name to prefer: the rank's last node."""
    zoned: bool = True
    """Whether the cluster's nodes have zones, so that a gang can be kept in one."""
    zone: str = ""
    """Zone to require, to which ranks return."""
    grouped: bool = False
    """Whether the attempt has a PodGroup."""
    assigned: Assigned = field(default=NOTHING_ASSIGNED, hash=False)
    """By the admission of the job's queue: the same for all ranks."""
    soft: bool = False
    """Whether `avoid` is a preference only (policies/placement.py)."""
