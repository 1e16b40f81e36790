"""The agent's log: one JSON line per event."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from spottrain_operator.agent.findings import rfc3339


def utc_now() -> datetime:
    return datetime.now(UTC)


def log(event: str, **fields: object) -> None:
    line = {"time": rfc3339(utc_now()), "component": "agent", "event": event, **fields}
    print(json.dumps(line), flush=True)
