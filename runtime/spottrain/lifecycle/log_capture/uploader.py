"""Stores the parts of each rank's output without ever blocking the relay.

Objects are written once. They are read or listed in two cases only. The first: a part's name is taken, by
another job on this URI, an earlier process, or a try whose response was lost. The second: the attempt has no
number. Errors are logged in one line, and the part is retried with the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from spottrain.contract import LOGS_PREFIX, log_key, part_of_log
from spottrain.core import log
from spottrain.lifecycle.log_capture.parts import Limits, LogPart, RankLog
from spottrain.storage.base import AlreadyExists, Store

LOOK_SECONDS: Final = 0.5
"""Seconds between two checks for a part to store."""


class LogUploader:
    """Stores parts in one thread per rank, so that a blocked upload does not delay other ranks.

    `open_store` is called in such a thread, when there is something to store. `say` prints a line to the log.
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
        self._threads: dict[int, threading.Thread] = {}
        self._finishing = threading.Event()
        self._turn = threading.Lock()
        self._opening = threading.Lock()
        self._store: Store | None = None
        self._failing = False

    def add(self, rank: int, data: bytes) -> None:
        with self._turn:
            line = self._logs[rank].add(data, self._clock())
        if line:
            self._say(line)

    def start(self) -> None:
        for rank in self._logs:
            self._threads[rank] = _thread(self._run, rank)

    def _run(self, rank: int) -> None:
        while not self._finishing.is_set():
            if not self.send_next(rank):
                self._finishing.wait(LOOK_SECONDS)
        self._send_rest(rank)

    def hurry(self) -> None:
        """Makes everything available due, however little."""
        with self._turn:
            for each in self._logs.values():
                each.close_parts(self._clock(), all_=True)

    def finish(self, seconds: float) -> None:
        """Sends all that is left, in order per rank. Reports what is not stored in time."""
        began = self._clock()
        self._finishing.set()
        self._join(self._threads.values(), began + seconds / 2)
        busy = [rank for rank in self._logs if rank not in self._threads or self._threads[rank].is_alive()]
        last = [_thread(self._send_rest, rank) for rank in busy]
        self._join([*self._threads.values(), *last], began + seconds)
        for rank, each in self._logs.items():
            with self._turn:
                missing = each.unstored
            if missing:
                why = "the store did not take it in time"
                self._say(log.text("logs-missing", of=rank, bytes=missing, why=why))

    def _join(self, threads: Iterable[threading.Thread], until: float) -> None:
        for thread in threads:
            thread.join(max(0.0, until - self._clock()))

    # --- inside -------------------------------------------------------------------------------------
    def send_next(self, rank: int) -> bool:
        """Tries to store the rank's part that is due. Returns False if there is none."""
        with self._turn:
            part = self._logs[rank].take(self._clock())
        if part is not None:
            self._send(rank, part)
        return part is not None

    def _send_rest(self, rank: int) -> None:
        with self._turn:
            parts = self._logs[rank].rest()
        for part in parts:
            self._send(rank, part)

    def _send(self, rank: int, part: LogPart) -> None:
        try:
            store, attempt = self._opened()
            while not _is_stored(store, log_key(attempt, rank, part.number), part):
                newest = _newest(store, attempt, rank)
                with self._turn:
                    part = self._logs[rank].renumbered(part, newest)
        except Exception as error:  # of any kind, also of an SDK: it must not disturb the training
            with self._turn:
                self._logs[rank].failed(part, self._clock())
                told, self._failing = self._failing, True
            if not told:
                why = f"{type(error).__name__}: {error}"
                self._say(log.text("logs-failed", error=why, next="later parts are tried without a message"))
        else:
            with self._turn:
                self._logs[rank].stored(part)
                self._failing = False

    def _opened(self) -> tuple[Store, int]:
        with self._opening:
            if self._store is None:
                self._store = self._open_store()
            if self._attempt is None:
                found = [part_of_log(key) for key in self._store.list(LOGS_PREFIX)]
                self._attempt = 1 + max((part[0] for part in found if part), default=0)
            return self._store, self._attempt


def _thread(target: Callable[[int], None], rank: int) -> threading.Thread:
    thread = threading.Thread(target=target, args=[rank], name=f"log-uploader-{rank}", daemon=True)
    thread.start()
    return thread


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
