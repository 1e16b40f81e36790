"""A TrainingJob as the API server returns it, decoded. Pure. Fields are named as in the CRD's schema.

A figure that is absent is None: an unknown price or time is not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from reprlib import repr as shortened
from typing import Any, Final, TypeVar

from spottrain_cli.errors import UsageError

GROUP: Final = "spottrain.io"
KIND: Final = "TrainingJob"
TEAM_LABEL: Final = "spottrain.io/team"
SELF: Final = "Self"
"""spec.checkpoint.mode of an image without the spottrain runtime, which reports nothing."""
SYNC: Final = "Sync"
"""spec.checkpoint.mode in which a sidecar uploads a folder, and a step is a commit of it."""
SUCCEEDED: Final = "Succeeded"
FAILED: Final = "Failed"
SUSPENDED: Final = "Suspended"
INVALID: Final = "Invalid"
"""Values of status.phase."""
BUCKETS: Final = {
    "productive": "productive",
    "startup": "start-up",
    "dataWait": "waiting for data",
    "checkpointStall": "stalled by saves",
    "restore": "reading checkpoints",
    "rollback": "lost to rollback",
    "waiting": "waiting (nodes, queue, ranks)",
    "other": "other",
}
"""Fields of status.goodput that are a partition of the job's time, and how they are printed."""
LARGEST, SMALLEST = 15, -18
"""Powers of ten beyond which a number is a mistake, and too long to print."""
T = TypeVar("T")


def clean(text: str) -> str:
    """Returns the text with a question mark for each character that would act on a terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "?" for each in text)


def percent(text: str) -> Decimal | None:
    """Returns the number in 93.4%; None where it is unknown."""
    try:
        return _number(text.removesuffix("%"))
    except (ValueError, ArithmeticError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """status.conditions[]"""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """status.attempts[]"""

    number: int
    pod: str = ""
    node: str = ""
    instanceType: str = ""
    zone: str = ""
    capacityType: str = ""
    workers: int | None = None
    startTime: datetime | None = None
    """When its pods were created."""
    boundTime: datetime | None = None
    """When the last of them got a node."""
    firstStepTime: datetime | None = None
    """When it was first seen to have done a step."""
    endTime: datetime | None = None
    cause: str = ""
    evidence: str = ""
    charged: bool | None = None
    stopping: str = ""
    exitCode: int | None = None
    startStep: int | None = None
    lastStep: int | None = None
    durableStep: int | None = None
    signalToDurableSeconds: Decimal | None = None
    """From the request to stop until its last step was in the store; None where it did not save."""
    spent: Decimal | None = None
    unknownSeconds: Decimal | None = None

    @property
    def waits(self) -> bool:
        """Whether it does not have all of its nodes yet; one that trains has them."""
        return self.boundTime is None and self.endTime is None and self.lastStep is None

    @property
    def lost_steps(self) -> int | None:
        """Steps that the next attempt has to do again; None if unknown, or while it runs."""
        if self.endTime is None or self.lastStep is None:
            return None
        kept = self.startStep or 0 if self.durableStep is None else self.durableStep
        return max(0, self.lastStep - kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """status.progress"""

    state: str = ""
    step: int | None = None
    totalSteps: int | None = None
    loss: Decimal | None = None
    samplesPerSecond: Decimal | None = None
    etaSeconds: Decimal | None = None
    stepSeconds: Decimal | None = None
    durableStep: int | None = None
    durableTime: str = ""
    checkpointURI: str = ""
    saveSeconds: Decimal | None = None
    warning: str = ""
    waitingFor: str = ""
    ignoredSettings: str = ""
    pollTime: datetime | None = None

    @property
    def saved(self) -> datetime | None:
        """When the durable step was in the store, by the trainer's own word; None where that is no time."""
        try:
            return _time(self.durableTime)
        except ValueError:
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupt:
    """status.interrupt: what became of the last value of the job's annotation."""

    request: str = ""
    attempt: int | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """status.cost"""

    spent: Decimal | None = None
    use: Decimal | None = None
    boot: Decimal | None = None
    idle: Decimal | None = None
    unknownSeconds: Decimal | None = None
    onDemandIdeal: Decimal | None = None
    saving: str = ""
    updateTime: datetime | None = None
    lostTime: datetime | None = None

    @property
    def known(self) -> bool:
        """Whether every node-second has a price, and their sum is there."""
        return self.spent is not None and not self.unknownSeconds

    @property
    def known_saving(self) -> Decimal | None:
        """The saving in percent; None where a price is unknown, or nothing was computed."""
        return percent(self.saving) if self.known and self.onDemandIdeal else None

    def told_saving(self, *, ended: bool) -> Decimal | None:
        """The known saving; None where it is negative before the end: start-up alone has been paid."""
        known = self.known_saving
        return None if known is not None and known < 0 and not ended else known


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """status.goodput: seconds, and percentages as 93.4%, or Unknown."""

    productive: Decimal = Decimal(0)
    startup: Decimal = Decimal(0)
    dataWait: Decimal = Decimal(0)
    checkpointStall: Decimal = Decimal(0)
    restore: Decimal = Decimal(0)
    rollback: Decimal = Decimal(0)
    waiting: Decimal = Decimal(0)
    other: Decimal = Decimal(0)
    wanted: Decimal | None = None
    paid: str = ""
    runtime: str = ""
    scheduling: str = ""

    @property
    def buckets(self) -> dict[str, Decimal]:
        return {name: getattr(self, name) for name in BUCKETS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Where the checkpoints are: spec.checkpoint, and what was filled in where it is silent."""

    uri: str = ""
    """Empty where there are none, or none is chosen yet."""
    endpoint: str = ""
    path_style: bool | None = None
    kms_key: str = ""
    mode: str = "Runtime"
    keeps_logs: bool = True

    @property
    def stores_logs(self) -> bool:
        """Whether what the trainers print is stored beside the checkpoints."""
        return bool(self.uri) and self.keeps_logs and self.mode not in (SELF, SYNC)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A TrainingJob."""

    namespace: str
    name: str
    uid: str = ""
    team: str = ""
    created: datetime | None = None
    deleted: datetime | None = None
    """When somebody asked for its deletion."""
    workers: int = 1
    gpus_per_worker: int = 1
    """spec.gpusPerWorker, as many as ranks in a pod; 1 where it is silent."""
    suspend: bool = False
    checkpoint: Checkpoint = Checkpoint()
    limit: Decimal | None = None
    """spec.capacity.maxCostUSD"""
    deadline: str = ""
    """spec.capacity.cheapest.deadline"""
    active_seconds: int | None = None
    """spec.activeDeadlineSeconds"""
    ttl_seconds: int | None = None
    """spec.ttlSecondsAfterFinished"""
    deletes_checkpoints: bool = False
    """Whether spec.deletionPolicy is Delete."""
    phase: str = ""
    attempt: int = 0
    interruptions: int = 0
    failures: int = 0
    knownDurableStep: int | None = None
    startTime: datetime | None = None
    completionTime: datetime | None = None
    nextStartTime: datetime | None = None
    output: str = ""
    """URI of the final weights."""
    conditions: tuple[Condition, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    progress: Progress = Progress()
    interrupt: Interrupt = Interrupt()
    cost: Cost | None = None
    goodput: Goodput | None = None

    @property
    def ref(self) -> str:
        """NAMESPACE/NAME, as every verb takes it."""
        return f"{self.namespace}/{self.name}".lstrip("/")

    @property
    def ended(self) -> bool:
        return self.phase in (SUCCEEDED, FAILED)

    @property
    def reports(self) -> bool:
        """Whether the image has the runtime, which reports how it spends its time."""
        return self.checkpoint.mode != SELF

    @property
    def ran(self) -> bool:
        """Whether an attempt had a node, or is not in the status any more."""
        return any(each.node for each in self.attempts) or any(each.number > 1 for each in self.attempts[:1])

    @property
    def current(self) -> Attempt | None:
        return self.record(self.attempt)

    def record(self, number: int) -> Attempt | None:
        return next((each for each in self.attempts if each.number == number), None)

    @property
    def reason(self) -> str:
        """Of the condition that has the phase's name, such as MaxCostReached for Suspended."""
        found = self.condition(self.phase)
        return found.reason if found is not None and found.status == "True" else ""

    def condition(self, kind: str) -> Condition | None:
        return next((each for each in self.conditions if each.type == kind), None)


# --- reading --------------------------------------------------------------------------------------------
def jobs(document: Any, source: str) -> list[Job]:
    """Returns the jobs of a TrainingJob's JSON, or of a list of them. Raises UsageError."""
    if isinstance(document, dict) and str(document.get("kind", "")).endswith("List"):
        return [job(each, source) for each in _list(document, "items", f"{source}: the list")]
    return [job(document, source)]


def job(document: Any, source: str) -> Job:
    """Returns the job of a TrainingJob's JSON, which came from `source`. Raises UsageError."""
    group = str(document.get("apiVersion", "")).partition("/")[0] if isinstance(document, dict) else ""
    if group != GROUP or document.get("kind") != KIND:
        kind = document.get("kind", "an object without kind") if isinstance(document, dict) else "no object"
        found = clean(kind) if isinstance(kind, str) else shortened(kind)
        raise UsageError(
            f"{source} has {found} where a {KIND} of {GROUP} is expected: give what "
            "`kubectl get tj JOB -o json` prints"
        )
    metadata, spec, status = (_table(document, name) for name in ("metadata", "spec", "status"))
    namespace, name = (_word(metadata, field, f"{source}: metadata") for field in ("namespace", "name"))
    where = f"{namespace}/{name}".lstrip("/")
    return Job(
        namespace=namespace,
        name=name,
        uid=_word(metadata, "uid", f"{where}: metadata"),
        team=_word(_table(metadata, "labels"), TEAM_LABEL, f"{where}: metadata.labels"),
        created=_optional(_time, metadata, "creationTimestamp", f"{where}: metadata"),
        deleted=_optional(_time, metadata, "deletionTimestamp", f"{where}: metadata"),
        **_of_spec(spec, _table(_table(status, "defaults"), "checkpoint"), where),
        **_of_status(status, where),
    )


def _of_spec(spec: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> dict[str, Any]:
    own, capacity, at = _table(spec, "checkpoint"), _table(spec, "capacity"), f"{where}: spec"
    uri, endpoint = (
        _word(own if own.get("uri") else defaults, name, f"{at}.checkpoint") for name in ("uri", "endpoint")
    )
    return {
        "workers": _optional(_whole, spec, "workers", at) or 1,
        "gpus_per_worker": _optional(_whole, spec, "gpusPerWorker", at) or 1,
        "suspend": spec.get("suspend") is True,
        "checkpoint": Checkpoint(
            uri=uri,
            endpoint=endpoint or _word(own, "endpoint", f"{at}.checkpoint"),
            path_style=style if isinstance(style := own.get("pathStyle"), bool) else None,
            kms_key=_word(_table(own, "encryption"), "kmsKey", f"{at}.checkpoint.encryption"),
            mode=_word(own, "mode", f"{at}.checkpoint") or "Runtime",
            keeps_logs=own.get("logs") != "None",
        ),
        "limit": _limit(capacity.get("maxCostUSD")),
        "deadline": _word(_table(capacity, "cheapest"), "deadline", f"{at}.capacity.cheapest"),
        "active_seconds": _optional(_whole, spec, "activeDeadlineSeconds", at),
        "ttl_seconds": _optional(_whole, spec, "ttlSecondsAfterFinished", at),
        "deletes_checkpoints": spec.get("deletionPolicy") == "Delete",
    }


def _of_status(status: Mapping[str, Any], where: str) -> dict[str, Any]:
    at = f"{where}: status"
    classes = {"progress": Progress, "interrupt": Interrupt, "cost": Cost, "goodput": Goodput}
    parts = {name: status.get(name) for name in classes}
    return {
        "phase": _word(status, "phase", at),
        **{
            name: _optional(_whole, status, name, at) or 0
            for name in ("attempt", "interruptions", "failures")
        },
        "knownDurableStep": _optional(_whole, status, "knownDurableStep", at),
        **{
            name: _optional(_time, status, name, at)
            for name in ("startTime", "completionTime", "nextStartTime")
        },
        "output": _word(_table(status, "output"), "uri", f"{at}.output"),
        **{
            name: tuple(
                read(cls, each, f"{at}.{name}[{i}]") for i, each in enumerate(_list(status, name, at))
            )
            for name, cls in (("conditions", Condition), ("attempts", Attempt))
        },
        **{name: read(classes[name], each, f"{at}.{name}") for name, each in parts.items() if each},
    }


def _limit(value: Any) -> Decimal | None:
    """Returns None where there is none, or where the operator refuses it."""
    try:
        return _number(value)
    except (ValueError, ArithmeticError):
        return None


def _list(document: Mapping[str, Any], name: str, where: str) -> list[Any]:
    found = document.get(name)
    if found is not None and not isinstance(found, list):
        raise UsageError(f"{where}.{name} cannot be read: a list is expected, not {shortened(found)}")
    return found or []


def _word(document: Mapping[str, Any], name: str, where: str) -> str:
    return _optional(_text, document, name, where) or ""


def _optional(decode: Callable[[Any], T], document: Mapping[str, Any], name: str, where: str) -> T | None:
    value = document.get(name)
    if value is None:
        return None
    try:
        return decode(value)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(f"{where}.{name} cannot be read: {shortened(value)}") from error


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}


# --- decoding -------------------------------------------------------------------------------------------
def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return clean(value)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("not a whole number")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("neither true nor false")
    return value


def _number(value: Any) -> Decimal:
    found = Decimal(str(value)) if isinstance(value, str | int | float) else Decimal("NaN")
    if not found.is_finite():
        raise ValueError("not a number")
    if found and not SMALLEST <= found.adjusted() <= LARGEST:
        raise ValueError("not a number of dollars or seconds")
    return found or Decimal(0)


def _time(value: Any) -> datetime:
    return datetime.fromisoformat(value).astimezone(UTC)


DECODERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "str": _text, "int": _whole, "bool": _flag, "Decimal": _number, "datetime": _time,
}  # fmt: skip
"""By the annotation of a field, without `| None`."""


@cache
def _decoders(cls: type[Any]) -> tuple[tuple[str, Callable[[Any], Any], bool], ...]:
    """Returns each field's name, its decoder, and whether it is required."""
    return tuple(
        (field.name, DECODERS[str(field.type).partition(" ")[0]], field.default is MISSING)
        for field in fields(cls)
    )


def read(cls: type[T], raw: Any, where: str) -> T:
    """Returns the dataclass whose fields are named as the JSON's; others are ignored.

    Raises:
        UsageError: a value cannot be read, or a required one is missing.
    """
    if not isinstance(raw, dict):
        raise UsageError(f"{where} cannot be read: an object is expected, not {shortened(raw)}")
    found = {}
    for name, decode, required in _decoders(cls):  # type: ignore[arg-type]
        if (value := _optional(decode, raw, name, where)) is not None:
            found[name] = value
        elif required:
            raise UsageError(f"{where} cannot be read: {name} is missing")
    return cls(**found)


# --- for programs ---------------------------------------------------------------------------------------
def facts(job: Job) -> dict[str, Any]:
    """Returns what is known of a job as JSON has it: numbers, RFC 3339 times, null where unknown."""
    found: dict[str, Any] = plain(job)
    for each, attempt in zip(found["attempts"], job.attempts, strict=True):
        each["lostSteps"] = attempt.lost_steps
    return found | {"reason": job.reason}


def plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value
