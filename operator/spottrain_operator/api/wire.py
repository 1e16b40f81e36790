"""How dataclasses and times are written as JSON, and read: names in camelCase, RFC 3339."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from typing import Any, Final, Literal, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError, to_json

from spottrain_operator import names
from spottrain_operator.errors import InvalidSpec

T = TypeVar("T")
SPECIAL: Final = {
    "checkpoint_uri": "checkpointURI",
    "max_cost_usd": "maxCostUSD",
    "active_since": "startTime",
    "gate_until": "gateEndTime",
    "next_start": "nextStartTime",
    "started": "startTime",
    "bound": "boundTime",
    "stepped": "firstStepTime",
    "ended": "endTime",
    "start_error_since": "startErrorTime",
}
"""JSON names that the camelCase rule does not produce."""


def camel(name: str) -> str:
    if name in SPECIAL:
        return SPECIAL[name]
    first, *rest = name.rstrip("_").split("_")
    return first + "".join(word.capitalize() for word in rest)


def timestamp(text: str) -> datetime:
    """Parses RFC 3339 with any number of fractional digits. Raises ValueError."""
    value = datetime.fromisoformat(text)
    if value.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return value.astimezone(UTC)


def optional_timestamp(text: object) -> datetime | None:
    """Parses RFC 3339; None where it is invalid or far from today, because anyone may write an annotation."""
    try:
        value = timestamp(text) if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None
    return value if value is not None and 2000 < value.year < 3000 else None


def unix_timestamp(text: str) -> datetime | None:
    """Parses whole seconds since 1970; None where it is anything else."""
    if not (text.isdecimal() and len(text) <= len("9999999999")):
        return None
    return datetime.fromtimestamp(int(text), UTC)


def rfc3339(value: datetime, *, timespec: str = "auto") -> str:
    return value.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def deadline_annotations(deadline: datetime, source: str) -> dict[str, str]:
    """Returns the annotations of a termination notice; the trainer reads the first as a file."""
    return {
        names.DEADLINE_ANNOTATION: rfc3339(deadline, timespec="microseconds"),
        names.SOURCE_ANNOTATION: source,
    }


def decode(cls: type[T], raw: Any, path: str, *, extra: Literal["ignore", "forbid"] = "ignore") -> T:
    """Converts JSON to a dataclass. Raises InvalidSpec with a sentence for each field that does not fit.

    `extra`: what becomes of fields that the dataclass does not have.
    """
    try:
        return cast(T, _adapter(cast(Any, cls), extra).validate_json(_as_text([raw]))[0])
    except RecursionError:  # [[[[[[...
        raise InvalidSpec(f"{path or 'it'} is nested too deeply") from None
    except ValidationError as error:
        wrong = (_mistake(each, path) for each in error.errors(include_url=False))
        raise InvalidSpec("; ".join(wrong)) from None


def _as_text(raw: list[Any]) -> bytes:
    """Returns JSON. pydantic needs a third of the time of json, which takes what pydantic refuses."""
    try:
        return to_json(raw)
    except PydanticSerializationError:
        # A trainer's error may contain half of a surrogate pair, which is not valid JSON.
        return json.dumps(raw, ensure_ascii=False).encode(errors="replace")


@cache
def _adapter(cls: Any, extra: Literal["ignore", "forbid"]) -> TypeAdapter[Any]:
    """Of a list, because pydantic accepts no configuration for a dataclass itself."""
    config = ConfigDict(alias_generator=camel, strict=True, extra=extra)
    return TypeAdapter(cast(Any, list)[cls], config=config)


def _mistake(error: ErrorDetails, path: str) -> str:
    steps = error["loc"][1:]
    where = path + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    where = where.removeprefix(".") or "it"
    match error["type"]:
        case "json_invalid":  # nested too deeply
            return f"{where}: {error['msg']}"
        case "missing":
            return f"{where} is required"
        case "unexpected_keyword_argument":
            return f"{where} is not a known field"
    must = re.sub(r"^[\w ]*? should", "must", error["msg"])
    return f"{where} {must}, and is {json.dumps(error['input'])[:80]}"


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON merge patch (RFC 7386) from one object to another; lists are replaced as a whole."""
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        known = old.get(name)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            if inner := merge_patch(known, value):
                patch[name] = inner
        elif name not in old or value != known:
            patch[name] = value
    return patch


def encode(value: Any) -> Any:
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if is_dataclass(value):
        result = {}
        for attribute, name in _fields(kind):
            item = getattr(value, attribute)
            if type(item) not in _PLAIN:
                item = encode(item)
            if item or item not in _EMPTY:
                result[name] = item
        return result
    if isinstance(value, datetime):
        return rfc3339(value)
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, Mapping):
        return dict(value)
    return [encode(item) for item in value] if isinstance(value, tuple) else value


_PLAIN: Final = frozenset({type(None), str, int, bool, float})
_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})


@cache
def _fields(cls: Any) -> tuple[tuple[str, str], ...]:
    """Returns the fields of a dataclass with their names in JSON."""
    return tuple((f.name, camel(f.name)) for f in fields(cls))
