"""From the pipes that the ranks write into to where their output went before: at once, byte for byte.

Several ranks share one output, so whole lines are passed on; what has no end of line yet waits a moment for
it. A write is no longer than the kernel keeps in one piece, so that lines of other writers do not come in
between. Where nobody reads the output the writers wait, as they would without this. Run by `__main__`.
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
"""For the end of a line, such as that of a progress bar, which never comes."""


@dataclass(kw_only=True, slots=True)
class Stream:
    """`source`: the end of a pipe that is read. `target`: where its bytes go."""

    rank: int
    source: int
    target: int
    begun: bytearray = field(default_factory=bytearray)
    """Of a line without its end."""
    since: float = 0.0


class Relay:
    """`keep(rank, bytes)` is called before they are passed on."""

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
        """Everything that was written so far is passed on, and nothing more will be."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._wakened = socket.socketpair()
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._open = list(streams)
        for stream in self._open:
            self._selector.register(stream.source, selectors.EVENT_READ, stream)

    def run(self) -> None:
        """Until no writer is left, or `finish`."""
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
        """From another thread: what is in the pipes is the last."""
        self._finishing.set()
        with contextlib.suppress(OSError):  # it is done already
            self._wake.send(b"!")

    # --- inside -------------------------------------------------------------------------------------
    def _turn(self, seconds: float | None) -> bool:
        """Whether something came within so many seconds."""
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
        with contextlib.suppress(OSError):  # nobody reads any more; the copy is kept all the same
            while at < end:
                at += os.write(stream.target, data[at : _line_end(data, at)])


def _line_end(data: bytes, at: int) -> int:
    """Of as many whole lines as fit into one write, or of a part of a long one."""
    most = at + UNBROKEN_BYTES
    if len(data) <= most:
        return len(data)
    return data.rfind(b"\n", at, most) + 1 or most
