"""What a cloud's metadata service can say, in one form for all clouds. Made by sources/, judged by plan.

A finding is also its own identity: the same words read again are the same finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from json import loads
from math import inf
from typing import Any, Final, TypeAlias

from spottrain_operator.api import wire

LEAD_SECONDS: Final = 120.0
"""How long before a maintenance its notice is given: AWS's own two minutes, and enough for a save.

Clouds announce maintenance minutes to weeks ahead; until then it is only advice to save.
"""
BEGUN_SECONDS: Final = 10.0
"""What is assumed to be left of an end that has begun, or whose time is over or cannot be read."""
rfc3339 = partial(wire.rfc3339, timespec="microseconds")
"""A time as runtime and operator read it."""
SHOWN: Final = 200
"""Characters of a foreign text that a sentence quotes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnding:
    """This machine, or what runs on it, comes to an end."""

    source: str
    """Who says so, e.g. `AWS spot/instance-action`."""
    action: str
    """What the cloud calls it, e.g. `terminate`."""
    id: str = ""
    at: datetime | None = None
    """When it begins, where the cloud says so."""
    after: float = 0.0
    """Where it does not: seconds from when it is first read."""
    lead: float = inf
    """Seconds before `at` from which on it is a notice; before that it is advice."""
    acknowledge: str = ""
    """What to tell the cloud when it need not wait any longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A save would be wise; nothing ends yet."""

    source: str
    action: str
    id: str = ""
    at: datetime | None = None
    """When it was given, where the cloud says so."""


Finding: TypeAlias = NodeEnding | Advice


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """A readable answer: what stands at present, which may be nothing."""

    found: tuple[Finding, ...] = ()
    unclear: str = ""
    """A sentence on what else the answer held and nobody could read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """No answer that says anything: time-out, 5xx, foreign text."""

    why: str


Answer: TypeAlias = Findings | Unreadable
NOTHING: Final = Findings()


def found(*findings: Finding) -> Findings:
    return Findings(found=findings)


def moment(text: object) -> datetime:
    """ISO 8601 or RFC 5322 (`Mon, 19 Sep 2016 18:29:47 GMT`); without a zone it is UTC. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"{text!r:.{SHOWN}} is not a time")
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        value = _rfc5322(text)
    try:
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError as e:  # year 1 or 9999 and a zone that moves it beyond
        raise ValueError(f"{text!r:.{SHOWN}} is beyond all calendars") from e


def _rfc5322(text: str) -> datetime:
    try:
        return parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError) as e:
        raise ValueError(f"{text!r:.{SHOWN}} is not a time") from e


def optional_moment(text: object) -> datetime | None:
    try:
        return moment(text)
    except ValueError:
        return None


def parsed(text: str) -> Any:
    """JSON; raises ValueError for what is none, however deep."""
    try:
        return loads(text)
    except RecursionError as e:
        raise ValueError("nested too deep") from e


def word(record: Mapping[str, Any], key: str) -> str:
    """A short text of a record; "" where it is absent or no text."""
    value = record.get(key)
    return value[:SHOWN] if isinstance(value, str) else ""


def unreadable(what: str, text: str) -> Unreadable:
    return Unreadable(why=f"{what} was answered with text that cannot be read: {text[:SHOWN]!r}")
