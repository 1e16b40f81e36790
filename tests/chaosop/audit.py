"""What the API server's audit log says of a scene: pods made twice, two attempts at once, pods after the end.

Pure but for `Tail`, which reads the log. Claims, releases and deaths are in the log because each is also a
write that changes nothing but a mark; so all that is judged here has one clock, the API server's. Used by
judge and stage.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

MARKS: Final = "marks"
"""The ConfigMap of a scene's namespace whose writes are marks."""


class Mark(StrEnum):
    CLAIM = "claim"
    """Rank 0 of an attempt owns HEAD from here on."""
    RELEASE = "release"
    DEATH = "death"
    """Rank 0 of an attempt does nothing more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A write that took effect."""

    at: str
    """RFC 3339 with microseconds, when it was answered; compared as text."""
    namespace: str
    pod: str = ""
    """Name of the pod that it made."""
    mark: Mark | None = None
    attempt: int = 0
    """Of the mark."""


def mark_query(mark: Mark, attempt: int) -> str:
    return f"fieldManager={mark}-{attempt}"


def parse(line: str) -> Entry | None:
    """None where the line is about something else, or about what was refused or only tried."""
    raw: dict[str, Any] = json.loads(line)
    ref, query = raw.get("objectRef") or {}, parse_qs(urlsplit(raw["requestURI"]).query)
    code = (raw.get("responseStatus") or {}).get("code", 0)
    if raw.get("stage") != "ResponseComplete" or not 200 <= code < 300 or "dryRun" in query:
        return None
    about = (raw["verb"], ref.get("resource"), ref.get("subresource"))
    common = {"at": raw["stageTimestamp"], "namespace": ref.get("namespace", "")}
    if about == ("create", "pods", None) and code == 201:
        return Entry(**common, pod=ref["name"])
    if about == ("patch", "configmaps", None) and ref.get("name") == MARKS:
        mark, _, attempt = query["fieldManager"][0].rpartition("-")
        return Entry(**common, mark=Mark(mark), attempt=int(attempt))
    return None


class Tail:
    """The log so far, by namespace."""

    def __init__(self, log: Path) -> None:
        self._log, self._offset = log, 0
        self._entries: dict[str, list[Entry]] = defaultdict(list)

    def entries(self, namespace: str) -> list[Entry]:
        self._read()
        return sorted(self._entries[namespace], key=lambda e: e.at)

    def forget(self, namespace: str) -> None:
        self._entries.pop(namespace, None)

    def _read(self) -> None:
        if self._log.stat().st_size < self._offset:
            raise RuntimeError(f"{self._log} was rotated: play fewer scenes in one run")
        with self._log.open("rb") as file:
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")  # the last line may be half written
        self._offset += len(whole) + bool(whole)
        for line in whole.decode().splitlines():
            if (entry := parse(line)) is not None:
                self._entries[entry.namespace].append(entry)


# --- what is judged --------------------------------------------------------------------------------------
def made_twice(entries: Iterable[Entry]) -> list[str]:
    """Names of pods that were made more than once."""
    counts = Counter(e.pod for e in entries if e.pod)
    return sorted(name for name, times in counts.items() if times > 1)


def overlaps(entries: Iterable[Entry]) -> list[tuple[int, int]]:
    """Pairs of attempts of which the second claimed before the first had released or died."""
    found, holding = [], dict[int, bool]()
    for entry in sorted(entries, key=lambda e: e.at):
        if entry.mark is Mark.CLAIM:
            found += [(other, entry.attempt) for other in holding if other != entry.attempt]
            holding[entry.attempt] = True
        elif entry.mark is not None:
            holding.pop(entry.attempt, None)
    return found


def made_after(entries: Iterable[Entry], at: str) -> list[str]:
    """Names of pods that were made after a moment."""
    return [e.pod for e in entries if e.pod and e.at > at]
