"""Notices of the clouds' metadata services, in one form for all clouds.

Findings compare by value: the same content read again is the same finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from json import loads
from math import inf
from typing import Any, Final

from spottrain_operator.api import wire

LEAD_SECONDS: Final = 120.0
"""Seconds before a maintenance at which it becomes a notice: AWS's own two minutes, enough for a save.

Clouds announce maintenance minutes to weeks ahead; until then it is only advice to save.
"""
BEGUN_SECONDS: Final = 10.0
"""Seconds assumed to remain when an end has begun, or when its time is past or unreadable."""
rfc3339 = partial(wire.rfc3339, timespec="microseconds")
"""Formats a time as the runtime and the operator expect it."""
SHOWN: Final = 200
"""Maximum number of characters quoted from an external text."""


class Unreadable(Exception):
    """The metadata service gave no usable response; the text names the request and the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """An end of this machine, or of the workload on it; or a recommendation to save a checkpoint."""

    source: str
    """Where it comes from, e.g. `AWS spot/instance-action`."""
    action: str
    """The cloud's name of the action, e.g. `terminate`."""
    id: str = ""
    ends: bool = True
    """False: a recommendation, nothing is terminated yet."""
    at: datetime | None = None
    """When the end begins, or the recommendation was given, if the cloud reports a time."""
    after: float = 0.0
    """Without `at`: seconds from the first reading until the end begins."""
    lead: float = inf
    """Seconds before `at` at which an end becomes a notice; until then it is advice to save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """A readable response: the findings at present, possibly none."""

    found: tuple[Finding, ...] = ()
    unclear: str = ""
    """A sentence about parts of the response that could not be parsed."""


NOTHING: Final = Findings()


def found(*findings: Finding) -> Findings:
    return Findings(found=findings)


def moment(text: Any) -> datetime | None:
    """Parses ISO 8601 or RFC 5322 (`Mon, 19 Sep 2016 18:29:47 GMT`), by default UTC; None for other texts."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            value = parse(text)
            return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        except (AttributeError, IndexError, OverflowError, TypeError, ValueError):
            continue
    return None


def parsed(text: str) -> Any:
    """Parses JSON; None where it is invalid or nested too deep."""
    try:
        return loads(text)
    except (RecursionError, ValueError):
        return None


def each(events: list[Any], parse: Callable[[Any], Finding | None]) -> Findings:
    """Parses a list of events one by one: an unreadable one does not hide the others."""
    readable: list[Finding] = []
    unclear: list[str] = []
    for event in events:
        try:
            if (finding := parse(event)) is not None:
                readable.append(finding)
        except (ValueError, KeyError, TypeError) as e:
            unclear.append(f"{event!r:.200}: {type(e).__name__} {e!s:.100}")
    return Findings(found=tuple(readable), unclear="; ".join(unclear[:3]))


def word(record: Mapping[str, Any], key: str) -> str:
    """Returns a record's text field, shortened; "" where it is absent or not a string."""
    value = record.get(key)
    return value[:SHOWN] if isinstance(value, str) else ""


def unreadable(what: str, text: str) -> Unreadable:
    return Unreadable(f"{what} returned text that cannot be parsed: {text[:SHOWN]!r}")
