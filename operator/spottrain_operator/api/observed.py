"""What plan.py sees and what it answers: frozen values without behaviour of weight.

observe.py makes an Observed, plan.py turns it into a Plan, apply.py carries the Plan out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from spottrain.contract import Progress

from spottrain_operator.api.native_gangs import GangApi
from spottrain_operator.api.node_pools import NOTHING, Found, Pool
from spottrain_operator.api.training_job import Job, JobKey, Status
from spottrain_operator.names import TRAINER_CONTAINER, Cause, Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a container ended, as the kubelet tells it."""

    exit_code: int
    reason: str = ""
    message: str = ""
    started: datetime | None = None
    finished: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Why a container does not run yet, in the kubelet's words."""

    reason: str
    message: str = ""
    container: str = ""
    """Name of the container; "" where the whole pod waits, as for a volume."""

    @property
    def error(self) -> bool:
        """Whether the kubelet has failed at something; else it is only busy."""
        return self.reason not in ORDINARY_WAITS


ORDINARY_WAITS: Final = frozenset({"ContainerCreating", "PodInitializing", ""})
"""Reasons of a container that waits for its turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodEvents:
    """What the Events of a pod say that its status does not."""

    trouble: Waiting | None = None
    """Why the kubelet cannot set the pod up: its volumes, its sandbox."""
    slow: str = ""
    """What takes long without an error, such as attaching a volume."""
    set_up: bool = False
    """Volumes and sandbox are there, and containers are being started: from here on the status tells all."""
    pulling: bool = False
    """An image is being pulled at this moment."""
    probe: str = ""
    """Which probe the trainer has failed, so that the kubelet has killed it, and how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """An announced end of a node or pod."""

    deadline: datetime
    source: str
    seen: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PodView:
    """What decisions need of a pod."""

    name: str
    namespace: str
    uid: str
    job: JobKey
    resource_version: int
    attempt: int
    rank: int = 0
    stray: bool = False
    """Whether it only looks like a pod of the job: a copy, which has another name or no owner."""
    created: datetime
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    node: str = ""
    ip: str = ""
    grace: int = 30
    trainer: str = TRAINER_CONTAINER
    """Name of the container whose end is the attempt's end."""
    probed: bool = False
    """Whether the trainer has a probe that makes the kubelet end it."""
    others_run: bool = False
    """Whether a container beside the trainer's runs."""
    memory_limit: str = ""
    """Of the trainer's container."""
    deleted: datetime | None = None
    """deletionTimestamp: the request to delete it plus `deletion_grace`."""
    deletion_grace: int = 0
    holds_outcome: bool = False
    """Whether our finalizer is on it."""
    notice: Notice | None = None
    save_advised: str = ""
    """Time of the last advice to save that it was told."""
    running_since: datetime | None = None
    bound: datetime | None = None
    """When it was given its node; None where nobody knows."""
    waiting: Waiting | None = None
    """The first error of any of its containers, init containers first; else why its trainer waits."""
    ended: Ended | None = None
    unschedulable: str = ""
    queued: bool = False
    """Whether a scheduling gate, such as Kueue's, keeps it from the scheduler."""
    disruption: str = ""
    """Reason and message of DisruptionTarget=True."""
    unhealthy: str = ""
    """Which device of its trainer a device plugin calls unhealthy."""
    init_failure: str = ""
    """Which init container failed, and how, as a sentence."""
    avoids: tuple[str, ...] = ()
    """Host names that its node affinity keeps it off, because of notices when it was made."""
    pinned: str = ""
    """Host name that its node affinity keeps it on, where its rank was before."""
    grouped: bool = False
    """Whether it refers to a group of Kubernetes' own gang scheduling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """What decisions need of a node."""

    name: str
    resource_version: int
    ready: bool = True
    unready: str = ""
    """Why it is not ready, and since when, in the words of its condition."""
    fault: str = ""
    """What a health monitor says of its GPUs; "" where nothing is wrong."""
    hostname: str = ""
    zone: str = ""
    instance_type: str = ""
    notice: Notice | None = None
    save_advised: str = ""
    """Time of a rebalance recommendation."""
    leaving: str = ""
    """What says, without a deadline, that somebody is taking it out of service; "" where nobody is."""
    out_of_service: bool = False
    """Somebody who knows says that the machine is off."""
    karpenter: bool = False
    """Whether Karpenter has made it."""
    found: Found = NOTHING
    """What it tells of capacity and cloud."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimView:
    """What decisions need of a PersistentVolumeClaim."""

    name: str
    owner_uid: str = ""
    """Of the controller that it belongs to."""
    access_modes: tuple[str, ...] = ()
    bound: bool = False
    """Whether it has its volume. Some classes make that only when a pod has a node."""
    selected: bool = False
    """Whether such a class was given a node, and has not made the volume."""
    going: bool = False
    """Whether it is being deleted; no pod without a node gets one with it any more."""
    unread: str = ""
    """Why the API server does not say more of it than this; "" where it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The API server's no to a pod of ours, remembered so that plan.py can say it and wait."""

    generation: int
    reason: Reason
    message: str
    at: datetime
    retry: timedelta
    """When to ask again, though the job has not changed: the cluster may have."""

    @property
    def accepted(self) -> bool:
        """A full quota or a missing account speaks of the cluster at this moment, not of the job."""
        return self.reason is Reason.QUOTA_EXCEEDED


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Times that the settings may change."""

    margin: timedelta = timedelta(seconds=2)
    """Between the end of a pod's grace and its node's deadline."""
    told_lead: timedelta = timedelta(seconds=1)
    """Between a pod's annotation and its DELETE: an update in the same instant never reaches its file."""
    gate_slack: timedelta = timedelta(seconds=10)
    """Beyond the old pod's deletion deadline before the next attempt stops waiting for it."""
    dead_slack: timedelta = timedelta(seconds=30)
    """Beyond a pod's deletion deadline before a node that is not ready is taken for dead."""
    progress_interval: timedelta = timedelta(seconds=60)
    """Between two writes of status that carry nothing but progress."""
    runtime_patience: timedelta = timedelta(minutes=5)
    """That a script may import and prepare, before a runtime that has not been seen is said to be missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """An answer of a trainer's /progress."""

    progress: Progress
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """That a trainer did not answer when it was last asked for its progress."""

    pod_uid: str
    refused: bool
    """The pod was reached, and no runtime of ours listens there. False: it may not have been reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Everything that a decision about one job rests on."""

    now: datetime
    job: Job
    pods: tuple[PodView, ...] = ()
    strays: tuple[PodView, ...] = ()
    """Pods with the job's labels that are not its own."""
    predecessors: tuple[PodView, ...] = ()
    """Pods of deleted jobs of the same name; looked for before the first attempt only."""
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    """Those of all these pods, those that one without a node avoids, and all with a notice.
    A pod's node that is not here does not exist."""
    default_pool: Pool
    pools: Mapping[str, Pool] = field(default_factory=dict)
    """Those that the platform team has named, by name."""
    admitted: bool = False
    """The API server has accepted a dry run of this generation's pod."""
    refusal: Refusal | None = None
    sample: Sample | None = None
    silence: Silence | None = None
    watched_since: datetime | None = None
    """Since when this process asks trainers for their progress."""
    cleanup: Ended | None = None
    """How the pod that deletes the checkpoints of a deleted job has ended."""
    cleaning: bool = False
    """Whether there is such a pod."""
    cleanup_refused: str = ""
    """The API server's no to such a pod; a namespace that is being deleted takes none."""
    told: Mapping[str, datetime] = field(default_factory=dict)
    """By UID of a pod of the current attempt: when this process first saw the deadline on it, or first failed
    to put it there."""
    zoned: bool = True
    """Whether this cluster's nodes have a zone."""
    claims: Mapping[str, ClaimView | None] = field(default_factory=dict)
    """Claims of the pods' volumes, by name, as the API server has them now; None: there is none of that name.
    Asked for only where `policies.claims.wanted` names them."""
    volume_wait: datetime | None = None
    """Up to when, as far as this process has seen, a pod of the job may have waited for a volume."""
    heard: Mapping[str, PodEvents] = field(default_factory=dict)
    """By UID of a pod: its Events, as far as `policies.starting` asked for them and they could be read."""
    gang_api: GangApi | None = None
    """What this cluster serves of Kubernetes' own gang scheduling."""
    karpenter: bool = False
    """Whether Karpenter has made any of them."""
    found: Found = NOTHING
    """What all nodes, and Karpenter's NodePools, have told so far."""
    limits: Limits = Limits()


# --- what can be done -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotate:
    """Tell the trainer something, such as its deadline, by the files that its annotations become.

    Before the DELETE: an update in the same instant would not reach it.
    """

    pod: PodView
    words: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delete:
    pod: PodView
    grace: int | None = None
    """None: the pod's own."""
    needed: bool = False
    """Whether the status rests on it: where this fails, the status is not written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Take our finalizer off: its outcome is in the status, or nobody wants it."""

    pod: PodView


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteJob:
    """The job's own object: its time to live is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """Our finalizer on the job's own object, put on or taken off."""

    on: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Dry run of the pod."""

    manifest: dict[str, Any]
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Provide:
    """Make what the pods need beside themselves, such as a gang's Service, unless it is there."""

    kind: str
    """Plural, as in the API's paths."""
    group: str = ""
    """`group/version`; empty: the core group."""
    manifest: dict[str, Any]
    generation: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Create:
    manifest: dict[str, Any]
    generation: int
    attempt: int


Action = Annotate | Delete | DeleteJob | Hold | Release | Check | Provide | Create


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
    """A cause that this operator does not know is kept as it was written."""
    evidence: str
    charged: bool = False
    node: str = ""
    """Name of the node whose hardware has failed."""
    reason: str = ""
    """For the job's condition where the trainer gave one; else the cause."""
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One rule's answer."""

    reason: str
    message: str
    status: Status
    before: tuple[Action, ...] = ()
    """Tried before the status is written."""
    events: tuple[Event, ...] = ()
    """Beside those that follow from the change of the status."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Carried out in this order: before, status, after, events."""

    reason: str
    message: str
    before: tuple[Action, ...] = ()
    status: Status | None = None
    """None: nothing to write."""
    after: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    recheck_after: timedelta | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where one pod of an attempt may go, beside its pool."""

    rank: int = 0
    avoid: Sequence[str] = ()
    """Host names."""
    pin: str = ""
    """Host name."""
    leave: Sequence[str] = ()
    """Host names of nodes that other ranks come back to: there may be room for one pod, and it is theirs."""
    zoned: bool = True
    """Whether the cluster's nodes have zones, by which a gang can be kept together."""
    gang_api: GangApi | None = None
    """Of Kubernetes' own gang scheduling, where the attempt has a group of it."""
    soft: bool = False
    """Whether `avoid` and `leave` are wishes only (policies/newnodes.py)."""
