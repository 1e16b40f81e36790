"""Uploads in a separate process, which would compete for the GIL in the training process.

`Transfer` is the training process's side. The upload process takes orders over a socket and exits when the
socket is closed. It maps the staging buffer of the training process and sends from it. It does not import
torch, so it starts in a fraction of a second. It is not niced: where loader workers use all processors, a
save at a notice would be late.

    trainer -> store: arguments of open_store; buffer: its size, and a file descriptor; forget;
               put: {"put": number, "files": [...]}; abandon: number
    trainer <- put: {"put": number, "sent": {key: [bytes, [sha256 of each chunk]]}} or {"put", "error", ...}

The names are those of messages on a `Link`, the rest is JSON.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from spottrain import errors
from spottrain.contract import CHUNK_BYTES
from spottrain.distributed.channel import start_child, to_parent
from spottrain.errors import StoreUnavailable
from spottrain.storage import base as stores
from spottrain.storage.base import AlreadyExists, Cancelled, Store
from spottrain.storage.open import open_store
from spottrain.storage.requests import digests

if TYPE_CHECKING:
    from spottrain.checkpoint.staging_buffer import StagingBuffer

POLL_SECONDS: Final = 0.05
SMALL_AT_ONCE: Final = 8
"""Number of files of at most one chunk sent at once; larger files go one at a time, in parallel parts."""


class UploaderDied(Exception):
    """The uploader process has ended; the objects it was sending may or may not exist."""


class Sent(NamedTuple):
    bytes: int
    chunks: Sequence[str]
    """SHA-256 (hex) of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadItem:
    """One object to write: a part of the staging buffer, or a local file."""

    key: str
    bytes: int
    offset: int = 0
    path: str = ""
    again: bool = False
    """The object may already exist: from an uploader that died, or an attempt whose response was lost."""

    def body(self, memory: mmap.mmap | None) -> memoryview:
        if not self.path:
            assert memory is not None, "no memory was shared"
            return memoryview(memory)[self.offset : self.offset + self.bytes]
        with Path(self.path).open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


# --- in the training process ----------------------------------------------------------------------------
class Transfer:
    """Uploads in a separate process. `where`: arguments of `open_store`."""

    def __init__(self, where: Mapping[str, Any]) -> None:
        self._process, self._link = start_child("spottrain.checkpoint.upload")
        self._turn = threading.Lock()
        self._number = 0
        self._send("store", dict(where))

    @property
    def pid(self) -> int:
        return self._process.pid

    def share(self, buffer: StagingBuffer) -> None:
        """Makes the offsets of later items refer to this staging buffer."""
        with suppress(OSError):  # the uploader died; the next put raises UploaderDied
            self._link.send("buffer", json.dumps(buffer.size).encode(), descriptor=buffer.fd)

    def forget(self) -> None:
        """Drops the staging buffer, so that its memory can be freed."""
        with suppress(UploaderDied):
            self._send("forget", None)

    def put(self, items: Sequence[UploadItem], cancelled: Callable[[], bool]) -> dict[str, Sent]:
        """Uploads the items and returns the results by key. One call at a time.

        Raises StoreError, AlreadyExists, Cancelled or UploaderDied.
        """
        with self._turn:
            self._number += 1
            self._send("put", {"put": self._number, "files": [asdict(item) for item in items]})
            while (reply := self._receive()) is None or reply["put"] != self._number:
                if cancelled():  # does not wait for the part in progress, which may take long
                    self._send("abandon", self._number)
                    raise Cancelled("the upload was abandoned")
        if "error" in reply:
            raise _error(reply)
        return {key: Sent(*each) for key, each in reply["sent"].items()}

    def close(self) -> None:
        """Closes the socket, on which the process exits by itself, without waiting for it."""
        self._link.socket.close()
        self._process.poll()

    def _send(self, name: str, facts: Any) -> None:
        try:
            self._link.send(name, json.dumps(facts).encode())
        except OSError as error:
            raise self._died() from error

    def _receive(self) -> dict[str, Any] | None:
        """Returns the next message; None if none arrives within POLL_SECONDS."""
        try:
            message = self._link.receive(POLL_SECONDS)
        except OSError as error:
            raise self._died() from error
        return json.loads(message[1]) if message else None

    def _died(self) -> UploaderDied:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return UploaderDied(f"the uploader process {self.pid} ended with {self._process.returncode}")


def _error(reply: dict[str, Any]) -> Exception:
    """Rebuilds the error that the store raised in the uploader process."""
    name, message = reply["error"], reply["message"]
    kind = getattr(errors, name, None) or getattr(stores, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.RunError):
        return kind(message, reason=reply["reason"] or None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == stores.__name__:
        return kind(message)
    return StoreUnavailable(f"the upload failed with {name}: {message}")


# --- in the upload process ------------------------------------------------------------------------------
class Uploader:
    """Uploads items to the store that `store` returns. One call at once."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store
        self._sent: dict[str, Sent] = {}
        """Results of the current call, and of the same keys before it: a retry sends only the rest."""

    def put(
        self, items: Sequence[UploadItem], memory: mmap.mmap | None, cancelled: Callable[[], bool]
    ) -> dict[str, Sent]:
        """Returns size and chunks' SHA-256 by key. Raises the first error, which cancels the other items."""
        keys = {item.key for item in items}
        self._sent = {key: sent for key, sent in self._sent.items() if key in keys}
        store = self._store()
        failures: list[BaseException] = []

        def send(item: UploadItem) -> None:
            if failures or item.key in self._sent:
                return
            try:
                body = item.body(memory)
                try:
                    chunks = store.upload(item.key, body, cancelled=lambda: bool(failures) or cancelled())
                except AlreadyExists:
                    if not item.again:
                        raise
                    chunks = digests(body, CHUNK_BYTES)  # the earlier attempt sent the same bytes
                self._sent[item.key] = Sent(len(body), chunks)
            except BaseException as error:
                failures.append(error)  # the first is the cause
                raise

        pool = ThreadPoolExecutor(SMALL_AT_ONCE)  # `with` would wait for the others after a failure
        futures = [pool.submit(send, item) for item in items if item.bytes <= CHUNK_BYTES]
        try:
            for item in items:
                if item.bytes > CHUNK_BYTES:
                    send(item)
            for future in as_completed(futures):
                future.result()
        except BaseException as error:
            raise (failures or [error])[0] from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        # An abandoned call may still be running and add its own keys to `_sent`.
        return {key: self._sent[key] for key in keys}


def main(fd: int) -> None:
    link = to_parent(fd)

    def send(message: dict[str, Any]) -> None:
        with suppress(OSError):  # the training process has ended
            link.send("put", json.dumps(message).encode())

    messages = ((name, json.loads(body)) for name, body in link)
    first = next(messages, None)
    if first is not None:
        turn, opened = threading.Lock(), functools.cache(functools.partial(open_store, **first[1]))

        def store() -> Store:
            with turn:
                return opened()  # a failure is not cached

        threading.Thread(target=_warm, args=[store], daemon=True).start()
        _obey(messages, Uploader(store), link.descriptors, send)
    os._exit(0)  # the training process has ended, and its memory with it


def _obey(
    messages: Iterable[tuple[str, Any]],
    uploader: Uploader,
    descriptors: list[int],
    send: Callable[[dict[str, Any]], None],
) -> None:
    """Carries out the trainer's messages, each put in a thread of its own. `send` sends one message back."""
    memory: mmap.mmap | None = None
    abandoned: set[int] = set()

    def put(number: int, items: Sequence[UploadItem], memory: mmap.mmap | None) -> None:
        try:
            send({"put": number, "sent": uploader.put(items, memory, lambda: number in abandoned)})
        except Exception as error:  # every error is reported to the trainer
            words = {"error": type(error).__name__, "message": str(error)}
            send({"put": number, **words, "reason": getattr(error, "reason", "")})

    for name, facts in messages:
        if name == "buffer":
            fd = descriptors.pop(0)
            memory = mmap.mmap(fd, facts, prot=mmap.PROT_READ)
            os.close(fd)
        elif name == "forget":
            memory = None
        elif name == "abandon":
            abandoned.add(facts)
        else:
            items = [UploadItem(**each) for each in facts["files"]]
            # Binds the current memory: the next message may share a buffer with another layout.
            threading.Thread(target=put, args=(facts["put"], items, memory), daemon=True).start()


def _warm(store: Callable[[], Store]) -> None:
    """Opens the store early, which loads the SDK; the first put reports any error."""
    with suppress(Exception):
        store()


if __name__ == "__main__":
    main(int(sys.argv[1]))
