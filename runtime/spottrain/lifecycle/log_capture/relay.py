"""The log capture process: `python -m spottrain.lifecycle.log_capture.relay FD`.

It is a process of its own, so that a hung trainer, its interpreter lock or a hung store cannot block the
output. It reads what the ranks write into pipes, forwards it at once, byte for byte, to where it went before,
and stores a copy. `outputs` sends it messages over a `Link`, in JSON:

    plan: {"streams": [[rank, pipe, target], ...], "store": arguments of open_store, "attempt": 2 or null}
    finish: seconds      no more data will be written to the pipes; store the copy in so many seconds

Then it ends. If the link closes without `finish`, it ends when no writer is left. If nobody reads the output
the writers block, as they would without log capture.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from spottrain.distributed.channel import Link, to_parent
from spottrain.lifecycle.log_capture.uploader import LogUploader
from spottrain.storage.open import open_store

STDOUT: Final = 1
READ_BYTES: Final = 1 << 16
PATIENCE_SECONDS: Final = 0.1
"""Seconds to wait for the end of a line, which may never come (progress bars)."""
LAST_SECONDS: Final = 5.0
"""Seconds for the last parts if no limit is given."""
SAY_SECONDS: Final = 0.1
"""Seconds before the end, to report what is not stored."""
DRAIN_SECONDS: Final = 1.0
"""Seconds to forward what is in the pipes."""
SWITCH_SECONDS: Final = 0.0005
"""Thread switch interval in seconds: the relay must not wait for an upload."""


@dataclass(kw_only=True, slots=True, eq=False)
class Stream:
    """`source`: the reading end of a pipe. `target`: where its bytes go."""

    rank: int
    source: int
    target: int
    begun: bytearray = field(default_factory=bytearray)
    """Bytes of an incomplete line."""
    since: float = 0.0


class Relay:
    """Calls `keep(rank, bytes)` before it forwards the bytes.

    Several ranks share one output, so whole lines are forwarded; an incomplete one waits briefly for its end.
    """

    def __init__(self, streams: Iterable[Stream], keep: Callable[[int, bytes], None], link: Link) -> None:
        self._keep = keep
        self._link = link
        self._until: float | None = None
        """When the parent, which has said `finish`, ends."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(link.socket, selectors.EVENT_READ)
        self._open = list(streams)
        for stream in self._open:
            self._selector.register(stream.source, selectors.EVENT_READ, stream)

    def run(self) -> float:
        """Forwards until no writer is left, or `finish` arrives. Returns the seconds that are left."""
        while self._open and self._until is None:
            self._turn(PATIENCE_SECONDS if any(stream.begun for stream in self._open) else None)
        until = time.monotonic() + DRAIN_SECONDS
        while self._turn(0.0) and time.monotonic() < until:
            pass
        for stream in self._open:
            self._forward(stream, len(stream.begun))
        return LAST_SECONDS if self._until is None else max(0.0, self._until - time.monotonic())

    def _turn(self, seconds: float | None) -> bool:
        """Forwards what is ready. Returns whether any output arrived within so many seconds."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.data is None:
                self._hear()
            else:
                self._read(key.data)
        now = time.monotonic()
        for stream in self._open:
            if stream.begun and now - stream.since >= PATIENCE_SECONDS:
                self._forward(stream, len(stream.begun))
        return any(key.data is not None for key, _ in ready)

    def _hear(self) -> None:
        try:
            message = self._link.receive(0)
        except OSError:  # the parent is gone
            self._selector.unregister(self._link.socket)
            return
        if message is not None:
            self._until = time.monotonic() + float(json.loads(message[1]))

    def _read(self, stream: Stream) -> None:
        data = os.read(stream.source, READ_BYTES)
        if not data:
            self._forward(stream, len(stream.begun))
            self._selector.unregister(stream.source)
            self._open.remove(stream)
            return
        if not stream.begun:
            stream.since = time.monotonic()
        stream.begun += data
        if end := stream.begun.rfind(b"\n") + 1:
            self._forward(stream, end)
            stream.since = time.monotonic()

    def _forward(self, stream: Stream, end: int) -> None:
        data = bytes(stream.begun[:end])
        del stream.begun[:end]
        self._keep(stream.rank, data)
        with contextlib.suppress(OSError):  # the output is closed; the copy is kept anyway
            for line in data.splitlines(keepends=True):  # a longer write could be torn by another writer's
                while line:
                    line = line[os.write(stream.target, line) :]


def main(fd: int) -> None:
    link = to_parent(fd)
    sys.setswitchinterval(SWITCH_SECONDS)
    message = next(iter(link), None)
    if message is None:
        return
    plan = json.loads(message[1])
    streams = [Stream(rank=rank, source=pipe, target=target) for rank, pipe, target in plan["streams"]]
    ranks = sorted({stream.rank for stream in streams})
    store = partial(open_store, **plan["store"])
    uploader = LogUploader(store, ranks, attempt=plan["attempt"], say=_say)
    uploader.start()
    seconds = Relay(streams, uploader.add, link).run()
    uploader.finish(max(0.0, seconds - SAY_SECONDS))
    os._exit(0)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(STDOUT, line.encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
