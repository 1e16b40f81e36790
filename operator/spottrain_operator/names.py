"""Kubernetes names that more than one module uses: labels, annotations, taints, conditions, reasons.

Names shared with the runtime are in `spottrain.contract`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

from spottrain import contract

DOMAIN: Final = "spottrain.io"
GROUP: Final = "spottrain.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "TrainingJob"
PLURAL: Final = "trainingjobs"

DEFAULTS_CONFIG_MAP: Final = "spottrain-defaults"
"""Name of the ConfigMap with the defaults of a namespace."""

FIELD_MANAGER: Final = "spottrain-operator"
AGENT_FIELD_MANAGER: Final = "spottrain-agent"

# --- the account of our own pods ---------------------------------------------------------------------
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SERVICE_ACCOUNT_VARIABLE: Final = "SPOTTRAIN_SERVICE_ACCOUNT"
"""Environment variable with the folder of the service account's token and the API server's CA, where it is
not SERVICE_ACCOUNT."""


def service_account(env: Mapping[str, str]) -> Path:
    return Path(env.get(SERVICE_ACCOUNT_VARIABLE) or SERVICE_ACCOUNT)


# --- pods -------------------------------------------------------------------------------------------
JOB_LABEL: Final = f"{DOMAIN}/job"
JOB_UID_LABEL: Final = f"{DOMAIN}/job-uid"
ATTEMPT_LABEL: Final = f"{DOMAIN}/attempt"
RANK_LABEL: Final = f"{DOMAIN}/rank"
ROLE_LABEL: Final = f"{DOMAIN}/role"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "spottrain"
ROLE_TRAINER: Final = "trainer"
POD_SELECTOR: Final = f"{MANAGED_BY_LABEL}={MANAGED_BY},{ROLE_LABEL}={ROLE_TRAINER}"
"""Label selector of all trainer pods."""
OURS_SELECTOR: Final = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
"""Label selector of everything that the operator creates for jobs."""

OPERATOR_SELECTOR: Final = "app.kubernetes.io/name=spottrain,app.kubernetes.io/component=operator"
"""Label selector of the operator's Deployments that the chart installs."""
CHECKPOINTS_FINALIZER: Final = f"{DOMAIN}/checkpoints"
"""On a job with deletionPolicy Delete, until its checkpoints are gone."""
ROLE_CLEANUP: Final = "cleanup"
"""Role of the pod that deletes the checkpoints of a deleted job; its container has this name too."""
OUTCOME_FINALIZER: Final = f"{DOMAIN}/outcome"
"""Set when a pod is created, removed once the job's status records how the pod ended."""
TRAINER_ANNOTATION: Final = f"{DOMAIN}/trainer-container"
"""On a pod: name of the container whose end is the attempt's end. A webhook may insert others before it."""
AVOIDS_ANNOTATION: Final = f"{DOMAIN}/avoids"
"""On a pod: host names that its node affinity excludes, separated by commas."""
INTERRUPT_ANNOTATION: Final = contract.INTERRUPT_ANNOTATION
TEAM_LABEL: Final = f"{DOMAIN}/team"
"""On a TrainingJob: who it is for, as a label of the operator's metrics."""
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""On a TrainingJob: its Kueue LocalQueue, which a Workload asks. On a pod: Kueue admits that pod itself."""
QUEUE_PRIORITY_LABEL: Final = "kueue.x-k8s.io/priority-class"
"""On a TrainingJob: name of the WorkloadPriorityClass of its Workload."""
POD_SET_ANNOTATION: Final = f"{DOMAIN}/pod-set"
"""On a Workload: a digest of what it asks for."""
POOL_ANNOTATION: Final = f"{DOMAIN}/pool"
"""On a Workload: name and type of the pool whose nodes it asks for, with a digest of its node selector."""
TRAINER_CONTAINER: Final = "trainer"
SYNC_CONTAINER: Final = "spottrain-sync"
"""Name of the sidecar that restores and uploads a folder (checkpoint.mode Sync), and of its volume."""
INJECT_CONTAINER: Final = "spottrain-inject"
"""Name of the init container that writes the runtime to a volume (spec.runtime.inject), and of the volume."""
CLAIMS: Final = "persistentvolumeclaims"
"""Plural, as in the API's paths."""
GPU_RESOURCE: Final = "nvidia.com/gpu"
HOSTNAME_LABEL: Final = "kubernetes.io/hostname"

# --- termination notices: written by the agent, on pods also by the operator; read by both -----------
DEADLINE_ANNOTATION: Final = contract.DEADLINE_ANNOTATION
"""On pod and node: RFC 3339 UTC with microseconds."""
SAVE_ADVISED_ANNOTATION: Final = contract.SAVE_ADVISED_ANNOTATION
SOURCE_ANNOTATION: Final = f"{DOMAIN}/termination-source"
"""On pod and node: where the notice comes from, e.g. `AWS spot/instance-action`."""
AWS_SPOT_NOTICE: Final = "AWS spot/instance-action"
"""The agent's source of a notice with which EC2 takes a spot instance back."""
NOTICE_SEEN_ANNOTATION: Final = f"{DOMAIN}/notice-seen"
"""On the node: when the agent first read the notice (RFC 3339)."""
TERMINATING_TAINT: Final = f"{DOMAIN}/terminating"
"""Key of the node's taint; its value is the deadline in unix seconds, its effect NoSchedule."""

NODE_SILENCE: Final = 30
"""Seconds that a node may be unreachable before its pods are deleted; Kubernetes' default is 300."""

# --- node labels that a status shows -----------------------------------------------------------------
ZONE_LABEL: Final = "topology.kubernetes.io/zone"
KARPENTER_LABEL: Final = "karpenter.sh/nodepool"
NODE_POOLS: Final = "nodepools"
"""Karpenter's resource; plural, as in the API's paths."""
INSTANCE_TYPE_LABEL: Final = "node.kubernetes.io/instance-type"


class Platform(StrEnum):
    """`spec.capacity.pools[].platform`: what provisions the nodes, or the cloud they are in."""

    AUTO = "Auto"
    """Detected from the nodes, as are the labels of spot nodes."""

    EKS = "EKS"
    """Managed node groups."""
    KARPENTER = "Karpenter"
    GKE = "GKE"
    AKS = "AKS"

    AWS = "AWS"
    GCP = "GCP"
    AZURE = "Azure"


NOTICE_WINDOW: Final[dict[Platform, int]] = {
    Platform.AWS: 110,
    Platform.GCP: 25,
    Platform.GKE: 15,
    Platform.AZURE: 25,
}
"""Seconds of grace that a pod can rely on after a notice: the platform's warning minus detection time."""
ON_DEMAND_WINDOW: Final = 110


class Condition(StrEnum):
    """Types in `status.conditions`."""

    ACCEPTED = "Accepted"
    ADMITTED = "Admitted"
    """By its Kueue queue; only of jobs that name one."""
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    CHECKPOINT_DURABLE = "CheckpointDurable"
    ON_TIME = "OnTime"
    """Only of jobs with a deadline."""
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STALLED = "Stalled"
    """For kstatus, and only while it is True."""


class Phase(StrEnum):
    """`status.phase`: for display only; decisions read conditions and counters."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    WAITING = "Waiting"
    STOPPING = "Stopping"
    SUSPENDED = "Suspended"
    INVALID = "Invalid"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Cause(StrEnum):
    """`status.attempts[].cause`: why an attempt ended."""

    DONE = "Done"
    BAD_CONFIGURATION = "BadConfiguration"
    SPOT_NOTICE = "SpotNotice"
    NODE_LOST = "NodeLost"
    NODE_SHUTDOWN = "NodeShutdown"
    NODE_FAULT = "NodeFault"
    DISRUPTED = "Disrupted"
    POD_DELETED = "PodDeleted"
    POD_REJECTED = "PodRejected"
    INTERRUPTED = "Interrupted"
    STORE_UNREACHABLE = "StoreUnreachable"
    SUPERSEDED = "Superseded"
    REPLACED = "Replaced"
    SCHEDULING_TIMEOUT = "SchedulingTimeout"
    START_FAILED = "StartFailed"
    SUSPENDED = "Suspended"
    STALLED = "Stalled"
    MOVED = "Moved"
    INTERRUPT_REQUESTED = "InterruptRequested"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    OUT_OF_MEMORY = "OutOfMemory"
    FAILED = "Failed"


def cause_of(text: str) -> Cause | str:
    """Returns the cause, or the text unchanged where a newer operator wrote a cause unknown to this one."""
    try:
        return Cause(text)
    except ValueError:
        return text


class Reason(StrEnum):
    """Reasons of conditions and Events that the operator defines itself, each with where it stands.

    docs/reference/conditions.md is made from these lines.
    """

    VALID = "Valid"
    """Accepted: the pod passed a dry run."""
    INVALID_SPEC = "InvalidSpec"
    """Accepted: a field of the spec, or a default of the team, is wrong; the message names it."""
    INVALID_TEMPLATE = "InvalidTemplate"
    """Accepted: the API server finds the rendered pod invalid."""
    REFUSED = "RefusedByAdmission"
    """Accepted: an admission plugin or webhook refuses the pod, or does not answer."""
    POD_NAME_TAKEN = "PodNameTaken"
    """Accepted: a pod of the attempt's name belongs to somebody else."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """Accepted: a ResourceQuota of the namespace is full."""
    UNSCHEDULABLE = "Unschedulable"
    """Scheduled: the scheduler's own words."""
    BOUND = "Bound"
    """Scheduled: all pods of the attempt have a node."""
    WAITING_FOR_POD = "WaitingForPod"
    """Scheduled, Running: pods are still to be created, or wait for the scheduler."""
    WAITING_FOR_QUEUE = "WaitingForQueue"
    """Admitted, Scheduled: the job waits for its Kueue queue."""
    ADMITTED = "Admitted"
    """Admitted: the queue has admitted the job."""
    EVICTED = "Evicted"
    """Admitted: Kueue has taken the quota back."""
    WAITING_FOR_BACKOFF = "WaitingForBackoff"
    """Scheduled: the next attempt waits after the end of the one before."""
    PREDECESSOR_SAVES = "DeletedJobStillSaving"
    """Scheduled: a pod of a deleted job of the same name still saves."""
    WAITING_FOR_NODE = "WaitingForNode"
    """Running: a pod has no node yet."""
    CONTAINER_STARTING = "ContainerStarting"
    """Running: the kubelet starts the pod."""
    TRAINING = "Training"
    """Running: the trainer runs."""
    NODE_NOT_READY = "NodeNotReady"
    """Running: the pod's node does not answer."""
    SIDECAR_CANNOT_START = "SidecarCannotStart"
    """Running: a sidecar cannot start; the trainer runs."""
    WAITING_FOR_RUNTIME = "WaitingForRuntime"
    """Running: no runtime has answered yet."""
    WAITING_FOR_TRAINING = "WaitingForTraining"
    """Running: the runtime answers, and no training has begun."""
    NO_RUNTIME = "NoRuntime"
    """Running, Failed: nothing answers as the runtime; the job fails once it is interrupted or ends."""
    RUNTIME_UNREACHABLE = "RuntimeUnreachable"
    """Running: the operator cannot reach the pod's port 9477."""
    NOT_TRAINING = "NotTraining"
    """Running: the runtime answers, and no training has begun for minutes."""
    NOT_DONE = "NotDone"
    """Failed: exit code 0, and no word that the training is done."""
    FIELDS_IGNORED = "FieldsIgnored"
    """Event: the script's loop does not apply some fields of spec.training."""
    GATED = "WaitingForPredecessor"
    """Running: the attempt waits until the one before has saved."""
    RESTORING = "RestoringFolder"
    """Running: the sidecar of mode Sync restores the folder."""
    UPLOADING = "UploadingLastCheckpoint"
    """Running: the script has ended, and the last checkpoint is uploaded."""
    NOT_UPLOADED = "LastCheckpointNotUploaded"
    """Event: in mode Sync the attempt ended before its last upload."""
    WAITING_FOR_STORE = "WaitingForStore"
    """Running: the attempt waits for its checkpoint store."""
    STORE_UNREACHABLE = "StoreUnreachable"
    """Running, Event, Failed: the store does not answer (failurePolicy.storeOutageSeconds)."""
    ENDED = "Ended"
    """Running: the job has ended."""
    NO_CHECKPOINT = "NoCheckpointYet"
    """CheckpointDurable: nothing is in the store yet."""
    DURABLE = "Durable"
    """CheckpointDurable: this step, or commit, is in the store."""
    COMPLETED = "Completed"
    """Succeeded: trained to the end."""
    EARLY_STOPPED = "EarlyStopped"
    """Succeeded: a metric reached its target, or stopped improving."""
    TOO_MANY_FAILURES = "TooManyFailures"
    """Failed: more failures than failurePolicy.maxFailures."""
    TOO_MANY_INTERRUPTIONS = "TooManyInterruptions"
    """Failed: more interruptions than failurePolicy.maxInterruptions."""
    NO_PROGRESS = "NoProgress"
    """Failed: too many interruptions in a row without one more saved step (failurePolicy.maxNoProgress)."""
    CANNOT_START = "CannotStart"
    """Failed: too many attempts in a row could not be started."""
    SUSPENDED = "Suspended"
    """Suspended, Scheduled: spec.suspend is true."""
    RESUMED = "Resumed"
    """Suspended: the job is not suspended any more."""
    MAX_COST_REACHED = "MaxCostReached"
    """Suspended, Scheduled: the job has cost capacity.maxCostUSD."""
    PRICE_UNKNOWN = "PriceUnknown"
    """Accepted: a limit in money cannot be kept, because a price is unknown."""
    ON_SCHEDULE = "OnSchedule"
    """OnTime: the work left fits before the deadline, or was done before it."""
    BEHIND_SCHEDULE = "BehindSchedule"
    """OnTime: the work left does not fit before the deadline."""
    WORK_UNKNOWN = "WorkUnknown"
    """OnTime: it is not known how much work is left."""
    DEADLINE_MISSED = "DeadlineMissed"
    """OnTime: the deadline is over."""
    STOPPING = "StoppingAttempt"
    """Running: the attempt saves and ends."""
    STILL_TRAINING = "StillTraining"
    """Running: a pod was deleted and still trains; it may not have received the signal."""
    BEING_DELETED = "BeingDeleted"
    """Running: the job is being deleted."""
    DELETING_CHECKPOINTS = "DeletingCheckpoints"
    """Running: a pod deletes the checkpoints of the deleted job."""
    CANNOT_DELETE_CHECKPOINTS = "CannotDeleteCheckpoints"
    """Running: that pod cannot be made, cannot start or fails."""
    CHECKPOINTS_LEFT = "CheckpointsLeft"
    """Event: the job is gone, and its checkpoints are left."""
    ATTEMPT_STARTED = "AttemptStarted"
    """Event: an attempt after the first, and why the one before ended."""
    RESTORED = "CheckpointRestored"
    """Event: the step from which an attempt goes on."""
    STEPS_LOST = "StepsLost"
    """Event: steps of an ended attempt that are in no checkpoint."""
    INTERRUPT_IGNORED = "InterruptIgnored"
    """Event: an interruption that was asked for, and did not happen."""
    JOB_HAS_ENDED = "JobHasEnded"
    """Event: a change of an ended job has no effect."""
    GRACE_CHANGED = "GracePeriodMismatch"
    """Event: the template's grace period is not what the pods get."""
    CAPACITY_UNKNOWN = "CapacityUnknown"
    """Event: cloud or spot labels of the nodes were not found."""
    CHECKPOINT_MAY_NOT_FIT = "CheckpointMayNotFit"
    """Event: a save at a notice may take longer than the grace period."""
    TRAINER_WARNS = "TrainerWarns"
    """Event: a warning of the trainer."""


UNKNOWN_STATE: Final = "Unknown"
"""`status.progress.state` of a trainer that does not report its state (checkpoint.mode Self)."""
NO_RUNTIME_STATE: Final = "NoRuntime"
"""`status.progress.state` of a trainer that should have the runtime, and does not have it."""
ILLEGAL_INSTRUCTION: Final = 128 + 4
"""Exit code after SIGILL: compiled kernels for another processor."""

HASH_DIGITS: Final = 8
"""Digits of the hash of a job's UID in the names of its objects."""
NAME_LIMIT: Final = 63
"""A pod's name is also its host name (RFC 1123 label)."""
RENDEZVOUS_PORT: Final = 29500
"""torch's default port; each pod has its own addresses, so two gangs cannot conflict."""


def pod_name(job: str, job_uid: str, attempt: int, rank: int = 0) -> str:
    """Returns a deterministic name: a crash between status write and POST can only recreate the same pod."""
    return object_name(job, job_uid, suffix=f"-{attempt}-{rank}")


def object_name(job: str, job_uid: str, *, prefix: str = "", suffix: str = "") -> str:
    """Returns the job's name, cut to fit, with a hash of its UID: another job of this name differs."""
    end = f"-{hashlib.sha256(job_uid.encode()).hexdigest()[:HASH_DIGITS]}{suffix}"
    room = NAME_LIMIT - len(prefix) - len(end)
    return prefix + job.replace(".", "-")[:room].rstrip("-") + end


def job_label(job: str) -> str:
    """Returns a job's name cut to a label's 63 characters; the UID label makes it unambiguous."""
    return job[:NAME_LIMIT].rstrip("-._")
