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
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPart:
    number: int
    body: bytes
    tries: int = 0
    """Number of failed tries."""


class RankLog:
    """One rank's output, cut into parts. Pure; times are seconds of one clock.

    add -> [ take -> stored or failed ]
    """

    def __init__(self, rank: int, limits: Limits) -> None:
        self._rank = rank
        self._limits = limits
        self._waiting = bytearray()
        """Output of which no part was made yet."""
        self._since = 0.0
        """When its first byte arrived."""
        self._missing = 0
        """Bytes dropped before it."""
        self._added = 0
        self._number = 0
        self._failed: LogPart | None = None
        self._again_at = 0.0
        self._under_way = 0
        """Bytes of the parts that were made and are not stored."""

    def add(self, data: bytes, now: float) -> str:
        """Adds output. Returns a line to log when the limit is reached, once; else ""."""
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

    def take(self, now: float, *, last: bool = False) -> LogPart | None:
        """Returns the part to store now, or None. `last`: however little or young it is."""
        if self._failed is not None:
            if not last and now < self._again_at:
                return None
            part, self._failed = self._failed, None
            return part
        size, most = len(self._waiting), self._limits.part
        if not size or not (last or size >= most or now - self._since >= self._limits.every):
            return None
        end = size if size <= most else self._waiting.rfind(b"\n", 0, most) + 1 or most
        body = bytes(self._waiting[:end])
        del self._waiting[:end]
        if self._missing:
            why = "the store did not respond for too long"
            body = log.text("logs-missing", bytes=self._missing, why=why).encode() + body
            self._missing = 0
        self._number += 1
        self._under_way += len(body)
        return LogPart(number=self._number, body=body)

    @property
    def unstored(self) -> int:
        """Bytes that are not stored."""
        return self._under_way + len(self._waiting)

    def stored(self, part: LogPart) -> None:
        self._under_way -= len(part.body)

    def failed(self, part: LogPart, now: float) -> None:
        """Notes that the part was not stored. It is retried when the next one would be due."""
        self._failed = replace(part, tries=part.tries + 1)
        self._again_at = now + self._limits.every

    def renumbered(self, part: LogPart, newest: int) -> LogPart:
        """Renumbers a part whose number is taken by another writer, whose parts go up to `newest`."""
        self._number = max(self._number, newest) + 1
        return replace(part, number=self._number)


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
        self._turn = threading.Lock()
        self._opening = threading.Lock()
        self._store: Store | None = None
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="log-uploader", daemon=True)

    def add(self, rank: int, data: bytes) -> None:
        with self._turn:
            line = self._logs[rank].add(data, self._clock())
        if line:
            self._say(line)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._finishing.wait(LOOK_SECONDS):
            self.send()
        self.send(last=True)

    def finish(self, seconds: float) -> None:
        """Sends all that is left, in order per rank. Reports what is not stored in time."""
        until = self._clock() + seconds
        self._finishing.set()
        self._thread.join(seconds / 2)
        if self._thread.is_alive():  # a part hangs: the rest is stored beside it
            rest = threading.Thread(target=self.send, kwargs={"last": True}, daemon=True)
            rest.start()
            for thread in (self._thread, rest):
                thread.join(max(0.0, until - self._clock()))
        for rank, each in self._logs.items():
            with self._turn:
                missing = each.unstored
            if missing:
                why = "the store did not take it in time"
                self._say(log.text("logs-missing", of=rank, bytes=missing, why=why))

    def send(self, *, last: bool = False) -> None:
        """Tries to store the parts that are due. `last`: all that is left, once."""
        for rank, each in self._logs.items():
            while self._send_next(rank, each, last):
                pass

    # --- inside -------------------------------------------------------------------------------------
    def _send_next(self, rank: int, rank_log: RankLog, last: bool) -> bool:
        """Tries to store the rank's part that is due. Returns whether it is stored."""
        with self._turn:
            part = rank_log.take(self._clock(), last=last)
        if part is None:
            return False
        try:
            store, attempt = self._opened()
            while not _is_stored(store, log_key(attempt, rank, part.number), part):
                newest = _newest(store, attempt, rank)
                with self._turn:
                    part = rank_log.renumbered(part, newest)
        except Exception as error:  # of any kind, also of an SDK: it must not disturb the training
            with self._turn:
                rank_log.failed(part, self._clock())
                told, self._failing = self._failing, True
            if not told:
                why = f"{type(error).__name__}: {error}"
                self._say(log.text("logs-failed", error=why, next="later parts are tried without a message"))
            return False
        with self._turn:
            rank_log.stored(part)
            self._failing = False
        return True

    def _opened(self) -> tuple[Store, int]:
        with self._opening:
            if self._store is None:
                self._store = self._open_store()
            if self._attempt is None:
                found = [part_of_log(key) for key in self._store.list(LOGS_PREFIX)]
                self._attempt = 1 + max((part[0] for part in found if part), default=0)
            return self._store, self._attempt


def _is_stored(store: Store, key: str, part: LogPart) -> bool:
    """Stores the part. Returns False if another writer has taken its name. Raises StoreError."""
    try:
        store.put_if_absent(key, part.body)
    except AlreadyExists:
        if not part.tries:
            return False
        found = store.get(key)  # an earlier try whose response was lost may have stored it
        return found is not None and found.body == part.body
    return True


def _newest(store: Store, attempt: int, rank: int) -> int:
    """Returns the number of the last stored part."""
    folder = log_key(attempt, rank, 0).rpartition("/")[0] + "/"
    found = [part_of_log(key) for key in store.list(folder)]
    return max((part[2] for part in found if part), default=0)
