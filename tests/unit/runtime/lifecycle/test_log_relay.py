"""What comes out of the pipes goes on byte for byte, in whole lines, and a copy of it is kept."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest
from spottrain.distributed.channel import Link
from spottrain.lifecycle.log_capture.relay import Relay, Stream


class Scene:
    """Ranks 0 and 1, both of which print to one output."""

    def __init__(self) -> None:
        self.output, self.target = os.pipe()
        pipes = [os.pipe(), os.pipe()]
        self.ends = {rank: end for rank, (_, end) in enumerate(pipes)}
        self._sources = [source for source, _ in pipes]
        self.kept = {0: b"", 1: b""}
        streams = [Stream(rank=rank, source=s, target=self.target) for rank, s in enumerate(self._sources)]
        self.parent, self._child = map(Link, socket.socketpair())
        self.relay = Relay(streams, self._keep, self._child)
        self._thread = threading.Thread(target=self.relay.run, daemon=True)
        self.start = self._thread.start

    def _keep(self, rank: int, data: bytes) -> None:
        self.kept[rank] += data

    def print(self, rank: int, data: bytes) -> None:
        os.write(self.ends[rank], data)

    def out(self, size: int) -> bytes:
        """The next so many bytes that people see."""
        found = b""
        while len(found) < size:
            assert select.select([self.output], [], [], 10.0)[0], found
            found += os.read(self.output, size - len(found))
        return found

    def end(self, *ranks: int) -> None:
        for rank in ranks:
            os.close(self.ends.pop(rank))

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive(), "the relay goes on"

    def close(self) -> None:
        self.parent.socket.close()
        self._child.socket.close()
        for fd in (self.output, self.target, *self._sources, *self.ends.values()):
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_lines_go_on_at_once_and_are_kept_by_rank(scene: Scene) -> None:
    scene.start()
    scene.print(0, b"zero\n")
    assert scene.out(5) == b"zero\n"
    scene.print(1, b"one\n")
    assert scene.out(4) == b"one\n"
    scene.end(0, 1)
    scene.join()
    assert scene.kept == {0: b"zero\n", 1: b"one\n"}


def test_no_line_comes_into_the_middle_of_another_rank_s(scene: Scene) -> None:
    scene.print(0, b"begun")
    scene.print(1, b"one\n")
    scene.start()
    assert scene.out(4) == b"one\n"
    scene.print(0, b", and done\n")
    assert scene.out(16) == b"begun, and done\n"


def test_what_gets_no_end_of_line_goes_on_all_the_same(scene: Scene) -> None:
    scene.start()
    scene.print(0, b"\r 10%|#")
    assert scene.out(7) == b"\r 10%|#"
    scene.print(0, b"killed")
    scene.end(0)
    assert scene.out(6) == b"killed"


def test_a_finish_passes_on_all_that_was_written_though_somebody_still_could(scene: Scene) -> None:
    scene.print(0, b"a\n" * 30_000)
    scene.print(1, b"last")
    scene.parent.send("finish", b"5.0")
    scene.start()
    found = scene.out(60_004)
    scene.join()
    assert found.count(b"a\n") == 30_000 and b"last" in found
    assert scene.kept == {0: b"a\n" * 30_000, 1: b"last"}


def test_where_nobody_reads_any_more_the_copy_is_kept_all_the_same(scene: Scene) -> None:
    os.close(scene.output)
    scene.start()
    scene.print(0, b"a\n")
    scene.end(0, 1)
    scene.join()
    assert scene.kept[0] == b"a\n"


def test_each_line_is_one_write_so_that_no_other_process_writes_into_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, writes = os.write, list[int]()

    def write(fd: int, data: bytes) -> int:
        writes.append(len(data))
        return usual(fd, data)

    monkeypatch.setattr(os, "write", write)
    scene.print(0, b"x" * 3000 + b"\n" + b"y" * 3000 + b"\nz")
    scene.end(0, 1)
    scene.start()
    scene.join()
    assert writes[1:] == [3001, 3001, 1]
