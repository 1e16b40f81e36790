"""Fields of a status that this version does not know: a newer operator has written them. Pure.

A status is written as a whole (server-side apply), so what is left out is removed. These fields are therefore
written again as they were read. So are the defaults as a whole where this version would write them otherwise:
they never change once they are there, and the definition refuses a write that changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Final

from spottrain_operator.api.training_job import (
    AttemptRecord,
    CostStatus,
    GoodputStatus,
    OutputStatus,
    ProgressStatus,
    Status,
)
from spottrain_operator.api.wire import camel, encode

Json = Mapping[str, Any]
PARTS: Final = {
    "progress": ProgressStatus,
    "output": OutputStatus,
    "cost": CostStatus,
    "goodput": GoodputStatus,
}
ATTEMPTS: Final = "attempts"
DEFAULTS: Final = "defaults"


@cache
def _known(cls: type) -> frozenset[str]:
    return frozenset(camel(field.name) for field in fields(cls))


def unknown_fields(status: Json, parsed: Status) -> Json:
    """Returns what a raw status has beyond `Status`: at its top, in its parts, and by attempt number.

    Args:
        status: As it was read.
        parsed: What this version knows of it.
    """
    found = _beyond(status, Status)
    if (defaults := status.get(DEFAULTS)) is not None and defaults != (encode(parsed.defaults) or None):
        found[DEFAULTS] = defaults
    for name, cls in PARTS.items():
        if isinstance(part := status.get(name), Mapping) and (more := _beyond(part, cls)):
            found[name] = more
    records = [r for r in status.get(ATTEMPTS) or () if isinstance(r, Mapping)]
    attempts = {r.get("number"): more for r in records if (more := _beyond(r, AttemptRecord))}
    return found | {ATTEMPTS: attempts} if attempts else found


def _beyond(raw: Json, cls: type) -> dict[str, Any]:
    return {name: raw[name] for name in raw.keys() - _known(cls)}


def with_unknown(status: dict[str, Any], unknown: Json) -> dict[str, Any]:
    """Returns a status in JSON with these fields, without those of parts and attempts that are gone."""
    result = {name: value for name, value in unknown.items() if name not in PARTS and name != ATTEMPTS}
    result |= status | ({DEFAULTS: unknown[DEFAULTS]} if DEFAULTS in unknown else {})
    for name in PARTS:
        if name in unknown and name in status:
            result[name] = dict(unknown[name]) | status[name]
    attempts = unknown.get(ATTEMPTS) or {}
    if attempts and ATTEMPTS in status:
        result[ATTEMPTS] = [dict(attempts.get(r["number"], {})) | r for r in status[ATTEMPTS]]
    return result
