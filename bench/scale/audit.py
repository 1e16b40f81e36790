"""Who wrote what and when, by the API server's audit log. Pure but for the reading of the file.

The log has every write as it was answered, so all times are of one clock, and no client is believed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from spottrain_operator.names import FIELD_MANAGER

OPERATOR: Final = frozenset({FIELD_MANAGER, "kopf"})
"""User agents of the operator's own client and of kopf's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    agent: str
    """User agent, up to the first slash."""
    verb: str
    resource: str
    """With its subresource, as `trainingjobs/status`; `(dry run)` after it where nothing was written."""
    namespace: str
    name: str
    code: int
    at: float
    """Unix seconds at which the request came."""
    answered: float

    @property
    def operators(self) -> bool:
        return self.agent in OPERATOR

    @property
    def made(self) -> bool:
        return 200 <= self.code < 300


class Log:
    """What is written to an audit log from now on. A rotated file is read to its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._rest = b""

    def close(self) -> None:
        self._file.close()

    def writes(self) -> list[Write]:
        """What has come since the last call."""
        text = self._rest + self._file.read()
        if self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:  # rotated: the old one is whole
            text += self._file.read()
            self._file.close()
            self._file = self._path.open("rb")
            text += self._file.read()
        *whole, self._rest = text.split(b"\n")
        return list(parse(whole))


def parse(lines: Iterable[bytes]) -> Iterator[Write]:
    for line in lines:
        if not line:
            continue
        event: dict[str, Any] = json.loads(line)
        what = event.get("objectRef")
        if event["stage"] != "ResponseComplete" or not what:
            continue
        sub, dry = what.get("subresource"), "dryRun=" in event["requestURI"]
        yield Write(
            agent=event.get("userAgent", "").partition("/")[0],
            verb=event["verb"],
            resource=what["resource"] + (f"/{sub}" if sub else "") + (" (dry run)" if dry else ""),
            namespace=what.get("namespace", ""),
            name=what.get("name", ""),
            code=event.get("responseStatus", {}).get("code", 0),
            at=unix(event["requestReceivedTimestamp"]),
            answered=unix(event["stageTimestamp"]),
        )


def unix(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def by_verb(writes: Iterable[Write], jobs: int) -> dict[str, float]:
    """Writes for each job, by verb and resource, the most frequent first; refused ones have their code."""
    count = Counter(f"{w.verb} {w.resource}" + ("" if w.made else f" {w.code}") for w in writes)
    return {what: round(number / jobs, 2) for what, number in count.most_common()}
