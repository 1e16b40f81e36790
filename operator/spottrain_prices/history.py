"""Merges fetched prices with those that were written before, and writes them as a price list. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from spottrain_operator.api.prices import ALWAYS, VALID_FOR, Kind, Rate
from spottrain_operator.api.wire import rfc3339

LARGEST: Final = 900 * 1024
"""Bytes; a ConfigMap holds 1 MiB."""
FOREVER: Final = datetime.max.replace(tzinfo=UTC)

Rates = Mapping[Kind, Sequence[Rate]]


def merged(old: Rates, fetched: Rates, *, since: datetime) -> dict[Kind, list[Rate]]:
    """Returns the rates of both.

    A fetched history replaces what was written of the same time. What was not fetched stays as it is, and
    becomes unknown by its `checked`. Rates that ended before `since` are dropped.
    """
    result: dict[Kind, list[Rate]] = {}
    for kind in sorted({*old, *fetched}):
        new = fetched.get(kind, ())
        kept = [rate for rate in old.get(kind, ()) if not new or rate.since < new[0].since]
        current = [rate for rate, end in _with_ends([*kept, *new]) if end >= since]
        if current:
            result[kind] = current
    return result


def as_text(rates: Rates, *, largest: int = LARGEST) -> tuple[str, int]:
    """Returns the price list, and how many rates were left out because it would be too large.

    Those that ended first are left out, so that the time before the others is unknown.
    """
    entries = [
        (end, _entry(kind, rate)) for kind, history in rates.items() for rate, end in _with_ends(history)
    ]
    room = largest - len("[]")
    kept: set[int] = set()
    for number in sorted(range(len(entries)), key=lambda number: (entries[number][0], number), reverse=True):
        room -= len(entries[number][1].encode()) + len(",\n")
        if room < 0:
            break
        kept.add(number)
    text = ",\n".join(entry for number, (_, entry) in enumerate(entries) if number in kept)
    return f"[{text}]", len(entries) - len(kept)


def _with_ends(history: Sequence[Rate]) -> Iterator[tuple[Rate, datetime]]:
    """Yields each rate of one kind with the time when the next one began, or when it becomes unknown.

    No rate ends before the one that it replaced: whoever drops what ended first never leaves an older rate
    in force.
    """
    for number, rate in enumerate(history):
        following = history[number + 1].since if number + 1 < len(history) else None
        known = FOREVER if rate.checked is None else max(rate.since, rate.checked + VALID_FOR)
        yield rate, following or known


def _entry(kind: Kind, rate: Rate) -> str:
    instance_type, capacity_type, zone = kind
    entry = {"instanceType": instance_type, "capacityType": capacity_type}
    if zone:
        entry["zone"] = zone
    entry["usdPerHour"] = f"{rate.usd_per_hour.normalize():f}"
    if rate.since != ALWAYS:
        entry["since"] = rfc3339(rate.since)
    if rate.checked is not None:
        entry["checked"] = rfc3339(rate.checked)
    return json.dumps(entry, separators=(",", ":"))
