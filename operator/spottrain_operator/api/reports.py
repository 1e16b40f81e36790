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
    try:
        plain = {name: asdict(item) if isinstance(item, TimeSplit) else item for name, item in raw.items()}
        known = decode(type(report), plain, "")
    except InvalidSpec:
        return None
    changed: dict[str, Any] = {}
    for name in raw:
        value = getattr(known, name)
        if isinstance(value, TimeSplit):
            changed[name] = bounded(value)
            if changed[name] is None:
                return None
        elif isinstance(value, str) and name in TEXTS:
            changed[name] = value[: TEXTS[name]]
        elif isinstance(value, int | float):
            if not (0 <= value < 2**53 if isinstance(value, int) else math.isfinite(value)):
                return None
            if name.endswith("Seconds") or isinstance(report, TimeSplit):
                changed[name] = min(max(0.0, value), MOST_SECONDS)
    return replace(report, **changed)
