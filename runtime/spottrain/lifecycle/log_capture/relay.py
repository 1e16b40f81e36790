"""Forwards what the ranks write into the pipes to its original destination: at once, byte for byte.

Several ranks share one output, so whole lines are forwarded; an incomplete line waits briefly for its end. A
write is no longer than the kernel keeps in one piece, so that lines of other writers do not come in between.
If nobody reads the output the writers block, as they would without log capture.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

READ_BYTES: Final = 1 << 16
UNBROKEN_BYTES: Final = select.PIPE_BUF
PATIENCE_SECONDS: Final = 0.1
"""Seconds to wait for the end of a line, which may never come (progress bars)."""


@dataclass(kw_only=True, slots=True)
class Stream:
    """`source`: the reading end of a pipe. `target`: where its bytes go."""

    rank: int
    source: int
    target: int
    begun: bytearray = field(default_factory=bytearray)
    """Bytes of an incomplete line."""
    since: float = 0.0


class Relay:
    """Calls `keep(rank, bytes)` before it forwards the bytes."""

    def __init__(
        self,
        streams: Iterable[Stream],
        keep: Callable[[int, bytes], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep = keep
        self._clock = clock
        self._finishing = threading.Event()
        self.done = threading.Event()
        """Set when everything written so far is forwarded, and nothing more will be."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._wakened = socket.socketpair()
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._open = list(streams)
        for stream in self._open:
            self._selector.register(stream.source, selectors.EVENT_READ, stream)

    def run(self) -> None:
        """Forwards until no writer is left or `finish` is called."""
        while self._open and not self._finishing.is_set():
            self._turn(self._patience())
        while self._turn(0.0):
            pass
        for stream in self._open:
            self._pass_on(stream, len(stream.begun))
        self.done.set()
        for each in (self._selector, self._wake, self._wakened):
            each.close()

    def finish(self) -> None:
        """Ends `run` after what is in the pipes now. Thread-safe."""
        self._finishing.set()
        with contextlib.suppress(OSError):  # `run` has ended already
            self._wake.send(b"!")

    # --- inside -------------------------------------------------------------------------------------
    def _turn(self, seconds: float | None) -> bool:
        """Forwards what is ready. Returns whether anything arrived within so many seconds."""
        ready = [key for key, _ in self._selector.select(seconds) if key.data is not None]
        for key in ready:
            self._read(key.data)
        now = self._clock()
        for stream in self._open:
            if stream.begun and now - stream.since >= PATIENCE_SECONDS:
                self._pass_on(stream, len(stream.begun))
        return bool(ready)

    def _patience(self) -> float | None:
        since = [stream.since for stream in self._open if stream.begun]
        return max(0.0, min(since) + PATIENCE_SECONDS - self._clock()) if since else None

    def _read(self, stream: Stream) -> None:
        data = os.read(stream.source, READ_BYTES)
        if not data:
            self._pass_on(stream, len(stream.begun))
            self._selector.unregister(stream.source)
            self._open.remove(stream)
            return
        if not stream.begun:
            stream.since = self._clock()
        stream.begun += data
        end = stream.begun.rfind(b"\n") + 1
        if end:
            self._pass_on(stream, end)
            stream.since = self._clock()

    def _pass_on(self, stream: Stream, end: int) -> None:
        data = bytes(stream.begun[:end])
        del stream.begun[:end]
        self._keep(stream.rank, data)
        at = 0
        with contextlib.suppress(OSError):  # the output is closed; the copy is kept anyway
            while at < end:
                at += os.write(stream.target, data[at : _line_end(data, at)])


def _line_end(data: bytes, at: int) -> int:
    """Returns the end of as many whole lines as fit into one write, or of a part of a long line."""
    most = at + UNBROKEN_BYTES
    if len(data) <= most:
        return len(data)
    return data.rfind(b"\n", at, most) + 1 or most
