"""Stores each rank's output in parts, one by one, without ever blocking who forwards it.

A part is never changed after the first try, because the store may have it although it gave no response. While
the store does not respond the output waits. Of too much, the oldest is dropped and replaced by one line.

Objects are written once. They are read or listed in two cases only. The first: a part's name is taken, by
another job on this URI, an earlier process, or a try whose response was lost. The second: the attempt has no
number. Errors are logged in one line, and the part is retried with the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from spottrain.contract import LOGS_PREFIX, log_key, part_of_log
from spottrain.core import log
from spottrain.storage.base import AlreadyExists, Store

LOOK_SECONDS: Final = 0.5
"""Seconds between two checks for a part to store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    every: float = 30.0
    """Maximum age of output that is not stored, in seconds: so much is lost when the machine vanishes."""
    part: int = 2**20
    """Bytes of a part."""
    most: int = 200 * 2**20
    """Bytes of one rank in one attempt."""
    waiting: int = 4 * 2**20
    """Bytes that wait for the store, besides the part that is retried."""


class RankLog:
    """One rank's output, cut into parts. Times are seconds of one clock. Any thread may add; one stores.

    add -> [ due -> stored or failed ]
    """

    def __init__(self, rank: int, limits: Limits) -> None:
        self._rank = rank
        self._limits = limits
        self._turn = threading.Lock()
        self._waiting = bytearray()
        """Output of which no part was made yet."""
        self._since = 0.0
        """When its first byte arrived."""
        self._missing = 0
        """Bytes dropped before it."""
        self._added = 0
        self._part = b""
        """The part that is being stored, or has failed."""
        self._again_at = 0.0
        self.number = 0
        """Of this part, or else of the last one. Whoever finds its name taken may raise it."""

    def add(self, data: bytes, now: float) -> str:
        """Adds output. Returns a line to log when the limit is reached, once; else ""."""
        with self._turn:
            room = self._limits.most - self._added
            if room <= 0:
                return ""
            if not self._waiting:
                self._since = now
            self._waiting += data[:room]
            self._added += len(data)
            line = ""
            if len(data) >= room:
                why = "so much is kept of a rank in one attempt; what follows is not stored"
                line = log.text("logs-full", of=self._rank, bytes=self._limits.most, why=why)
                self._waiting += b"" if self._waiting.endswith(b"\n") else b"\n"
                self._waiting += line.encode()
            excess = len(self._waiting) - self._limits.waiting
            if excess > 0:
                end = self._waiting.find(b"\n", excess - 1) + 1 or excess
                del self._waiting[:end]
                self._missing += end
            return line

    def due(self, now: float, *, last: bool = False) -> bytes:
        """Returns the part to store now, or b"". `last`: however little or young it is."""
        with self._turn:
            if self._part:
                return self._part if last or now >= self._again_at else b""
            size, most = len(self._waiting), self._limits.part
            if not size or not (last or size >= most or now - self._since >= self._limits.every):
                return b""
            end = size if size <= most else self._waiting.rfind(b"\n", 0, most) + 1 or most
            self._part = bytes(self._waiting[:end])
            del self._waiting[:end]
            if self._missing:
                why = "the store did not respond for too long"
                self._part = log.text("logs-missing", bytes=self._missing, why=why).encode() + self._part
                self._missing = 0
            self.number += 1
            return self._part

    @property
    def unstored(self) -> int:
        """Bytes that are not stored."""
        with self._turn:
            return len(self._part) + len(self._waiting)

    def stored(self) -> None:
        with self._turn:
            self._part = b""

    def failed(self, now: float) -> None:
        """Notes that the part was not stored. It is retried when the next one would be due."""
        self._again_at = now + self._limits.every


class LogUploader:
    """Stores the parts of all ranks in one thread.

    `open_store` is called in that thread, when there is something to store. `say` prints a line to the log.
    `attempt`: None if it has no number; then it is one more than the last attempt with logs.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        ranks: Iterable[int],
        *,
        attempt: int | None,
        say: Callable[[str], None],
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_store = open_store
        self._attempt = attempt
        self._say = say
        self._clock = clock
        self._logs = {rank: RankLog(rank, limits or Limits()) for rank in ranks}
        self._finishing = threading.Event()
        self._store: Store | None = None
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="log-uploader", daemon=True)

    def add(self, rank: int, data: bytes) -> None:
        if line := self._logs[rank].add(data, self._clock()):
            self._say(line)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._finishing.wait(LOOK_SECONDS):
            self.send()
        self.send(last=True)

    def finish(self, seconds: float) -> None:
        """Sends all that is left. Reports what is not stored in time."""
        self._finishing.set()
        self._thread.join(seconds)
        for rank, each in self._logs.items():
            if missing := each.unstored:
                why = "the store did not take it in time"
                self._say(log.text("logs-missing", of=rank, bytes=missing, why=why))

    def send(self, *, last: bool = False) -> None:
        """Tries to store the parts that are due. `last`: all that is left, once."""
        for rank, each in self._logs.items():
            while body := each.due(self._clock(), last=last):
                try:
                    self._put(rank, each, body)
                except Exception as error:  # of any kind, also of an SDK: it must not disturb the training
                    each.failed(self._clock())
                    if not self._failing:
                        why = f"{type(error).__name__}: {error}"
                        then = "later parts are tried without a message"
                        self._say(log.text("logs-failed", error=why, next=then))
                    self._failing = True
                    break
                each.stored()
                self._failing = False

    def _put(self, rank: int, rank_log: RankLog, body: bytes) -> None:
        """Stores a part, behind those of another writer if its name is taken. Raises StoreError."""
        if self._store is None:
            self._store = self._open_store()
        if self._attempt is None:
            self._attempt = 1 + self._last(LOGS_PREFIX, 0)
        while True:
            key = log_key(self._attempt, rank, rank_log.number)
            try:
                self._store.put_if_absent(key, body)
                return
            except AlreadyExists:
                found = self._store.get(key)  # an earlier try whose response was lost may have stored it
                if found is not None and found.body == body:
                    return
                rank_log.number = 1 + self._last(key.rpartition("/")[0] + "/", 2)

    def _last(self, prefix: str, place: int) -> int:
        """Returns the highest attempt (`place` 0) or part number (2) of the parts under a prefix."""
        assert self._store is not None
        found = [part_of_log(key) for key in self._store.list(prefix)]
        return max((part[place] for part in found if part), default=0)
