"""The words that operator and runtime share: environment, exit codes, S3 keys, termination message.

Standard library only. It is the one module of `spottrain` that the operator may import, and the one
place where either side may spell such a word (design.md section 3).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, fields
from enum import IntEnum, StrEnum
from typing import Any, Final


class Env(StrEnum):
    """Environment variables that the operator sets on the trainer's container."""

    JOB_NAME = "SPOTTRAIN_JOB_NAME"
    JOB_NAMESPACE = "SPOTTRAIN_JOB_NAMESPACE"
    JOB_UID = "SPOTTRAIN_JOB_UID"
    POD_UID = "SPOTTRAIN_POD_UID"
    """UID of this pod: `POST /stop` must name it. Never in what the progress port tells."""
    ATTEMPT = "SPOTTRAIN_ATTEMPT"
    """Number of this start, from 1. Fences a stale pod out of HEAD."""
    CHECKPOINT_URI = "SPOTTRAIN_CHECKPOINT_URI"
    """`s3://bucket/prefix`, `file:///folder` or a plain path."""
    CHECKPOINT_ENDPOINT = "SPOTTRAIN_CHECKPOINT_ENDPOINT"
    """URL of an S3-compatible server; absent means AWS."""
    CHECKPOINT_INTERVAL = "SPOTTRAIN_CHECKPOINT_INTERVAL"
    """`auto`, `500steps`, `90s`, `10m` or `1h`."""
    CHECKPOINT_KEEP = "SPOTTRAIN_CHECKPOINT_KEEP"
    """Committed checkpoints kept, at least 2."""
    CHECKPOINT_KEEP_BEST = "SPOTTRAIN_CHECKPOINT_KEEP_BEST"
    """`true` or `false`: whether the checkpoint with the lowest evaluation loss is kept beyond `keep`."""
    CHECKPOINT_PATH_STYLE = "SPOTTRAIN_CHECKPOINT_PATH_STYLE"
    """`true` or `false`: bucket in the path of S3's URLs; absent means: where an endpoint is set."""
    CHECKPOINT_KMS_KEY = "SPOTTRAIN_CHECKPOINT_KMS_KEY"
    """ID or ARN of the KMS key that S3 encrypts checkpoints with (SSE-KMS); `default`: the account's own."""
    CHECKPOINT_ON_EXISTING = "SPOTTRAIN_CHECKPOINT_ON_EXISTING"
    """What to do with another job's released HEAD: `OnExisting`."""
    KNOWN_DURABLE_STEP = "SPOTTRAIN_KNOWN_DURABLE_STEP"
    """Last step that the operator knows to be durable; absent when it knows of none. Forbids a new start."""
    GATE_UNTIL = "SPOTTRAIN_GATE_UNTIL"
    """Unix seconds until which this pod waits for its predecessor to release HEAD; 0 = do not wait."""
    GRACE_SECONDS = "SPOTTRAIN_GRACE_SECONDS"
    """terminationGracePeriodSeconds of this pod."""
    GPUS = "SPOTTRAIN_GPUS"
    """GPUs that the pod has asked for; 0 = CPU; absent: the container counts them."""
    TRAINING = "SPOTTRAIN_TRAINING"
    """spec.training as JSON (fields of `config.Training`)."""
    DEADLINE_FILE = "SPOTTRAIN_DEADLINE_FILE"
    """Path of the downward-API file that carries the termination deadline."""
    SAVE_ADVISED_FILE = "SPOTTRAIN_SAVE_ADVISED_FILE"
    """Path of the downward-API file with the time of the last advice to save (no stop); empty without one."""
    STORE_WAIT = "SPOTTRAIN_STORE_WAIT"
    """Seconds that a start, and the end of a training, wait for a store that does not answer; absent: 300."""
    HANG_TIMEOUT = "SPOTTRAIN_HANG_TIMEOUT"
    """Seconds without a step after which the training hangs; absent: by the measured step time."""
    LOGS = "SPOTTRAIN_LOGS"
    """`keep`: each rank's output goes to the store as well; `off`: it does not."""
    TERMINATION_MESSAGE = "SPOTTRAIN_TERMINATION_MESSAGE"
    """Path to which the termination message is written."""
    PROGRESS_PORT = "SPOTTRAIN_PROGRESS_PORT"
    """Port of `/progress` and `/metrics`; absent = not served."""
    CACHE_DIR = "SPOTTRAIN_CACHE_DIR"
    """Writable folder for compile caches and downloads."""
    DATA_CACHE = "SPOTTRAIN_DATA_CACHE"
    """Folder on a volume that all attempts share, for what is downloaded; absent where there is none."""
    COMPILE_CACHE = "SPOTTRAIN_COMPILE_CACHE"
    """`CompileCacheMode`; absent means `keep`."""
    IMAGE_DIGEST = "SPOTTRAIN_IMAGE_DIGEST"
    """Digest of the trainer's image, part of the compile cache's key; absent where nobody knows it."""
    WORKERS = "SPOTTRAIN_WORKERS"
    """Pods of the gang; absent means 1."""
    WORKER_INDEX = "SPOTTRAIN_WORKER_INDEX"
    """Number of this pod in the gang, from 0. Rank 0 lives in pod 0."""
    RENDEZVOUS = "SPOTTRAIN_RENDEZVOUS"
    """`host:port` of pod 0, where the ranks of all pods meet; set where there are several."""


PROFILE: Final = "SPOTTRAIN_PROFILE"
"""Environment variable that `spottrain profile` or a person sets, and the operator never: which steps are to
be profiled, as JSON (`diagnosis.window`). It wins over spec.training.profile."""


class ExitCode(IntEnum):
    """Exit codes of `spottrain run`. Any other non-zero code is a failure, and is charged."""

    DONE = 0
    FAILED = 1
    BAD_CONFIGURATION = 64
    """Permanent: configuration or state that no restart mends (EX_USAGE of sysexits.h)."""
    STORE_UNREACHABLE = 69
    """The checkpoint store did not answer for as long as a pod waits for it (EX_UNAVAILABLE)."""
    INTERRUPTED = 75
    """Interrupted; nothing lost since the last commit (EX_TEMPFAIL)."""
    SUPERSEDED = 76
    """A newer attempt owns HEAD."""
    INTERRUPTED_LOST = 79
    """Interrupted; the work since the last commit is lost."""


class Outcome(StrEnum):
    """`outcome` of the termination message. It outranks the exit code."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    INTERRUPTED_LOST = "interruptedLost"
    SUPERSEDED = "superseded"
    BAD_CONFIGURATION = "badConfiguration"
    STORE_UNREACHABLE = "storeUnreachable"
    FAILED = "failed"
    UNTRAINED = "untrained"
    """The script ended by itself, with exit code 0, and had begun no training with the runtime."""


EXIT_CODE_OF: Final[dict[Outcome, ExitCode]] = {
    Outcome.DONE: ExitCode.DONE,
    Outcome.UNTRAINED: ExitCode.DONE,
    Outcome.INTERRUPTED: ExitCode.INTERRUPTED,
    Outcome.INTERRUPTED_LOST: ExitCode.INTERRUPTED_LOST,
    Outcome.SUPERSEDED: ExitCode.SUPERSEDED,
    Outcome.BAD_CONFIGURATION: ExitCode.BAD_CONFIGURATION,
    Outcome.STORE_UNREACHABLE: ExitCode.STORE_UNREACHABLE,
    Outcome.FAILED: ExitCode.FAILED,
}


class OnExisting(StrEnum):
    """`spec.checkpoint.onExisting`: what a job does with the released HEAD of another job."""

    FAIL = "fail"
    RESUME = "resume"
    FRESH = "fresh"


class CompileCacheMode(StrEnum):
    """Values of Env.COMPILE_CACHE."""

    KEEP = "keep"
    """Restored, and saved beside the checkpoints."""
    DROP = "drop"
    """Not restored, once, and what was there is deleted: after exit 132 (SIGILL)."""
    OFF = "off"


class Reason(StrEnum):
    """Why a run could not go on: `reason` of the termination message, and of the job's condition."""

    BAD_CONFIGURATION = "BadConfiguration"
    SCRIPT_NOT_FOUND = "ScriptNotFound"
    SCRIPT_FAILED = "ScriptFailed"
    TRAINING_FAILED = "TrainingFailed"
    """The loss became NaN or infinite."""
    STORE_DENIED = "StoreDenied"
    """Credentials missing, wrong or without permission (401, 403)."""
    BUCKET_NOT_FOUND = "BucketNotFound"
    STORE_UNAVAILABLE = "StoreUnavailable"
    """The store did not answer, or answered 5xx, for longer than it is waited for."""
    STORE_UNSUITABLE = "StoreUnsuitable"
    """The store has no conditional PUT."""
    URI_IN_USE = "CheckpointURIInUse"
    """Another job owns HEAD of this URI, or has left it and onExisting is `fail`."""
    CHECKPOINT_MISSING = "CheckpointMissing"
    """The operator knows of a durable step, but HEAD is absent or lists no checkpoint that can be read."""
    CHECKPOINT_DAMAGED = "CheckpointDamaged"
    CHECKPOINT_INCOMPATIBLE = "CheckpointIncompatible"
    CHECKPOINT_ARCHIVED = "CheckpointArchived"
    """The objects were moved to an archive storage class and must be restored first."""
    PEER_LOST = "PeerLost"
    """Another rank of the gang is gone; this one ended because nothing can be computed without it."""
    DATA_CACHE_FULL = "DataCacheFull"
    """The volume for what is downloaded has no space left."""
    NODE_FAULT = "NodeFault"
    """A GPU has failed: the driver says so. Another node may do; nothing is charged."""
    NOT_TRAINED = "NotTrained"
    """The script ended without a training of the runtime's."""
    EARLY_STOPPED = "EarlyStopped"
    """Done before the last step, because an evaluation's figure got no better."""
    OUT_OF_MEMORY = "OutOfMemory"
    """The memory limit leaves no room for the buffers of a save; or a rank ran out in a step, and all go on
    with smaller micro-batches at their next start."""


GPU_FAULTS: Final = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "GPU is lost",
    "fallen off the bus",
    "fell off the bus",
    "GPU requires reset",
    "system not yet initialized",
)
"""What CUDA, NVML and the driver say when the hardware has failed. Not what a script can cause: "unspecified
launch failure", "illegal memory access" and the errors of NCCL are none of them."""


def gpu_fault(text: str) -> str:
    """The line of an error or of a log that says that a GPU has failed; "" where none does."""
    lines = (line.strip() for line in text.splitlines())
    low = [fault.lower() for fault in GPU_FAULTS]
    return next((line for line in lines if any(fault in line.lower() for fault in low)), "")


MESSAGE_LIMIT: Final = 4096
"""Bytes of a termination message that the kubelet keeps (Kubernetes API, terminationMessagePath)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TerminationMessage:
    """What a trainer leaves behind when it ends; JSON in the container's termination message."""

    outcome: Outcome
    reason: str = ""
    """CamelCase, of `Reason` where one fits."""
    message: str = ""
    """A sentence: what, where and what to do."""
    attempt: int = 0
    step: int | None = None
    """Optimizer steps done when it ended."""
    totalSteps: int | None = None
    startStep: int | None = None
    """Step from which this attempt went on: what its predecessors had made durable."""
    durableStep: int | None = None
    """Last step that HEAD names."""
    key: str = ""
    """Key of that checkpoint, below the URI."""
    signalledAt: float | None = None
    """Unix seconds at which it learnt of its end (SIGTERM or the deadline file)."""
    durableSeconds: float | None = None
    """Seconds from there until HEAD named the last step."""
    firstStepSeconds: float | None = None
    """Seconds from the end of the restore to the end of the first optimizer step."""
    startupSeconds: float | None = None
    """Seconds from process start to the end of the first optimizer step."""
    outputURI: str = ""
    """Where the final weights are."""
    emergencySeconds: float | None = None
    """Seconds that a save at a notice is reckoned to take: one step, one copy, one upload."""
    graceSeconds: float | None = None
    """Seconds of notice that it has."""
    warning: str = ""
    """What a person should change although the run goes on, such as a grace too short for the state."""
    ignoredSettings: str = ""
    """Fields of spec.training that are set and that the script's loop does not apply, such as
    `emaDecay,data.workers`."""

    def to_json(self) -> str:
        """JSON of at most MESSAGE_LIMIT bytes; a longer `message` is cut, never the rest."""
        values = {k: v for k, v in asdict(self).items() if v is not None and v != ""}
        text = json.dumps(values)
        while len(text.encode()) > MESSAGE_LIMIT and values.get("message"):
            over = len(text.encode()) - MESSAGE_LIMIT
            values["message"] = str(values["message"])[: -(over + 1)]
            text = json.dumps(values)
        return text

    @classmethod
    def from_json(cls, text: str) -> TerminationMessage | None:
        """The message, or None where `text` is not one of ours (a traceback, another program's words)."""
        try:
            raw: Any = json.loads(text)
            known = {f.name for f in fields(cls)}
            return cls(**{k: v for k, v in raw.items() if k in known} | {"outcome": Outcome(raw["outcome"])})
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What `/progress` answers, and `status.progress` shows."""

    state: str
    """Starting, WaitingForStore, Downloading, Gated, Restoring, Compiling, Training, Evaluating, Saving,
    Done."""
    attempt: int
    jobUID: str = ""
    """Of the job that this trainer belongs to: an IP address may be another pod's by now."""
    worker: int = 0
    """Number of its pod in the gang."""
    step: int = 0
    totalSteps: int = 0
    loss: float | None = None
    samplesPerSecond: float | None = None
    etaSeconds: float | None = None
    durableStep: int | None = None
    durableTime: str = ""
    """RFC 3339."""
    startStep: int | None = None
    saveSeconds: float | None = None
    """Seconds from the start of the last save until HEAD named it."""
    emergencySeconds: float | None = None
    """As in TerminationMessage."""
    graceSeconds: float | None = None
    warning: str = ""
    """As in TerminationMessage."""
    waitingFor: str = ""
    """The store that does not answer, its endpoint, since when, and its last error. It is waited for in the
    state WaitingForStore; in the others the training goes on, and its saves fail."""
    idleSeconds: float | None = None
    """Since the training last got on, by the trainer's own clock."""
    hangSeconds: float | None = None
    """The limit on `idleSeconds` that holds now; None while none does (gated, restoring, compiling)."""
    gpuUtilisation: float | None = None
    """Of this rank's GPU, of 1; None where NVML says nothing. Not in the status, nor is the next."""
    gpuMemory: float | None = None
    """Of that GPU's memory, what all processes use, of 1."""
    ignoredSettings: str = ""
    """As in TerminationMessage."""

    def to_json(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None and v != ""})

    @classmethod
    def from_json(cls, text: str) -> Progress:
        """Raises ValueError, KeyError or TypeError where `text` is no progress of ours."""
        raw = json.loads(text)
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in raw.items() if k in known})


STORE_WAIT_SECONDS: Final = 300
"""That a pod waits for a store that does not answer, before it gives its node back."""
WAITING_FOR_STORE: Final = "WaitingForStore"
"""`state` while the checkpoint store does not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Body of a POST to STOP_PATH of the progress port.

    The operator sends it to a trainer whose pod was deleted and that trains on, because it has missed the
    signal. Another pod's trainer refuses it.
    """

    podUID: str
    """Known to whoever may read pods in the API server, and not told by the progress port."""
    deadline: float
    """Unix seconds of the kubelet's SIGKILL."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Stop:
        """Raises ValueError, KeyError or TypeError where `text` is none."""
        raw = json.loads(text)
        deadline = float(raw["deadline"])
        if not math.isfinite(deadline):
            raise ValueError("deadline is no time")
        return cls(podUID=str(raw["podUID"]), deadline=deadline)


# --- keys below the checkpoint URI -----------------------------------------------------------------
HEAD_KEY: Final = "HEAD"
CHECKPOINTS_PREFIX: Final = "checkpoints/"
FINAL_PREFIX: Final = "final/"
MANIFEST_NAME: Final = "manifest.json"
LOGS_PREFIX: Final = "logs/"
PROFILES_PREFIX: Final = "profiles/"
COMPILE_CACHE_PREFIX: Final = "compile-cache/"
OUT_OF_MEMORY_PREFIX: Final = "out-of-memory/"
CHUNK_BYTES: Final = 32 * 2**20
"""Unit of checksums, and least size of a part of an upload."""


def checkpoint_key(term: int, step: int, nonce: str) -> str:
    """Folder of one checkpoint: never the same twice, ordered by no one (HEAD orders)."""
    return f"{CHECKPOINTS_PREFIX}t{term:06d}-s{step:09d}-{nonce}/"


def out_of_memory_key(job: str, size: int) -> str:
    """That micro-batches of `size` samples were too large for a job; 0: the prefix of all of the job's."""
    return f"{OUT_OF_MEMORY_PREFIX}{job}/" + (f"{size:09d}.json" if size else "")


def out_of_memory_policy_key(job: str, policy: str) -> str:
    """That a trial of one sample's step ran out with this policy of activation checkpointing."""
    return f"{OUT_OF_MEMORY_PREFIX}{job}/policy-{policy}.json"


def log_key(attempt: int, rank: int, number: int) -> str:
    """One part of what a rank has printed; `number` counts from 1."""
    return f"{LOGS_PREFIX}attempt-{attempt:06d}/rank-{rank:05d}/{number:06d}.log"


def part_of_log(key: str) -> tuple[int, int, int] | None:
    """Attempt, rank and number in such a key, or None where the key is not of that form."""
    found = re.fullmatch(rf"{LOGS_PREFIX}attempt-(\d+)/rank-(\d+)/(\d+)\.log", key)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def term_of_key(key: str) -> int | None:
    """The term in a checkpoint's key, or None where the key is not of that form."""
    name = key.removeprefix(CHECKPOINTS_PREFIX)
    head = name.split("-", 1)[0]
    return int(head[1:]) if key != name and head[:1] == "t" and head[1:].isdigit() else None


# --- inside the pod ---------------------------------------------------------------------------------
AGAIN_FILE: Final = "SPOTTRAIN_AGAIN_FILE"
"""Environment of ranks whose launcher can start them again: a file, and a rank that writes into it asks for
that. Set by our launcher alone; no exit code of its own, for a script may end itself with any."""
OUTCOMES_FILE: Final = "SPOTTRAIN_OUTCOMES_FILE"
"""Environment of ranks that our launcher has started: a file into which each writes the outcome that it ends
with, so that what becomes of the process afterwards changes nothing."""
PROGRESS_PORT: Final = 9477
STOP_PATH: Final = "/stop"
PODINFO_DIR: Final = "/etc/spottrain"
DEADLINE_NAME: Final = "termination-deadline"
SAVE_ADVISED_NAME: Final = "save-advised"
CACHE_DIR: Final = "/cache"
DATA_CACHE_DIR: Final = "/var/cache/spottrain"
"""Default mount path of the data cache."""
LIBRARY_HOMES: Final = {"HF_HOME": "huggingface", "TORCH_HOME": "torch"}
"""Variables by which other libraries find their downloads, and their folders in the data cache."""
DEADLINE_ANNOTATION: Final = "spottrain.io/termination-deadline"
"""RFC 3339 with fractions; the file of the downward API holds the same text."""
SAVE_ADVISED_ANNOTATION: Final = "spottrain.io/save-advised"
"""On pod and node: RFC 3339 UTC time of a rebalance recommendation, at which an extra save is wise."""


def library_homes(data_cache: str) -> dict[str, str]:
    """The environment that keeps other libraries' downloads in the data cache too."""
    return {name: f"{data_cache.rstrip('/')}/{folder}" for name, folder in LIBRARY_HOMES.items()}
