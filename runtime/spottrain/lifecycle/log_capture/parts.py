"""Cuts one rank's output into parts that are stored one by one. Pure.

    add -> [ take -> stored or failed ] -> rest

A part is never changed after the first try, because the store may have it although it gave no response. While
the store does not respond, parts wait. Of too many, the oldest are dropped and replaced by one line.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from spottrain.core import log


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    every: float = 30.0
    """Maximum age of a part before it is closed, in seconds: so much is lost when the machine vanishes."""
    part: int = 2**20
    """Bytes of a part."""
    most: int = 200 * 2**20
    """Bytes of one rank in one attempt."""
    waiting: int = 4
    """Parts that wait for a store, besides the one that is retried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPart:
    number: int
    body: bytes
    tries: int = 0
    """Number of failed tries."""


class RankLog:
    """One rank's output. Times are seconds of one clock."""

    def __init__(self, rank: int, limits: Limits) -> None:
        self._rank = rank
        self._limits = limits
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
        self._failed: LogPart | None = None
        self._again_at = 0.0

    # --- in -----------------------------------------------------------------------------------------
    def add(self, data: bytes, now: float) -> str:
        """Adds output. Returns a line to log when the limit is reached, once; else ""."""
        room = self._limits.most - self._added
        if room <= 0:
            return ""
        if len(self._open) >= self._limits.part:  # nobody takes parts while one is being stored
            self.close_parts(now)
        if not self._open:
            self._since = now
        self._open += data[:room]
        self._added += len(data)
        if len(data) < room:
            return ""
        why = "so much is kept of a rank in one attempt; what follows is not stored"
        line = log.text("logs-full", of=self._rank, bytes=self._limits.most, why=why)
        self._open += b"" if self._open.endswith(b"\n") else b"\n"
        self._open += line.encode()
        return line

    def close_parts(self, now: float, *, all_: bool = False) -> None:
        """Closes parts that are large or old enough, or all."""
        while len(self._open) >= self._limits.part:
            self._close(self._open.rfind(b"\n", 0, self._limits.part) + 1 or self._limits.part)
            self._since = now
        if self._open and (all_ or now - self._since >= self._limits.every):
            self._close(len(self._open))

    def _close(self, end: int) -> None:
        self._waiting.append(bytes(self._open[:end]))
        del self._open[:end]
        while len(self._waiting) > self._limits.waiting:
            self._missing += len(self._waiting.popleft())

    # --- out ----------------------------------------------------------------------------------------
    def take(self, now: float) -> LogPart | None:
        """Returns the part to store now, or None. The caller stores one at a time."""
        self.close_parts(now)
        if self._failed is None:
            return self._made(self._waiting.popleft()) if self._waiting else None
        if now < self._again_at:
            return None
        part, self._failed = self._failed, None
        return part

    def stored(self, part: LogPart) -> None:
        self.unstored -= len(part.body)

    def failed(self, part: LogPart, now: float) -> None:
        """Notes that the part was not stored. It is retried when the next one would be due."""
        self._failed = replace(part, tries=part.tries + 1)
        self._again_at = now + self._limits.every

    def renumbered(self, part: LogPart, newest: int) -> LogPart:
        """Renumbers a part whose number is taken by another writer, whose parts go up to `newest`."""
        self._number = max(self._number, newest) + 1
        return replace(part, number=self._number)

    def rest(self) -> list[LogPart]:
        """Returns all that is left at the end: the failed part, and one part for the rest."""
        failed = [self._failed] if self._failed is not None else []
        body = b"".join(self._waiting) + bytes(self._open)
        self._failed = None
        self._waiting.clear()
        self._open.clear()
        return [*failed, self._made(body)] if body else failed

    def _made(self, body: bytes) -> LogPart:
        if self._missing:
            why = "the store did not respond for too long"
            body = log.text("logs-missing", bytes=self._missing, why=why).encode() + body
            self._missing = 0
        self._number += 1
        self.unstored += len(body)
        return LogPart(number=self._number, body=body)
