"""Converts between JSON in camelCase and frozen dataclasses in snake_case.

Encoding omits values that are None or empty; decoding ignores unknown fields.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from spottrain_operator.errors import InvalidSpec

T = TypeVar("T")
SPECIAL: Final = {"checkpoint_uri": "checkpointURI"}
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


def encode(value: Any) -> Any:
    if is_dataclass(value):
        pairs = ((camel(f.name), encode(getattr(value, f.name))) for f in fields(value))
        return {name: item for name, item in pairs if item not in (None, "", [], {})}
    if isinstance(value, datetime):
        return rfc3339(value)
    if isinstance(value, Mapping):
        return dict(value)
    return [encode(item) for item in value] if isinstance(value, tuple) else value


def decode(cls: type[T], raw: Any, path: str = "") -> T:
    """Converts `raw` to a `cls`. Raises InvalidSpec with the field's path where it does not match."""
    if not isinstance(raw, Mapping):
        raise InvalidSpec(f"{path or 'the object'} must be a mapping, not {type(raw).__name__}")
    values = {}
    for name, hint in _hints(cls).items():
        item = raw.get(camel(name))
        if item is not None:
            values[name] = _value(hint, item, f"{path}.{camel(name)}" if path else camel(name))
    try:
        return cls(**values)
    except TypeError as error:
        raise InvalidSpec(f"{path or 'the object'} lacks a field: {error}") from error


_known_hints: Final[dict[type, dict[str, Any]]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _known_hints:
        _known_hints[cls] = get_type_hints(cls)
    return _known_hints[cls]


def _value(hint: Any, raw: Any, path: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _value(next(a for a in args if a is not type(None)), raw, path)
    if origin is tuple:
        return tuple(_value(args[0], item, f"{path}[{i}]") for i, item in enumerate(_expect(list, raw, path)))
    if hint is Any:
        return raw
    return _expect(dict, raw, path) if origin is not None else _scalar(hint, raw, path)


def _scalar(hint: Any, raw: Any, path: str) -> Any:
    if is_dataclass(hint):
        return decode(cast(type, hint), raw, path)
    try:
        if hint is datetime:
            return timestamp(_expect(str, raw, path))
        if issubclass(hint, Enum):
            return hint(raw)
    except ValueError as error:
        must = f"one of {', '.join(str(value) for value in hint)}" if issubclass(hint, Enum) else str(error)
        raise InvalidSpec(f"{path} must be {must}, and is {raw!r}") from error
    return _expect(hint, raw, path)


def _expect(kind: Any, raw: Any, path: str) -> Any:
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if not isinstance(raw, kind) or (isinstance(raw, bool) and kind is int):
        raise InvalidSpec(f"{path} must be {kind.__name__}, not {type(raw).__name__}")
    return raw


def cut(value: T, limits: Mapping[str, int]) -> T:
    """Returns a dataclass with the texts of these fields cut to their limits, in characters."""
    texts = {name: getattr(value, name)[:limit] for name, limit in limits.items()}
    return cast(T, replace(cast(Any, value), **texts))


def well_typed(value: Any) -> bool:
    """Returns whether a flat dataclass matches its type hints, with numbers that JSON can represent."""
    try:
        pairs = [(hint, getattr(value, name)) for name, hint in _hints(type(value)).items()]
        return all(item is None or _sane(_value(hint, item, "")) for hint, item in pairs)
    except (InvalidSpec, OverflowError):  # an integer too large for a float
        return False


def _sane(item: Any) -> bool:
    if isinstance(item, int):
        return 0 <= item < 2**53
    return math.isfinite(item) if isinstance(item, float) else True
