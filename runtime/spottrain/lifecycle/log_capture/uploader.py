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
"""Seconds between two checks for parts to send."""


class LogUploader:
    """Uploads parts in threads. `open_store` is called in a thread, when there is something to store.

    `say` prints a line to the log. `attempt`: None if it has no number; then it is one more than the last
    attempt with logs.
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
        self._books = {rank: RankLog(_gap, _full(rank), limits) for rank in ranks}
        self._turn = threading.Lock()
        self._opening = threading.Lock()
        self._store: Store | None = None
        self._failing = False
        self._sending: set[threading.Thread] = set()
        """Threads that are storing a part."""

    def add(self, rank: int, data: bytes) -> None:
        with self._turn:
            line = self._books[rank].add(data, self._clock())
        if line:
            self._say(line)

    def start(self) -> None:
        threading.Thread(target=self._run, name="log-uploader", daemon=True).start()

    def hurry(self) -> None:
        """Sends everything available, however little."""
        with self._turn:
            for book in self._books.values():
                book.turn(self._clock(), hurry=True)
        self.look()

    def finish(self, seconds: float) -> None:
        """Sends all that is left, in order per rank. Reports what is not stored in time."""
        began = self._clock()
        with self._turn:
            sending = list(self._sending)
        self._join(sending, began + seconds / 2)
        with self._turn:
            rests = {rank: book.rest() for rank, book in self._books.items()}
        last = [self._send_aside(rank, *parts) for rank, parts in rests.items() if parts]
        self._join([*sending, *last], began + seconds)
        with self._turn:
            left = {rank: book.unstored for rank, book in self._books.items()}
        for rank, size in left.items():
            if size:
                self._say(_late(rank, size))

    def _join(self, threads: Iterable[threading.Thread], until: float) -> None:
        for thread in threads:
            thread.join(max(0.0, until - self._clock()))

    # --- inside -------------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            self.look()
            time.sleep(LOOK_SECONDS)

    def look(self) -> list[threading.Thread]:
        """Sends what is due, and returns the threads that send it."""
        sending = []
        for rank, book in self._books.items():
            with self._turn:
                now = self._clock()
                book.turn(now)
                part = book.take(now)
            if part is not None:
                sending.append(self._send_aside(rank, part))
        return sending

    def _send_aside(self, rank: int, *parts: LogPart) -> threading.Thread:
        """Sends parts in a new thread, so that a blocked upload does not delay other ranks."""
        thread = threading.Thread(target=self._send_all, args=[rank, parts], name="log-send", daemon=True)
        with self._turn:
            self._sending.add(thread)
        thread.start()
        return thread

    def _send_all(self, rank: int, parts: Iterable[LogPart]) -> None:
        try:
            for part in parts:
                self._send(rank, part)
        finally:
            with self._turn:
                self._sending.discard(threading.current_thread())

    def _send(self, rank: int, part: LogPart) -> None:
        book = self._books[rank]
        try:
            self._put(rank, part)
        except Exception as error:  # of any kind: it must not disturb the training
            with self._turn:
                book.failed(self._clock())
                told, self._failing = self._failing, True
            if not told:
                why = f"{type(error).__name__}: {error}"
                self._say(log.text("logs-failed", error=why, next="later parts are tried without a message"))
        else:
            with self._turn:
                self._failing = False

    def _put(self, rank: int, part: LogPart) -> None:
        """Stores a part. Raises StoreError, or other exceptions of an SDK."""
        book = self._books[rank]
        store, attempt = self._opened()
        while True:
            try:
                store.put_if_absent(log_key(attempt, rank, part.number), part.body)
            except AlreadyExists:
                if not (part.tries and _is_there(store, log_key(attempt, rank, part.number), part)):
                    newest = _newest(store, attempt, rank)
                    with self._turn:
                        part = book.taken(part, newest)
                    continue
            with self._turn:
                book.stored(part)
            return

    def _opened(self) -> tuple[Store, int]:
        with self._opening:
            if self._store is None:
                self._store = self._open_store()
            if self._attempt is None:
                found = [part_of_log(key) for key in self._store.list(LOGS_PREFIX)]
                self._attempt = 1 + max((part[0] for part in found if part), default=0)
            return self._store, self._attempt


def _is_there(store: Store, key: str, part: LogPart) -> bool:
    """Whether an earlier try whose response was lost has stored the part."""
    found = store.get(key)
    return found is not None and found.body == part.body


def _newest(store: Store, attempt: int, rank: int) -> int:
    """Returns the number of the last stored part."""
    folder = log_key(attempt, rank, 0).rpartition("/")[0] + "/"
    found = [part_of_log(key) for key in store.list(folder)]
    return max((part[2] for part in found if part), default=0)


def _gap(missing: int) -> str:
    return log.text("logs-missing", bytes=missing, why="the store did not respond for too long")


def _late(rank: int, missing: int) -> str:
    return log.text("logs-missing", of=rank, bytes=missing, why="the store did not take it in time")


def _full(rank: int) -> Callable[[int], str]:
    def line(most: int) -> str:
        why = "so much is kept of a rank in one attempt; what follows is not stored"
        return log.text("logs-full", of=rank, bytes=most, why=why)

    return line
