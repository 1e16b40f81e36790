"""The operator's log: one JSON line per record, with job and attempt where they are known.

`extra=about(key, attempt=n)` adds the job's fields to a record.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

from spottrain_operator.api.training_job import JobKey

FIELDS: Final = ("namespace", "job", "job_uid", "attempt", "rank", "reason")


def about(key: JobKey, **more: object) -> dict[str, object]:
    return {"namespace": key.namespace, "job": key.name, "job_uid": key.uid, **more}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname,
            "component": "operator",
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(level: str) -> None:
    handler = logging.StreamHandler()  # stderr
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("kopf").setLevel(logging.WARNING)  # at INFO it logs every object
