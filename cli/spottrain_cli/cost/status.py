"""What a TrainingJob says about its cost, decoded. The fields are named as in the CRD's schema.

A figure that is absent is None: an unknown price or time is not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, datetime
from decimal import Decimal
from reprlib import repr as shortened
from typing import Any, Final, TypeVar

from spottrain.errors import RunError

GROUP: Final = "spottrain.io"
KIND: Final = "TrainingJob"
TEAM_LABEL: Final = "spottrain.io/team"
SELF: Final = "Self"
"""spec.checkpoint.mode of an image without the spottrain runtime, which reports nothing."""
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
    return "".join(each if each.isprintable() else "?" for each in text)


def percent(text: str) -> Decimal | None:
    """Returns the number in 93.4%; None where it is unknown."""
    try:
        return _number(text.removesuffix("%"))
    except (ValueError, ArithmeticError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """status.attempts[]"""

    number: int
    node: str = ""
    instanceType: str = ""
    zone: str = ""
    capacityType: str = ""
    workers: int | None = None
    startTime: datetime | None = None
    """When its pods were created."""
    boundTime: datetime | None = None
    """When the last of them got a node."""
    endTime: datetime | None = None
    cause: str = ""
    stopping: str = ""
    startStep: int | None = None
    lastStep: int | None = None
    durableStep: int | None = None
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
class JobCost:
    """A job and what it cost."""

    namespace: str
    name: str
    team: str = ""
    reports: bool = True
    """Whether the image has the runtime, which reports how it spends its time."""
    limit: Decimal | None = None
    """spec.capacity.maxCostUSD"""
    phase: str = ""
    reason: str = ""
    """Of the condition that has the phase's name, such as MaxCostReached for Suspended."""
    attempt: int = 0
    interruptions: int = 0
    failures: int = 0
    attempts: tuple[Attempt, ...] = ()
    cost: Cost | None = None
    goodput: Goodput | None = None

    @property
    def ran(self) -> bool:
        """Whether an attempt had a node, or is not in the status any more."""
        return any(each.node for each in self.attempts) or any(each.number > 1 for each in self.attempts[:1])


def jobs(document: Any, source: str) -> list[JobCost]:
    """Returns the jobs of a TrainingJob's JSON, or of a list of them. Raises RunError."""
    if isinstance(document, dict) and str(document.get("kind", "")).endswith("List"):
        return [_job(each, source) for each in _list(document, "items", f"{source}: the list")]
    return [_job(document, source)]


def _job(document: Any, source: str) -> JobCost:
    group = str(document.get("apiVersion", "")).partition("/")[0] if isinstance(document, dict) else ""
    if group != GROUP or document.get("kind") != KIND:
        kind = document.get("kind", "an object without kind") if isinstance(document, dict) else "no object"
        found = clean(kind) if isinstance(kind, str) else shortened(kind)
        raise RunError(
            f"{source} has {found} where a {KIND} of {GROUP} is expected: give what "
            "`kubectl get tj JOB -o json` prints"
        )
    metadata, status = _table(document, "metadata"), _table(document, "status")
    namespace, name = (_word(metadata, field, f"{source}: metadata") for field in ("namespace", "name"))
    where = f"{namespace}/{name}".lstrip("/")
    cost, goodput = (status.get(name) for name in ("cost", "goodput"))
    return JobCost(
        namespace=namespace,
        name=name,
        team=_word(_table(metadata, "labels"), TEAM_LABEL, f"{where}: metadata.labels"),
        reports=_table(_table(document, "spec"), "checkpoint").get("mode") != SELF,
        limit=_limit(_table(_table(document, "spec"), "capacity").get("maxCostUSD")),
        phase=_word(status, "phase", f"{where}: status"),
        reason=_reason(status, f"{where}: status"),
        attempt=_count(status, "attempt", where),
        interruptions=_count(status, "interruptions", where),
        failures=_count(status, "failures", where),
        attempts=tuple(
            read(Attempt, each, f"{where}: status.attempts[{number}]")
            for number, each in enumerate(_list(status, "attempts", f"{where}: status"))
        ),
        cost=read(Cost, cost, f"{where}: status.cost") if cost else None,
        goodput=read(Goodput, goodput, f"{where}: status.goodput") if goodput else None,
    )


def _reason(status: Mapping[str, Any], where: str) -> str:
    conditions = [each for each in _list(status, "conditions", where) if isinstance(each, dict)]
    own = (each for each in conditions if each.get("type") == status.get("phase"))
    held = (_word(each, "reason", f"{where}.conditions") for each in own if each.get("status") == "True")
    return next(held, "")


def _count(status: Mapping[str, Any], name: str, where: str) -> int:
    value = status.get(name, 0)
    if not isinstance(value, int):
        raise RunError(f"{where}: status.{name} cannot be read: {shortened(value)}")
    return value


def _limit(value: Any) -> Decimal | None:
    """Returns None where there is none, or where the operator refuses it."""
    try:
        return _number(value)
    except (ValueError, ArithmeticError):
        return None


def _list(document: Mapping[str, Any], name: str, where: str) -> list[Any]:
    found = document.get(name)
    if found is not None and not isinstance(found, list):
        raise RunError(f"{where}.{name} cannot be read: a list is expected, not {shortened(found)}")
    return found or []


def _word(document: Mapping[str, Any], name: str, where: str) -> str:
    try:
        return _text(document.get(name) or "")
    except TypeError as error:
        raise RunError(f"{where}.{name} cannot be read: {shortened(document[name])}") from error


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}


# --- decoding -------------------------------------------------------------------------------------------
def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return clean(value)


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
    "str": _text, "int": int, "Decimal": _number, "datetime": _time,
}  # fmt: skip
"""By the annotation of a field, without `| None`."""


def read(cls: type[T], raw: Any, where: str) -> T:
    """Returns the dataclass whose fields are named as the JSON's; others are ignored.

    Raises:
        RunError: a value cannot be read, or a required one is missing.
    """
    if not isinstance(raw, dict):
        raise RunError(f"{where} cannot be read: an object is expected, not {shortened(raw)}")
    found = {}
    for field in fields(cls):  # type: ignore[arg-type]
        value = raw.get(field.name)
        if value is None and field.default is MISSING:
            raise RunError(f"{where} cannot be read: {field.name} is missing")
        if value is None:
            continue
        try:
            found[field.name] = DECODERS[str(field.type).partition(" ")[0]](value)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise RunError(f"{where}.{field.name} cannot be read: {shortened(value)}") from error
    return cls(**found)
