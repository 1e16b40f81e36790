"""The training process's side of an upload.

`ProcessTransfer` uploads in the separate process of `upload_process`. `InProcessTransfer` uploads in this
process, for systems without shared anonymous files.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from spottrain import errors
from spottrain.checkpoint.staging_buffer import StagingBuffer
from spottrain.checkpoint.upload_process import Uploader, UploadItem
from spottrain.distributed.channel import start_child
from spottrain.errors import StoreUnavailable
from spottrain.storage import base as stores
from spottrain.storage.base import Cancelled, Store

POLL_SECONDS: Final = 0.05


class UploaderDied(Exception):
    """The uploader process has ended; the objects it was sending may or may not exist."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    bytes: int
    chunks: tuple[str, ...]


class Transfer(Protocol):
    def share(self, buffer: StagingBuffer) -> None:
        """Makes the offsets of later items refer to this staging buffer."""

    def forget(self) -> None:
        """Drops the staging buffer, so that its memory can be freed."""

    def put(self, items: Sequence[UploadItem], cancelled: Callable[[], bool]) -> dict[str, Sent]:
        """Uploads the items and returns the results by key. One call at a time.

        Raises StoreError, AlreadyExists, Cancelled or UploaderDied.
        """

    def close(self) -> None: ...


class ProcessTransfer:
    """Uploads in a separate process. `where`: arguments of `open_store`."""

    def __init__(self, where: Mapping[str, Any]) -> None:
        self._process, self._link = start_child("spottrain.checkpoint.upload_process")
        self._turn = threading.Lock()
        self._number = 0
        self._send("store", dict(where))

    @property
    def pid(self) -> int:
        return self._process.pid

    def share(self, buffer: StagingBuffer) -> None:
        with contextlib.suppress(OSError):  # the uploader died; the next put raises UploaderDied
            self._link.send("buffer", json.dumps(buffer.size).encode(), descriptor=buffer.fd)

    def forget(self) -> None:
        with contextlib.suppress(UploaderDied):
            self._send("forget", None)

    def put(self, items: Sequence[UploadItem], cancelled: Callable[[], bool]) -> dict[str, Sent]:
        with self._turn:
            self._number += 1
            self._send("put", {"put": self._number, "files": [asdict(item) for item in items]})
            while (reply := self._receive()) is None or reply["put"] != self._number:
                if cancelled():  # does not wait for the part in progress, which may take long
                    self._send("abandon", self._number)
                    raise Cancelled("the upload was abandoned")
        if "error" in reply:
            raise _error(reply)
        return _results(reply["sent"])

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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return UploaderDied(f"the uploader process {self.pid} ended with {self._process.returncode}")


class InProcessTransfer:
    """Uploads in this process, to the given store."""

    def __init__(self, where: Store) -> None:
        self._uploader = Uploader(lambda: where, at_once=1)
        self._memory: mmap.mmap | None = None

    def share(self, buffer: StagingBuffer) -> None:
        self._memory = buffer.map

    def forget(self) -> None:
        self._memory = None

    def put(self, items: Sequence[UploadItem], cancelled: Callable[[], bool]) -> dict[str, Sent]:
        return _results(self._uploader.put(items, self._memory, cancelled))

    def close(self) -> None:
        self._memory = None


def _results(sent: Mapping[str, tuple[int, list[str]]]) -> dict[str, Sent]:
    return {key: Sent(bytes=size, chunks=tuple(chunks)) for key, (size, chunks) in sent.items()}


def _error(reply: dict[str, Any]) -> Exception:
    """Rebuilds the error that the store raised in the uploader process."""
    name, message = reply["error"], reply["message"]
    kind = getattr(errors, name, None) or getattr(stores, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.RunError):
        return kind(message, reason=reply["reason"] or None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == stores.__name__:
        return kind(message)
    return StoreUnavailable(f"the upload failed with {name}: {message}")
