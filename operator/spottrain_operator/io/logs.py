"""The operator's log: one JSON line per record, with job and attempt where they are known.

`extra=about(key, attempt=n)` adds the job's fields to a record.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from typing import Any, Final

from spottrain_operator.api.training_job import JobKey

FIELDS: Final = ("namespace", "job", "job_uid", "attempt", "rank", "reason")


QUIET_SECONDS: Final = 60.0


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


class QuietLog:
    """Which of repeated log lines to write: one a minute about each subject, and each with other words.

    Args:
        clock: Seconds, never set back; None: of the event loop.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._last: dict[Hashable, tuple[float, str]] = {}
        """Time and words of the last line, by subject."""

    def due(self, subject: Hashable = None, words: str = "") -> bool:
        """Returns whether to write a line now; without words the next one comes after a minute."""
        now = self._clock()
        at, said = self._last.get(subject, (-math.inf, words))
        if said == words and now < at + QUIET_SECONDS:
            return False
        self._last[subject] = now, words
        return True

    def reset(self, subject: Hashable = None) -> None:
        """Makes the next line about a subject due: it is not a repetition any more."""
        self._last.pop(subject, None)


def set_up(level: str) -> None:
    handler = logging.StreamHandler()  # stderr
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("kopf").setLevel(logging.WARNING)  # at INFO it logs every object
