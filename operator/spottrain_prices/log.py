"""The price CronJob's log: one JSON line per message, on stdout."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from spottrain_operator.api.wire import rfc3339


def log(level: str, message: str) -> None:
    time = rfc3339(datetime.now(UTC), timespec="milliseconds")
    print(json.dumps({"time": time, "level": level, "component": "prices", "message": message}), flush=True)
