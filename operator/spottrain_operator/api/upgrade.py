"""What version 0.3 wrote into a status, in today's names. Pure. Goes with the release after the next.

In 0.3 the status held the bookkeeping, too; it is rebuilt from the sums (policies/accounting.py). Fields that
went are ignored when the status is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from spottrain_operator.api.training_job import KEPT_ATTEMPTS

Json = Mapping[str, Any]

STATUS: Final = {"activeSince": "startTime", "gateUntil": "gateEndTime", "nextStart": "nextStartTime"}
TIMES: Final = {
    "started": "startTime",
    "bound": "boundTime",
    "stepped": "firstStepTime",
    "ended": "endTime",
    "startErrorSince": "startErrorTime",
}
PARTS: Final = {"cost": {"time": "updateTime"}, "progress": {"time": "pollTime"}}
CONDITIONS: Final = frozenset(
    {
        *("RuntimeAttached", "StoreReachable", "Interrupted", "CostLimited", "Reconciling"),
        *("SaveFitsNotice", "TrainingSettingsApplied"),
    }
)
"""Those that went."""


def status_of_0_3(status: Json) -> dict[str, Any]:
    """Returns a status with today's names."""
    found = _renamed(status, STATUS)
    found["conditions"] = [c for c in status.get("conditions") or () if c["type"] not in CONDITIONS]
    found["attempts"] = [
        _renamed(record, TIMES) | {"ranks": [], "createdWorkers": len(record.get("ranks") or ())}
        for record in (status.get("attempts") or ())[-KEPT_ATTEMPTS:]
    ]
    return found | {part: _renamed(found[part], names) for part, names in PARTS.items() if part in found}


def _renamed(part: Json, names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in part.items()}
