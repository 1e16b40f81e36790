"""What a container says about itself, in its progress or its termination message: bounded before it is used.

Images are untrusted, and a plan counts with these numbers and writes these texts into the job's status.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, Final, TypeVar

from spottrain.contract import Progress, TerminationMessage, TimeSplit

from spottrain_operator.api.training_job import (
    REASON_LIMIT,
    STATE_LIMIT,
    TIME_LIMIT,
    URI_LIMIT,
    WARNING_LIMIT,
)
from spottrain_operator.api.wire import decode
from spottrain_operator.errors import InvalidSpec

Report = TypeVar("Report", Progress, TerminationMessage, TimeSplit)

TEXTS: Final[Mapping[str, int]] = {
    "state": STATE_LIMIT,
    "durableTime": TIME_LIMIT,
    "reason": REASON_LIMIT,
    "outputURI": URI_LIMIT,
    "warning": WARNING_LIMIT,
    "waitingFor": WARNING_LIMIT,
    "ignoredSettings": WARNING_LIMIT,
}
"""Maximum number of characters of the texts that the status contains."""
MOST_SECONDS: Final = 1e9
"""30 years: no container runs longer, and a time that is so far away is still a date."""


def bounded(report: Report) -> Report | None:
    """Returns a report with its texts cut and its seconds between 0 and MOST_SECONDS.

    None where it has a field of a wrong type, or a number that JSON cannot represent.
    """
    raw = {f.name: getattr(report, f.name) for f in fields(report)}
    raw = {name: asdict(item) if isinstance(item, TimeSplit) else item for name, item in raw.items()}
    try:
        known = decode(type(report), raw, "")
    except InvalidSpec:
        return None
    return _bounded(report) if _sane(asdict(known)) else None


def _sane(item: Any) -> bool:
    if isinstance(item, dict):
        return all(map(_sane, item.values()))
    if isinstance(item, int):
        return 0 <= item < 2**53
    return math.isfinite(item) if isinstance(item, float) else True


def _bounded(report: Report) -> Report:
    values = {f.name: getattr(report, f.name) for f in fields(report)}
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, TimeSplit):
            changed[name] = _bounded(value)
        elif isinstance(value, str) and name in TEXTS:
            changed[name] = value[: TEXTS[name]]
        elif value is not None and (name.endswith("Seconds") or isinstance(report, TimeSplit)):
            changed[name] = min(max(0.0, value), MOST_SECONDS)
    return replace(report, **changed)
