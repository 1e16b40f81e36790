"""The upload process: takes orders over a socket and exits when the socket is closed.

A separate process, because uploads in the training process would compete for the GIL. It maps the staging
buffer of the training process and sends from it. It does not import torch, so it starts in a fraction of a
second.

    trainer -> store: arguments of open_store; buffer: its size, and a file descriptor; forget;
               put: {"put": number, "files": [...]}; abandon: number
    trainer <- put: {"put": number, "sent": {key: [bytes, [sha256 of each chunk]]}} or {"put", "error", ...}

The names are those of messages on a `Link`, the rest is JSON.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from spottrain.contract import CHUNK_BYTES
from spottrain.distributed.channel import to_parent
from spottrain.storage.base import AlreadyExists, Store
from spottrain.storage.open import open_store

SMALL_AT_ONCE: Final = 8
"""Number of files of at most one chunk sent at once; larger files go one at a time, in parallel parts."""


class Uploader:
    """Uploads files and shared memory. `send` sends one message back."""

    def __init__(self, store: Callable[[], Store], send: Callable[[dict[str, Any]], None]) -> None:
        self._store = store
        self._send = send
        self._memory: mmap.mmap | None = None
        self._abandoned: set[int] = set()
        self._sent: dict[str, tuple[int, list[str]]] = {}
        """Results of the current put, and of the same keys before it: a retry sends only the rest."""

    def share(self, fd: int, size: int) -> None:
        self._memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        os.close(fd)

    def forget(self) -> None:
        self._memory = None

    def abandon(self, number: int) -> None:
        self._abandoned.add(number)

    def work(self, number: int, files: list[dict[str, Any]]) -> Callable[[], None]:
        return partial(self.put, number, files, self._memory)

    def put(self, number: int, files: list[dict[str, Any]], memory: mmap.mmap | None) -> None:
        try:
            sent = self._put_all(number, files, memory)
            self._send({"put": number, "sent": sent})
        except Exception as error:  # every error is reported to the trainer
            words = {"error": type(error).__name__, "message": str(error)}
            self._send({"put": number, **words, "reason": getattr(error, "reason", "")})

    def _put_all(
        self, number: int, files: list[dict[str, Any]], memory: mmap.mmap | None
    ) -> dict[str, tuple[int, list[str]]]:
        keys = {file["key"] for file in files}
        self._sent = {key: sent for key, sent in self._sent.items() if key in keys}
        store = self._store()

        failures: list[BaseException] = []

        def send(file: dict[str, Any]) -> None:
            if failures or file["key"] in self._sent:
                return
            try:
                body = _body(file, memory)
                again = bool(file.get("again"))
                chunks = upload(store, file["key"], body, again, lambda: number in self._abandoned)
                self._sent[file["key"]] = (len(body), chunks)
            except BaseException as error:
                failures.append(error)  # the first is the cause
                self._abandoned.add(number)  # a failure cancels the other files of this put
                raise

        small = [file for file in files if file["bytes"] <= CHUNK_BYTES]
        pool = ThreadPoolExecutor(SMALL_AT_ONCE)  # `with` would wait for the others after a failure
        futures = [pool.submit(send, file) for file in small]
        try:
            for file in files:
                if file["bytes"] > CHUNK_BYTES:
                    send(file)
            for future in as_completed(futures):
                future.result()
        except BaseException as error:
            raise (failures or [error])[0] from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        # An abandoned put may still be running and add its own keys to `_sent`.
        return {key: self._sent[key] for key in keys}


def upload(store: Store, key: str, body: memoryview, again: bool, cancelled: Callable[[], bool]) -> list[str]:
    """Uploads `body`; returns the SHA-256 of each chunk. `again`: an earlier attempt may have written it."""
    try:
        return store.upload(key, body, cancelled=cancelled)
    except AlreadyExists:
        if not again:
            raise
        # The earlier attempt sent the same bytes.
        starts = range(0, len(body), CHUNK_BYTES)
        return [hashlib.sha256(body[at : at + CHUNK_BYTES]).hexdigest() for at in starts]


def _body(file: dict[str, Any], memory: mmap.mmap | None) -> memoryview:
    if "path" in file:
        return _mapped(Path(file["path"]))
    assert memory is not None, "no memory was shared"
    return memoryview(memory)[file["offset"] : file["offset"] + file["bytes"]]


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def main(fd: int) -> None:
    link = to_parent(fd)

    def send(message: dict[str, Any]) -> None:
        with suppress(OSError):  # the training process has ended
            link.send("put", json.dumps(message).encode())

    messages = ((name, json.loads(body)) for name, body in link)
    first = next(messages, None)
    if first is not None:
        store = _opened(first[1])
        threading.Thread(target=_warm, args=[store], daemon=True).start()
        uploader = Uploader(store, send)
        for name, facts in messages:
            _act(uploader, name, facts, link.descriptors)
    os._exit(0)  # the training process has ended, and its memory with it


def _act(uploader: Uploader, name: str, facts: Any, descriptors: list[int]) -> None:
    if name == "buffer":
        uploader.share(descriptors.pop(0), facts)
    elif name == "forget":
        uploader.forget()
    elif name == "abandon":
        uploader.abandon(facts)
    else:
        # Binds the current memory: the next message may share a buffer with another layout.
        threading.Thread(target=uploader.work(facts["put"], facts["files"]), daemon=True).start()


def _opened(where: dict[str, Any]) -> Callable[[], Store]:
    """Returns a function that opens the store on its first call and then returns the same store."""
    turn = threading.Lock()
    made: list[Store] = []

    def store() -> Store:
        with turn:
            if not made:
                made.append(open_store(**where))
            return made[0]

    return store


def _warm(store: Callable[[], Store]) -> None:
    """Opens the store early, which loads the SDK; the first put reports any error."""
    try:
        store()
    except Exception:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
