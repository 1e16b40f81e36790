"""Helpers for network stores: request bodies, digests per chunk, pauses between tries, a probe."""

from __future__ import annotations

import datetime
import hashlib
import io
import os
import random
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from spottrain.errors import StoreUnavailable, StoreUnsuitable
from spottrain.storage.base import (
    AlreadyExists,
    Changed,
    FilePart,
    KeyMissing,
    PreconditionFailed,
    Store,
    never,
)

T = TypeVar("T")
CHANCE: Final = random.SystemRandom()
"""Not Python's generator: its state belongs to the training, and must not depend on network failures."""
SLICE: Final = 1 << 20
"""Bytes sent to or read from a socket in one call."""
LONGEST_PAUSE: Final = 20.0


class Stopped(BaseException):
    """Raised by a body that was cancelled. Not an Exception: SDKs treat those as network errors and retry."""


class FileChanged(Stopped):
    """Raised by a body whose file has changed."""


class _Body:
    """A body as a file that an SDK reads and, before it sends it again, rewinds.

    `cancelled` is called before each read.
    """

    def __init__(self, size: int, cancelled: Callable[[], bool]) -> None:
        self._size, self._cancelled, self._at = size, cancelled, 0

    def _go_on(self) -> None:
        if self._cancelled():
            raise Stopped

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at


class RequestBody(_Body):
    """A memoryview that is sent without a copy.

    `read` returns slices of the view, and more than requested: http.client asks for 16 KiB at a time, which
    costs a fifth of the throughput, but sends whatever it gets. With `exact`, a copy of what is requested.
    """

    def __init__(
        self, view: memoryview, cancelled: Callable[[], bool] = never, *, exact: bool = False
    ) -> None:
        self._view = view.cast("B")
        self._exact = exact
        super().__init__(len(self._view), cancelled)

    def read(self, size: int = -1) -> memoryview | bytes:
        self._go_on()
        end = self._size if size < 0 else self._at + (size if self._exact else max(size, SLICE))
        part = self._view[self._at : end]
        self._at += len(part)
        return bytes(part) if self._exact else part


class PartBody(_Body):
    """A part of a file as a body that is read in slices while it is sent.

    Raises FileChanged. A read is valid until the next one: all share one buffer, which keeps the process
    small.
    """

    def __init__(self, part: FilePart, cancelled: Callable[[], bool] = never) -> None:
        super().__init__(part.bytes, cancelled)
        self._part = part
        self._buffer = memoryview(bytearray(min(SLICE, part.bytes)))

    def read(self, size: int = -1) -> memoryview:
        """Returns up to SLICE bytes, whatever `size` is; none at the end."""
        self._go_on()
        view = self._buffer[: self._size - self._at]
        count = os.preadv(self._part.file, [view], self._part.offset + self._at) if view else 0
        if (view and not count) or self._part.changed():
            raise FileChanged
        self._at += count
        return view[:count]


class VerifiedPartBody(_Body):
    """A part of a file of which each read returns exactly the requested bytes.

    Raises FileChanged, at the latest before the last bytes, which no read returns unless all of them match
    the SHA-256.
    """

    def __init__(self, part: FilePart, cancelled: Callable[[], bool]) -> None:
        super().__init__(part.bytes, cancelled)
        self._part = part
        self._hashed = 0
        """How many bytes are in `_digest`: after a failed request some are read again."""
        self._digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        self._go_on()
        left = self._size - self._at
        wanted = left if size < 0 else min(size, left)
        found = os.pread(self._part.file, wanted, self._part.offset + self._at)
        self._digest.update(found[max(self._hashed - self._at, 0) :])
        self._at += len(found)
        self._hashed = max(self._hashed, self._at)
        other = self._hashed == self._size and self._digest.hexdigest() != self._part.sha256
        if len(found) < wanted or other or self._part.changed():
            raise FileChanged
        return found


class Filling:
    """Buffers that are filled with the bytes of a range, one after the other."""

    def __init__(self, buffers: Sequence[memoryview], *, hashed: bool) -> None:
        self._views = deque(buffer.cast("B") for buffer in buffers if buffer.nbytes)
        self._digest = hashlib.sha256() if hashed else None
        self.left = sum(map(len, self._views))
        """How many bytes are missing."""

    def read(self, readinto: Callable[[memoryview], int]) -> None:
        """Reads until all are filled, or nothing more comes.

        Each slice is hashed as it arrives: it is in the processor's cache, and the next one is on its way.
        """
        while self._views:
            view = self._views[0]
            count = readinto(view[:SLICE])
            if not count:
                return
            if self._digest is not None:
                self._digest.update(view[:count])
            self.left -= count
            self._views[0] = view[count:]
            if count == len(view):
                self._views.popleft()

    @property
    def sha256(self) -> str:
        """Hexadecimal; empty unless it was `hashed`."""
        return self._digest.hexdigest() if self._digest is not None else ""


def slices(part: FilePart) -> Iterator[bytes]:
    """Yields the part's bytes, and raises Changed after the last unless they match its SHA-256."""
    digest = hashlib.sha256()
    for at in range(0, part.bytes, SLICE):
        found = os.pread(part.file, min(SLICE, part.bytes - at), part.offset + at)
        digest.update(found)
        yield found
    if digest.hexdigest() != part.sha256:
        raise Changed


def digests(view: memoryview, chunk_bytes: int) -> list[str]:
    """SHA-256 (hex) of each chunk."""
    starts = range(0, len(view), chunk_bytes)
    return [hashlib.sha256(view[start : start + chunk_bytes]).hexdigest() for start in starts]


def seconds(moment: datetime.datetime | None) -> float:
    """Unix seconds; 0 where a server does not say when."""
    return moment.timestamp() if moment is not None else 0.0


def pause(failures: int) -> float:
    """Seconds before the next try: doubled each time, and random so that clients do not retry in step."""
    return CHANCE.uniform(0, min(2.0 ** (failures - 1), LONGEST_PAUSE))


def probe_conditions(
    store: Store, place: Callable[[str], object], *, absent: str, match: str, instead: str
) -> None:
    """Raises StoreUnsuitable if the store ignores the conditions of writes.

    `absent`, `match`: what the conditions are called there. `instead`: what the user can use.
    """
    key = f"probe-{secrets.token_hex(8)}"

    def require_refused(condition: str, write: Callable[[], str]) -> None:
        try:
            write()
        except (AlreadyExists, KeyMissing, PreconditionFailed):
            return
        raise StoreUnsuitable(
            f"{place(key)} ignores {condition}, so two attempts could overwrite each other's "
            f"checkpoints; use {instead}"
        )

    try:
        first = store.put_if_absent(key, b"1")
        require_refused(absent, lambda: store.put_if_absent(key, b"2"))
        store.put_if_match(key, b"3", first)  # not at once after the first: GCS limits writes of one object
        require_refused(match, lambda: store.put_if_match(key, b"4", first))
        store.delete([key])
        require_refused(f"{match} where there is no object", lambda: store.put_if_match(key, b"5", first))
    finally:
        store.delete([key])


def tried(act: Callable[[], T], tries: int, rest: Callable[[int], None]) -> T:
    """Calls `act` up to `tries` times, until no StoreUnavailable. `rest(failures)` waits in between."""
    for failures in range(1, tries):
        try:
            return act()
        except StoreUnavailable:
            rest(failures)
    return act()
