"""Cuts one rank's output into parts that are stored one by one. Pure.

    add -> [ turn -> take -> stored, failed or taken ] -> rest

A part is never changed after the first try, because the store may have it although it gave no response. While
the store does not respond, parts wait. Of too many, the oldest are dropped and replaced by one line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

EVERY_SECONDS: Final = 30.0
"""Maximum age of a part before it is closed, in seconds: so much is lost when the machine vanishes."""
PART_BYTES: Final = 2**20
MOST_BYTES: Final = 200 * 2**20
"""Maximum for one rank in one attempt."""
MOST_WAITING: Final = 4
"""Maximum number of parts that wait for a store, besides the one that is retried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    every: float = EVERY_SECONDS
    part: int = PART_BYTES
    most: int = MOST_BYTES
    waiting: int = MOST_WAITING


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPart:
    number: int
    body: bytes
    tries: int = 0
    """Number of failed tries."""


class RankLog:
    """One rank's output. Times are seconds of one clock; `gap(bytes)` and `full(bytes)` return log lines."""

    def __init__(
        self, gap: Callable[[int], str], full: Callable[[int], str], limits: Limits | None = None
    ) -> None:
        self._gap = gap
        self._full = full
        self._limits = limits or Limits()
        self._open = bytearray()
        self._since = 0.0
        """When the first byte of the open part arrived."""
        self._waiting: deque[bytes] = deque()
        self._missing = 0
        """Bytes dropped before the first waiting part."""
        self._added = 0
        self._number = 0
        self.unstored = 0
        """Bytes of the parts that were created and are not stored."""
        self._trying: LogPart | None = None
        self._failed = False
        self._again_at = 0.0

    # --- in -----------------------------------------------------------------------------------------
    def add(self, data: bytes, now: float) -> str:
        """Adds output. Returns a line to log when the limit is reached, once; else ""."""
        room = self._limits.most - self._added
        if room <= 0:
            return ""
        if not self._open:
            self._since = now
        self._open += data[:room]
        self._added += len(data)
        if len(data) < room:
            return ""
        line = self._full(self._limits.most)
        self._open += b"" if self._open.endswith(b"\n") else b"\n"
        self._open += line.encode()
        return line

    def turn(self, now: float, *, hurry: bool = False) -> None:
        """Closes parts that are large or old enough; with `hurry`, whatever there is."""
        while len(self._open) >= self._limits.part:
            end = self._open.rfind(b"\n", 0, self._limits.part) + 1 or self._limits.part
            self._close(end)
            self._since = now
        if self._open and (hurry or now - self._since >= self._limits.every):
            self._close(len(self._open))

    def _close(self, end: int) -> None:
        self._waiting.append(bytes(self._open[:end]))
        del self._open[:end]
        while len(self._waiting) > self._limits.waiting:
            self._missing += len(self._waiting.popleft())

    # --- out ----------------------------------------------------------------------------------------
    def take(self, now: float) -> LogPart | None:
        """Returns the part to store now, or None if there is none or one is being stored."""
        if self._trying is not None:
            if not self._failed or now < self._again_at:
                return None
            self._failed = False
            return self._trying
        if not self._waiting:
            return None
        self._trying = self._made(self._waiting.popleft())
        return self._trying

    def stored(self, part: LogPart) -> None:
        self.unstored -= len(part.body)
        if self._trying is not None and part.number == self._trying.number:
            self._trying = None

    def failed(self, now: float) -> None:
        """Notes that the current part was not stored. It is retried when the next one would be due."""
        if self._trying is not None:
            self._trying, self._failed = replace(self._trying, tries=self._trying.tries + 1), True
            self._again_at = now + self._limits.every

    def taken(self, part: LogPart, newest: int) -> LogPart:
        """Renumbers a part whose number is taken by another writer, whose parts go up to `newest`."""
        self._number = max(self._number, newest) + 1
        self._trying = replace(part, number=self._number)
        return self._trying

    def rest(self) -> list[LogPart]:
        """Returns all that is not stored, at the end: the failed part, and one part for the rest."""
        found = [self._trying] if self._trying is not None and self._failed else []
        body = b"".join(self._waiting) + bytes(self._open)
        self._waiting.clear()
        self._open.clear()
        return [*found, self._made(body)] if body else found

    def _made(self, body: bytes) -> LogPart:
        if self._missing:
            body = self._gap(self._missing).encode() + body
            self._missing = 0
        self._number += 1
        self.unstored += len(body)
        return LogPart(number=self._number, body=body)
