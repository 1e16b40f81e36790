"""Stores the parts of each rank's `book`, and never makes the relay beside it wait. Made by `__main__`.

Objects are written once, and neither read nor listed but in two cases: where a part's name is taken (by
another job on this URI, a process before this one, or a try whose answer was lost), and where nobody has
numbered the attempt.
Whatever goes wrong is told in one line, and tried again with the next part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from spottrain.contract import LOGS_PREFIX, log_key, part_of_log
from spottrain.core import log
from spottrain.lifecycle.log_capture.parts import Book, Limits, LogPart
from spottrain.storage.base import AlreadyExists, Store

LOOK_SECONDS: Final = 0.5
"""How soon a part that is long enough, or old enough, is sent."""


class Shelf:
    """`open_store` is called in a thread, when there is something to store. `say` prints a line to people.

    `attempt`: None where nobody has numbered it: one more than the last that has logs.
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
        self._books = {rank: Book(_gap, _full(rank), limits) for rank in ranks}
        self._turn = threading.Lock()
        self._opening = threading.Lock()
        self._store: Store | None = None
        self._failing = False
        self._sending: set[threading.Thread] = set()
        """That store a part."""

    def add(self, rank: int, data: bytes) -> None:
        with self._turn:
            line = self._books[rank].add(data, self._clock())
        if line:
            self._say(line)

    def start(self) -> None:
        threading.Thread(target=self._run, name="scribe-shelf", daemon=True).start()

    def hurry(self) -> None:
        """Sends what there is, however little."""
        with self._turn:
            for book in self._books.values():
                book.turn(self._clock(), hurry=True)
        self.look()

    def finish(self, seconds: float) -> None:
        """Sends all that is left, each rank's by itself and in order; says what is not stored in time.

        A part on its way gets half of the time before the others are sent beside it.
        """
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
        """Sends what is due."""
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
        """A thread for each: one that waits for its store holds up nobody else's."""
        thread = threading.Thread(target=self._send_all, args=[rank, parts], name="scribe-send", daemon=True)
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
        except Exception as error:  # whatever it is: the training is not to be disturbed by it
            with self._turn:
                book.failed(self._clock())
                told, self._failing = self._failing, True
            if not told:
                why = f"{type(error).__name__}: {error}"
                self._say(log.text("event=logs-failed", error=why, next="the next part is tried, quietly"))
        else:
            with self._turn:
                self._failing = False

    def _put(self, rank: int, part: LogPart) -> None:
        """Raises StoreError, or what else an SDK raises."""
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
    """By a try whose answer did not come."""
    found = store.get(key)
    return found is not None and found.body == part.body


def _newest(store: Store, attempt: int, rank: int) -> int:
    """Number of the last part that is there."""
    folder = log_key(attempt, rank, 0).rpartition("/")[0] + "/"
    found = [part_of_log(key) for key in store.list(folder)]
    return max((part[2] for part in found if part), default=0)


def _gap(missing: int) -> str:
    return log.text("event=logs-missing", bytes=missing, why="the store took no part for too long")


def _late(rank: int, missing: int) -> str:
    return log.text("event=logs-missing", of=rank, bytes=missing, why="the store did not take it in time")


def _full(rank: int) -> Callable[[int], str]:
    def line(most: int) -> str:
        why = "so much is kept of a rank in one attempt; what follows is not stored"
        return log.text("event=logs-full", of=rank, bytes=most, why=why)

    return line
