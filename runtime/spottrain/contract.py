"""Names and messages shared by operator and runtime: environment, exit codes, S3 keys, termination message.

Standard library only: this is the only module of `spottrain` that the operator may import. A shared name is
defined here and nowhere else.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum, StrEnum
from pathlib import PurePosixPath
from typing import Any, Final


class Env(StrEnum):
    """Environment variables that the operator sets on the trainer's container."""

    JOB_NAME = "SPOTTRAIN_JOB_NAME"
    JOB_UID = "SPOTTRAIN_JOB_UID"
    POD_UID = "SPOTTRAIN_POD_UID"
    """UID of this pod. `POST /stop` must name it; the progress port never returns it."""
    ATTEMPT = "SPOTTRAIN_ATTEMPT"
    """Number of this start, from 1. Fences a stale pod out of HEAD."""
    CHECKPOINT_URI = "SPOTTRAIN_CHECKPOINT_URI"
    """`s3://bucket/prefix`, `gs://bucket/prefix`, `file:///folder` or a plain path."""
    CHECKPOINT_ENDPOINT = "SPOTTRAIN_CHECKPOINT_ENDPOINT"
    """URL of a server with the protocol of the URI's scheme; absent means AWS, or Google."""
    CHECKPOINT_INTERVAL = "SPOTTRAIN_CHECKPOINT_INTERVAL"
    """`auto`, `500steps`, `90s`, `10m` or `1h`."""
    CHECKPOINT_KEEP = "SPOTTRAIN_CHECKPOINT_KEEP"
    """Committed checkpoints kept, at least 2."""
    CHECKPOINT_KEEP_BEST = "SPOTTRAIN_CHECKPOINT_KEEP_BEST"
    """`true` or `false`: whether to keep the checkpoint with the lowest evaluation loss beyond `keep`."""
    CHECKPOINT_PATH_STYLE = "SPOTTRAIN_CHECKPOINT_PATH_STYLE"
    """`true` or `false`: path-style S3 URLs (bucket in the path). Absent: true if an endpoint is set."""
    CHECKPOINT_KMS_KEY = "SPOTTRAIN_CHECKPOINT_KMS_KEY"
    """ID or ARN of the KMS key for checkpoints on S3 (SSE-KMS); `default`: the account's own key."""
    CHECKPOINT_ON_EXISTING = "SPOTTRAIN_CHECKPOINT_ON_EXISTING"
    """`OnExisting`, in any case: what to do when another job has released HEAD of this URI."""
    INIT_FROM = "SPOTTRAIN_INIT_FROM"
    """Where the first start gets its weights: another job's checkpoint URI, or a path of files."""
    INIT_IGNORE = "SPOTTRAIN_INIT_IGNORE"
    """Patterns of parameter names that are not loaded from INIT_FROM, with commas between them."""
    KNOWN_DURABLE_STEP = "SPOTTRAIN_KNOWN_DURABLE_STEP"
    """Last step that the operator knows to be durable; absent if there is none. If set, a run must resume."""
    GATE_UNTIL = "SPOTTRAIN_GATE_UNTIL"
    """Unix seconds until which this pod waits for its predecessor to release HEAD; 0 = do not wait."""
    GRACE_SECONDS = "SPOTTRAIN_GRACE_SECONDS"
    """terminationGracePeriodSeconds of this pod."""
    GPUS = "SPOTTRAIN_GPUS"
    """GPUs that the pod requests; 0 = CPU; absent: the runtime counts the container's GPUs."""
    TRAINING = "SPOTTRAIN_TRAINING"
    """spec.training as JSON (`core.training_settings`)."""
    DEADLINE_FILE = "SPOTTRAIN_DEADLINE_FILE"
    """Path of the downward-API file that holds the termination deadline."""
    SAVE_ADVISED_FILE = "SPOTTRAIN_SAVE_ADVISED_FILE"
    """Path of the downward-API file with the time of the last advice to save; empty if none. Not a stop."""
    STORE_WAIT = "SPOTTRAIN_STORE_WAIT"
    """Seconds to wait for an unreachable store, at a start and at the end of a training; absent: 300."""
    HANG_TIMEOUT = "SPOTTRAIN_HANG_TIMEOUT"
    """Seconds without a step that count as a hang; absent: derived from the measured step time."""
    LOGS = "SPOTTRAIN_LOGS"
    """`keep`: each rank's output is also written to the store; `off`: it is not."""
    AUTO_ATTACH = "SPOTTRAIN_AUTO_ATTACH"
    """`true` or `false`: whether `spottrain run` attaches to known libraries; absent: true."""
    TERMINATION_MESSAGE = "SPOTTRAIN_TERMINATION_MESSAGE"
    """Path to which the termination message is written."""
    PROGRESS_PORT = "SPOTTRAIN_PROGRESS_PORT"
    """Port of `/progress` and `/metrics`; absent = not served."""
    CACHE_DIR = "SPOTTRAIN_CACHE_DIR"
    """Writable folder for compile caches and downloads."""
    DATA_CACHE = "SPOTTRAIN_DATA_CACHE"
    """Folder for downloads, on a volume that all attempts share; absent if the job has none."""
    COMPILE_CACHE = "SPOTTRAIN_COMPILE_CACHE"
    """`CompileCacheMode`; absent means `keep`."""
    IMAGE_DIGEST = "SPOTTRAIN_IMAGE_DIGEST"
    """Digest of the trainer's image, part of the compile cache's key; absent if unknown."""
    WORKERS = "SPOTTRAIN_WORKERS"
    """Number of pods in the gang; absent means 1."""
    WORKER_INDEX = "SPOTTRAIN_WORKER_INDEX"
    """Index of this pod in the gang, from 0. Rank 0 runs in pod 0."""
    RENDEZVOUS = "SPOTTRAIN_RENDEZVOUS"
    """`host:port` on pod 0 of the rendezvous of all ranks; set if the gang has several pods."""


AZURE: Final = re.compile(
    r"(?i)^((az|azure|abfss?|wasbs?)://|https?://[^/]*[.](blob|dfs)[.]"
    r"(core[.](windows[.]net|usgovcloudapi[.]net|chinacloudapi[.]cn)|storage[.]azure[.]net))"
)
"""Beginning of a URI, or of an endpoint, of Azure Blob Storage. The CRD has it too."""
NO_AZURE: Final = (
    "Azure Blob Storage does not speak S3; on AKS use an S3 server, or file:///folder on an NFS share of "
    "Azure Files"
)


class SyncEnv(StrEnum):
    """Environment variables of `checkpoint.mode: Sync`, beside those of `Env` that say which job and store.

    The operator sets all but RESUMED on the sidecar that runs `spottrain sync`.
    """

    PATH = "SPOTTRAIN_SYNC_PATH"
    """Absolute path of the folder that is restored and uploaded. Also on the script's container."""
    WHEN = "SPOTTRAIN_SYNC_WHEN"
    """`SyncWhen` as JSON; absent: each file says by itself whether it is whole."""
    RESULT_FILE = "SPOTTRAIN_SYNC_RESULT_FILE"
    """Path to which `SyncResult` is written as JSON once the folder is restored and the script may start."""
    LAST_EXIT = "SPOTTRAIN_SYNC_LAST_EXIT"
    """`LastExit` as text; absent: no script has ended, or with what is unknown.

    A checkpoint of a folder whose script had ended by a code other than 0 may be cut off (docs/sync.md)."""
    RESUMED = "SPOTTRAIN_RESUMED"
    """`true` or `false`, for the script: whether the folder holds a restored checkpoint.

    The operator sets it where it knows, or with `resumeArgs`; `spottrain sync -- COMMAND` always does. On
    the sidecar: what the script was told. If a restore finds otherwise, the script does not start."""
    RESUME_ARGS = "SPOTTRAIN_SYNC_RESUME_ARGS"
    """Arguments that COMMAND gets in addition where a checkpoint was restored, quoted as in a shell."""


LOG_FORMAT: Final = "SPOTTRAIN_LOG_FORMAT"
"""Environment variable with the format of the log: `auto`, `text`, `logfmt` or `json`.

Set by `--log-format` or by the user, never by the operator. `auto`: text in a terminal, else logfmt."""

BIND_ADDRESS: Final = "SPOTTRAIN_BIND_ADDRESS"
"""Environment variable with the IP address on which trainer, operator and notice agent listen.

Set by the user, never by the operator. Absent: trainer and operator listen on all addresses, the agent on
127.0.0.1. Pods that share a network, each with an address of its own, thus have the same ports."""


def bind_address(env: Mapping[str, str]) -> str:
    """Returns the address of BIND_ADDRESS, "" where it is absent. Raises ValueError."""
    if not (text := env.get(BIND_ADDRESS, "")):
        return ""
    try:
        usable = not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(
            f"{BIND_ADDRESS}={text!r} must be one IP address of this pod, such as 10.0.0.5; leave it out for "
            "the default"
        )
    return text


def listening_socket(host: str, port: int, backlog: int = 128) -> socket.socket:
    """Returns a socket that listens on this IP address; "": on all, of IPv4 and of IPv6.

    Raises OSError where it cannot.
    """
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=dual, backlog=backlog)


LAUNCHER: Final = "SPOTTRAIN_LAUNCHER"
"""Environment variable with the path of the injected launcher, by which further ranks are started.

Set by that launcher (`cli/launch.py`), never by the operator."""

LAUNCHER_FILE: Final = "launch.py"
"""Name of the launcher in the folder that `spottrain inject` writes."""


class ExitCode(IntEnum):
    """Exit codes of `spottrain run`. Any other non-zero code counts as a failure."""

    DONE = 0
    """Trained to the end; or the script ended by itself (the termination message says which)."""
    FAILED = 1
    """The script raised, or a code of its own."""
    BAD_CONFIGURATION = 64
    """Permanent: a configuration or state that no restart can fix (EX_USAGE of sysexits.h)."""
    STORE_UNREACHABLE = 69
    """The checkpoint store was unreachable for longer than the pod waits (EX_UNAVAILABLE)."""
    INTERRUPTED = 75
    """Interrupted; nothing lost since the last commit (EX_TEMPFAIL)."""
    SUPERSEDED = 76
    """A newer attempt owns HEAD."""
    INTERRUPTED_LOST = 79
    """Interrupted; the work since the last commit is lost."""


class Outcome(StrEnum):
    """`outcome` of the termination message. It takes precedence over the exit code."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    INTERRUPTED_LOST = "interruptedLost"
    SUPERSEDED = "superseded"
    BAD_CONFIGURATION = "badConfiguration"
    STORE_UNREACHABLE = "storeUnreachable"
    FAILED = "failed"
    UNTRAINED = "untrained"
    """The script exited with code 0 without starting a training with the runtime."""


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
    """`spec.checkpoint.onExisting`: what a job does if another job has released HEAD of its URI."""

    FAIL = "Fail"
    RESUME = "Resume"
    FRESH = "Fresh"


QUIET_SECONDS: Final = 30.0
"""After so long without a change a file counts as whole of which nothing else says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncWhen:
    """`spec.checkpoint.syncWhen`: what says that a checkpoint in the folder is whole.

    One field is set. Without any, each file says so by itself.
    """

    quietSeconds: float | None = None
    """Nothing below the folder has changed for so long."""
    marker: str = ""
    """Name of the file that is written last. With a slash, a pattern: `checkpoint-*/trainer_state.json`."""
    renamed: str = ""
    """Pattern of files and folders that get their name by a rename when they are whole: `step_*`."""

    @property
    def each_file(self) -> bool:
        return self == SyncWhen()

    def to_json(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None and v != ""})

    @classmethod
    def from_json(cls, text: str) -> SyncWhen:
        """Raises ValueError with a sentence."""
        raw: Any = json.loads(text or "{}")
        known = {f.name for f in fields(cls)}
        if not isinstance(raw, dict) or len(raw) > 1 or not set(raw) <= known:
            raise ValueError(f"must be an object with one of {', '.join(sorted(known))}")
        if not raw:
            return cls()
        name, value = next(iter(raw.items()))
        if name == "quietSeconds":
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise ValueError("quietSeconds must be a number of seconds above 0")
            return cls(quietSeconds=float(value))
        parts = value.split("/") if isinstance(value, str) else [""]
        if not all(parts) or not {".", "..", "**"}.isdisjoint(parts):
            raise ValueError(f"{name} must be a path below the folder without `..` and `**`, as `step_*`")
        return cls(**{name: value})


@dataclass(frozen=True, kw_only=True, slots=True)
class LastExit:
    """The newest exit code of the script that is known, and the attempt that it is of."""

    attempt: int
    code: int

    def __str__(self) -> str:
        return f"{self.attempt}:{self.code}"

    @classmethod
    def parse(cls, text: str) -> LastExit | None:
        """Returns None for "". Raises ValueError."""
        attempt, _, code = text.partition(":")
        return cls(attempt=int(attempt), code=int(code)) if text else None


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncResult:
    """What the restore of a folder has found: content of `SyncEnv.RESULT_FILE`."""

    resumed: bool
    """Whether the folder holds a restored checkpoint."""
    step: int = 0
    """Number of that checkpoint: 1 is the first that was ever committed at the URI."""
    key: str = ""
    files: int = 0
    bytes: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


SHELLS: Final = frozenset({"ash", "bash", "dash", "ksh", "sh", "zsh"})


def loses_arguments(words: Sequence[str]) -> str:
    """Returns TEXT of `sh -c TEXT` where arguments after the command do not reach its program; else ""."""
    shell = next((at for at, word in enumerate(words) if PurePosixPath(word).name in SHELLS), len(words))
    rest, text = list(words[shell + 1 :]), False
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        text = text or re.fullmatch("-[a-zA-Z]*c[a-zA-Z]*", option) is not None
        if re.fullmatch("-[a-zA-Z]*o", option):  # its value
            rest = rest[1:]
    passes = len(rest) > 1 and ("$@" in rest[0] or "$*" in rest[0])  # the word after the text is $0
    return rest[0] if text and rest and not passes else ""


ARGUMENTS_OF_SHELL: Final = (
    """the shell would take the arguments; leave it out, or write sh -c 'python train.py "$@"' sh"""
)


class CompileCacheMode(StrEnum):
    """Values of Env.COMPILE_CACHE."""

    KEEP = "keep"
    """Restore the cache, and save it beside the checkpoints."""
    DROP = "drop"
    """Do not restore it this once, and delete what is stored: after exit 132 (SIGILL)."""
    OFF = "off"


DEFAULTS: Final[Mapping[str, str]] = {
    Env.CHECKPOINT_INTERVAL: "10m",
    Env.CHECKPOINT_KEEP: "3",
    Env.CHECKPOINT_KEEP_BEST: "true",
    Env.CHECKPOINT_ON_EXISTING: OnExisting.FAIL,
    Env.COMPILE_CACHE: CompileCacheMode.KEEP,
    Env.GATE_UNTIL: "0",
    Env.LOGS: "keep",
    Env.STORE_WAIT: "300",
    Env.TRAINING: "{}",
    SyncEnv.WHEN: "{}",
}
"""What an absent variable means in a job's pod. The operator does not set these values: each variable costs
the API server time and 150 bytes in etcd, in each pod."""


class Reason(StrEnum):
    """Why a run ended: `reason` of the termination message and of the job's condition."""

    BAD_CONFIGURATION = "BadConfiguration"
    SCRIPT_NOT_FOUND = "ScriptNotFound"
    SCRIPT_FAILED = "ScriptFailed"
    TRAINING_FAILED = "TrainingFailed"
    """The loss became NaN or infinite."""
    STORE_DENIED = "StoreDenied"
    """Credentials missing, wrong or without permission (401, 403)."""
    BUCKET_NOT_FOUND = "BucketNotFound"
    STORE_UNAVAILABLE = "StoreUnavailable"
    """The store was unreachable, or returned 5xx, for longer than the run waits."""
    STORE_UNSUITABLE = "StoreUnsuitable"
    """The store does not support conditional PUT."""
    URI_IN_USE = "CheckpointURIInUse"
    """Another job owns HEAD of this URI; or another job has released it and onExisting is `Fail`."""
    CHECKPOINT_MISSING = "CheckpointMissing"
    """The operator knows of a durable step, but HEAD is absent or lists no readable checkpoint."""
    CHECKPOINT_DAMAGED = "CheckpointDamaged"
    CHECKPOINT_INCOMPATIBLE = "CheckpointIncompatible"
    CHECKPOINT_ARCHIVED = "CheckpointArchived"
    """The objects were moved to an archive storage class and must be restored first."""
    CHECKPOINT_FOUND = "CheckpointFound"
    """A folder's checkpoint is in the store that the script was not told of; the next attempt's is."""
    PEER_LOST = "PeerLost"
    """Another rank of the gang is gone; this one ended because it cannot compute without it."""
    DATA_CACHE_FULL = "DataCacheFull"
    """The volume for downloads has no space left."""
    NODE_FAULT = "NodeFault"
    """The driver reports that a GPU has failed. Not a failure of the job: another node may work."""
    NOT_TRAINED = "NotTrained"
    """The script ended without starting a training with the runtime."""
    EARLY_STOPPED = "EarlyStopped"
    """Done before the last step, because an evaluation metric stopped improving."""
    OUT_OF_MEMORY = "OutOfMemory"
    """The memory limit leaves no room for the staging buffers of a save. Or a rank ran out of memory in a
    step; then all ranks use smaller micro-batches from their next start."""


GPU_FAULTS: Final = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "GPU is lost",
    "fallen off the bus",
    "fell off the bus",
    "GPU requires reset",
    "system not yet initialized",
)
"""Substrings of what CUDA, NVML and the driver report when the hardware has failed.

Errors that a script can cause are left out: "unspecified launch failure", "illegal memory access", NCCL's."""


def gpu_fault(text: str) -> str:
    """Returns the first line of an error or a log that reports a failed GPU; "" if there is none."""
    lines = (line.strip() for line in text.splitlines())
    low = [fault.lower() for fault in GPU_FAULTS]
    return next((line for line in lines if any(fault in line.lower() for fault in low)), "")


MESSAGE_LIMIT: Final = 4096
"""Bytes of a termination message that the kubelet keeps (Kubernetes API, terminationMessagePath)."""
MAX_BYTES_OF_CHARACTER: Final = 12
"""Of one beyond the Basic Multilingual Plane, in JSON without other than ASCII."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSplit:
    """Where the seconds of an attempt went, by rank 0. Each second is in one field.

    They count from the start of its process, or of the launcher in its pod. Ranks that the launcher starts
    again continue the split: steps of theirs that were lost stay in `unsaved`.
    """

    productive: float = 0.0
    """Steps and evaluations, without what is in the other fields. Steps that are done again count again."""
    startup: float = 0.0
    """Up to the end of the first step, without evaluations, `restore` and `waiting`."""
    dataWait: float = 0.0
    """The loop waited for its loader."""
    checkpointStall: float = 0.0
    """A save blocked the loop. The last save of an attempt blocks it until the checkpoint is durable."""
    restore: float = 0.0
    """Reading the checkpoint."""
    waiting: float = 0.0
    """For the predecessor to release HEAD, for other ranks to start, or for an unreachable store."""
    other: float = 0.0
    """What is left, such as writing the final weights."""
    unsaved: float = 0.0
    """The part of `productive` that no durable checkpoint has; lost if the attempt ends now."""

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values())) - self.unsaved

    @classmethod
    def from_raw(cls, raw: Any) -> TimeSplit | None:
        """Returns the split of decoded JSON; None if there is none. Raises TypeError or ValueError."""
        if raw is None:
            return None
        if not isinstance(raw, dict):
            raise TypeError("a time split must be an object")
        try:
            found = {field.name: float(raw[field.name]) for field in fields(cls) if field.name in raw}
        except OverflowError as error:  # an integer of more than 308 digits
            raise ValueError("seconds must be finite") from error
        if any(not math.isfinite(value) or value < 0 for value in found.values()):
            raise ValueError("seconds must be finite, and not negative")
        return cls(**found)


@dataclass(frozen=True, kw_only=True, slots=True)
class TerminationMessage:
    """What a trainer reports when it ends; written as JSON to the container's termination message."""

    outcome: Outcome
    reason: str = ""
    """CamelCase; a value of `Reason` where one fits."""
    message: str = ""
    """A sentence: what went wrong, where, and what to do."""
    attempt: int = 0
    step: int | None = None
    """Optimizer steps done at the end."""
    totalSteps: int | None = None
    loss: float | None = None
    """Of the last logged step."""
    startStep: int | None = None
    """Step from which this attempt resumed: the last durable step of the attempts before."""
    durableStep: int | None = None
    """Last step that HEAD lists."""
    key: str = ""
    """Key of that checkpoint, below the URI."""
    signalledAt: float | None = None
    """Unix seconds of the first request to stop (SIGTERM or the deadline file)."""
    durableSeconds: float | None = None
    """Seconds from `signalledAt` until HEAD listed the last step."""
    firstStepSeconds: float | None = None
    """Seconds from the end of the restore to the end of the first optimizer step."""
    startupSeconds: float | None = None
    """Seconds from process start to the end of the first optimizer step."""
    outputURI: str = ""
    """URI of the final weights."""
    emergencySeconds: float | None = None
    """Estimated seconds of a save after a stop request: one step, one copy, one upload."""
    graceSeconds: float | None = None
    """Seconds of notice that this pod gets before SIGKILL."""
    warning: str = ""
    """What the user should change although the run goes on, such as a grace period too short for a save."""
    ignoredSettings: str = ""
    """Fields of spec.training that are set but that the script's loop does not apply, comma-separated:
    `emaDecay,data.numWorkers`."""
    timeSplit: TimeSplit | None = None
    bestStep: int | None = None
    """Step of the evaluation with the lowest loss so far, over all attempts."""

    def to_json(self) -> str:
        """JSON of at most MESSAGE_LIMIT bytes; only `message` is cut if it is longer."""
        values = {k: v for k, v in asdict(self).items() if v is not None and v != ""}
        values["message"] = self.message[:MESSAGE_LIMIT]
        text = json.dumps(values)
        while (over := len(text) - MESSAGE_LIMIT) > 0 and values["message"]:
            values["message"] = values["message"][: -(over // MAX_BYTES_OF_CHARACTER + 1)]
            text = json.dumps(values)
        return text

    @classmethod
    def from_json(cls, text: str) -> TerminationMessage | None:
        """Returns the message; None if `text` is not one (a traceback, another program's output).

        A bad time split is left out: the outcome decides what becomes of the job.
        """
        try:
            raw: Any = json.loads(text)
            known = {f.name for f in fields(cls)}
            split = None
            with contextlib.suppress(ValueError, TypeError):
                split = TimeSplit.from_raw(raw.get("timeSplit"))
            typed = {"outcome": Outcome(raw["outcome"]), "timeSplit": split}
            return cls(**{k: v for k, v in raw.items() if k in known} | typed)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Response of `/progress`, also shown in `status.progress`."""

    state: str
    """Starting, WaitingForStore, Downloading, Gated, Restoring, Compiling, Training, Evaluating, Saving,
    Done."""
    attempt: int
    jobUID: str = ""
    """UID of the job that this trainer belongs to: by now the IP address may belong to another pod."""
    worker: int = 0
    """Index of its pod in the gang."""
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
    """The unreachable store: its endpoint, since when, and the last error. In the state WaitingForStore the
    run waits for it; in other states the training goes on and its saves fail."""
    idleSeconds: float | None = None
    """Seconds since the last sign of progress, by the trainer's own clock."""
    hangSeconds: float | None = None
    """Current limit on `idleSeconds`; None where no limit applies (gated, restoring, compiling)."""
    ignoredSettings: str = ""
    """As in TerminationMessage."""
    timeSplit: TimeSplit | None = None
    bestStep: int | None = None
    """As in TerminationMessage."""

    def to_json(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None and v != ""})

    @classmethod
    def from_json(cls, text: str) -> Progress:
        """Raises ValueError, KeyError or TypeError if `text` is not a progress report."""
        raw = json.loads(text)
        known = {f.name for f in fields(cls)}
        split = {"timeSplit": TimeSplit.from_raw(raw.get("timeSplit"))}
        return cls(**{k: v for k, v in raw.items() if k in known} | split)


LONGEST_AUTO_INTERVAL: Final = 3600.0
"""Seconds between two saves with checkpoint.interval auto, at most: a limit against errors of its model."""
STORE_WAIT_SECONDS: Final = 300
"""How long a pod waits for an unreachable store before it releases its node."""
WAITING_FOR_STORE: Final = "WaitingForStore"
"""`state` while the run waits for an unreachable checkpoint store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Body of a POST to STOP_PATH of the progress port.

    The operator sends it to a trainer that still trains although its pod was deleted, because the trainer has
    missed the signal. The trainer of another pod refuses it.
    """

    podUID: str
    """Visible to clients that may read pods in the API server; the progress port does not return it."""
    deadline: float
    """Unix seconds at which the kubelet sends SIGKILL."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Stop:
        """Raises ValueError, KeyError or TypeError if `text` is not a stop order."""
        raw = json.loads(text)
        deadline = float(raw["deadline"])
        if not math.isfinite(deadline):
            raise ValueError("deadline is NaN or infinite")
        return cls(podUID=str(raw["podUID"]), deadline=deadline)


# --- keys below the checkpoint URI -----------------------------------------------------------------
HEAD_KEY: Final = "HEAD"
CHECKPOINTS_PREFIX: Final = "checkpoints/"
FINAL_PREFIX: Final = "final/"
MANIFEST_NAME: Final = "manifest.json"
BLOBS_PREFIX: Final = "blobs/"
"""Contents of files that `spottrain sync` stores, which several checkpoints may share."""
LOGS_PREFIX: Final = "logs/"
PROFILES_PREFIX: Final = "profiles/"
COMPILE_CACHE_PREFIX: Final = "compile-cache/"
OUT_OF_MEMORY_PREFIX: Final = "out-of-memory/"
"""Written by runtimes of 0.3 alone; deleted with the job."""
SERIES_PREFIX: Final = "series/"
"""Loss and speed over the steps, an object for each claim of the URI (`core.series`)."""
CHUNK_BYTES: Final = 32 * 2**20
"""Unit of checksums, and minimum size of an upload part."""


def checkpoint_key(term: int, step: int, nonce: str) -> str:
    """Folder of one checkpoint. Never the same twice; its name gives no order, HEAD does."""
    return f"{CHECKPOINTS_PREFIX}t{term:06d}-s{step:09d}-{nonce}/"


def log_key(attempt: int, rank: int, number: int) -> str:
    """Key of one part of a rank's output; `number` counts from 1."""
    return f"{LOGS_PREFIX}attempt-{attempt:06d}/rank-{rank:05d}/{number:06d}.log"


def profile_key(attempt: int, rank: int, name: str) -> str:
    """Key of a file of a rank's profile."""
    return f"{PROFILES_PREFIX}attempt-{attempt:06d}/rank-{rank:05d}/{name}"


def series_key(term: int) -> str:
    """Key of the series of steps of the attempt that claimed the URI in this term."""
    return f"{SERIES_PREFIX}t{term:06d}.jsonl.gz"


def part_of_log(key: str) -> tuple[int, int, int] | None:
    """Returns attempt, rank and number of such a key; None if the key has another form."""
    found = re.fullmatch(rf"{LOGS_PREFIX}attempt-(\d+)/rank-(\d+)/(\d+)\.log", key)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


FOLDER: Final = r"t(\d{6,})-s(\d{9,})-[^/]+/"
"""Name of a checkpoint's folder (see `checkpoint_key`): somebody's `t5-small/` is none."""
OWN_KEYS: Final = re.compile(
    rf"({CHECKPOINTS_PREFIX}|{BLOBS_PREFIX}){FOLDER}.*|({LOGS_PREFIX}|{PROFILES_PREFIX})attempt-\d{{6,}}/.*"
    rf"|{COMPILE_CACHE_PREFIX}[0-9a-f]{{64}}(-[0-9a-f]{{64}}\.tar\.gz|\.json)"
    rf"|{OUT_OF_MEMORY_PREFIX}[^/]+/(\d{{9}}|policy-[^/]+)\.json|{SERIES_PREFIX}t\d{{6,}}\.jsonl\.gz"
)


def is_own(key: str) -> bool:
    """Whether the key has a form that only spottrain writes, so that it may be deleted with a job.

    Final weights are left out: they are a result.
    """
    return OWN_KEYS.fullmatch(key) is not None


def term_of_key(key: str) -> int | None:
    """Returns the term in a checkpoint's key; None if the key has another form."""
    found = re.match(CHECKPOINTS_PREFIX + FOLDER, key)
    return int(found[1]) if found else None


def step_of_key(key: str) -> int | None:
    """Returns the step in a checkpoint's key; None if the key has another form."""
    found = re.match(CHECKPOINTS_PREFIX + FOLDER, key)
    return int(found[2]) if found else None


def blobs_of(key: str) -> str:
    """Folder of the contents that the commit of this checkpoint's key sends. Never the same twice."""
    return BLOBS_PREFIX + key.removeprefix(CHECKPOINTS_PREFIX)


def term_of_blob(key: str) -> int | None:
    """Returns the term in the key of such a content; None if the key has another form."""
    found = re.match(BLOBS_PREFIX + FOLDER, key)
    return int(found[1]) if found else None


# --- inside the pod ---------------------------------------------------------------------------------
OUTCOMES_FILE: Final = "SPOTTRAIN_OUTCOMES_FILE"
"""Environment variable of ranks started by spottrain's launcher: each writes its outcome to this file.

So what happens to the process afterwards does not change the outcome."""
TIME_BEFORE: Final = "SPOTTRAIN_TIME_BEFORE"
"""Environment variable of ranks started by spottrain's launcher: `{"born": ..., "split": ...}` as JSON.

`born`: Unix seconds of the launcher's start. `split`: the `TimeSplit` of its wait for other pods, or of the
ranks that it has started before. Other time until the start of the rank is start-up. The rank reads and
removes it: it is not the time of a process that the script starts."""
PROGRESS_PORT: Final = 9477
STOP_PATH: Final = "/stop"
PODINFO_DIR: Final = "/etc/spottrain"
DEADLINE_NAME: Final = "termination-deadline"
SAVE_ADVISED_NAME: Final = "save-advised"
CACHE_DIR: Final = "/cache"
DATA_CACHE_DIR: Final = "/var/cache/spottrain"
"""Default mount path of the data cache."""
LIBRARY_HOMES: Final = {"HF_HOME": "huggingface", "TORCH_HOME": "torch"}
"""Environment variables for other libraries' download folders, and those folders' names in the data cache."""
INTERRUPT_ANNOTATION: Final = "spottrain.io/interrupt"
"""On a TrainingJob: each new value, of at most 64 characters, interrupts an attempt that trains, once."""
DEADLINE_ANNOTATION: Final = "spottrain.io/termination-deadline"
"""RFC 3339 with fractional seconds; the downward-API file holds the same text."""
SAVE_ADVISED_ANNOTATION: Final = "spottrain.io/save-advised"
"""On pod and node: RFC 3339 UTC time of a rebalance recommendation, at which an extra save is advisable."""


def library_homes(data_cache: str) -> dict[str, str]:
    """Returns the environment variables that put other libraries' downloads into the data cache."""
    return {name: f"{data_cache.rstrip('/')}/{folder}" for name, folder in LIBRARY_HOMES.items()}
