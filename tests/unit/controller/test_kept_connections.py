"""Over which connections trainers are asked for their progress."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest
from spottrain.contract import Progress
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.progress import MAX_KEPT, Poller, Turn, keeping, most_kept
from spottrain_operator.control.work_queue import WorkQueue

from tests.builders import KEY, NOW, make_job, make_pod, started
from tests.support.connections import close_server

BODY = Progress(state="Training", attempt=1, jobUID=KEY.uid, step=7).to_json()
LIMIT = 10.0
"""Seconds."""


@dataclass
class Trainer:
    """Answers over kept connections."""

    body: str = BODY
    pieces: int = 1
    answers_per_connection: int = 1_000_000
    """The request after these closes the connection without an answer."""
    connections: int = 0
    requests: int = 0
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            for _ in range(self.answers_per_connection):
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                await self._send(writer)
                self.answered.set()
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        body = self.body.encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        for piece in range(self.pieces):
            start, end = (len(body) * n // self.pieces for n in (piece, piece + 1))
            writer.write(body[start:end])
            await writer.drain()
            await asyncio.sleep(0.01 if self.pieces > 1 else 0)

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not done():
                self.answered.clear()
                await self.answered.wait()


@asynccontextmanager
async def polled(trainer: Trainer, port: int = 0, interval: float = 0.02) -> AsyncIterator[Memory]:
    """A poller asks this trainer of one running job; yields what it remembers."""
    server = await asyncio.start_server(trainer.answer, "127.0.0.1", port)
    caches, memory = Caches(), Memory()
    caches.jobs.put(make_job(status=started()))
    caches.pods.put(make_pod(ip="127.0.0.1", running_since=NOW))
    poller = Poller(
        caches=caches,
        memory=memory,
        queue=WorkQueue(),
        interval=interval,
        write_interval=timedelta(seconds=60),
        now=lambda: NOW,
        port=server.sockets[0].getsockname()[1],
    )
    task = asyncio.create_task(poller.run())
    try:
        yield memory
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await close_server(server)
        for writer in trainer.writers:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_a_trainer_is_asked_over_one_connection() -> None:
    trainer = Trainer()
    async with polled(trainer) as memory:
        await trainer.until(lambda: trainer.requests >= 4)
    assert trainer.connections == 1 and memory.samples[KEY].progress.step == 7


async def test_where_no_descriptor_is_free_for_it_no_connection_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3, 3))
    trainer = Trainer()
    async with polled(trainer):
        await trainer.until(lambda: trainer.requests >= 3)
    assert trainer.connections >= trainer.requests


async def test_a_kept_connection_that_the_trainer_has_closed_is_no_missed_poll() -> None:
    trainer, silences = Trainer(answers_per_connection=1), []
    async with polled(trainer) as memory:
        for count in range(2, 6):
            await trainer.until(lambda count=count: trainer.requests >= count)  # type: ignore[misc]
            silences.append(memory.silences.get(KEY))
    assert silences == [None] * 4 and trainer.connections > 4
    assert memory.samples[KEY].progress.step == 7


async def test_another_pod_with_the_address_is_not_taken_for_the_one_before() -> None:
    trainer = Trainer()
    async with polled(trainer) as memory:
        await trainer.until(lambda: trainer.requests >= 2)
        trainer.body = Progress(state="Training", attempt=1, jobUID="another", step=99).to_json()
        for writer in trainer.writers:  # the pod goes, and with it its connections
            writer.transport.abort()
        await trainer.until(lambda: trainer.connections >= 2 and trainer.requests >= 6)
    assert memory.samples[KEY].progress.step == 7


async def test_a_trainer_that_goes_on_answering_loses_its_connection() -> None:
    """aiohttp would keep all that comes before the next poll."""

    class Flood(Trainer):
        ended = False
        sent = 0

        async def _send(self, writer: asyncio.StreamWriter) -> None:
            await super()._send(writer)
            await asyncio.sleep(0.05)  # the poll is over
            with suppress(ConnectionError):
                while self.sent < 5_000_000:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" * 1000)
                    await writer.drain()
                    self.sent += 38_000
            self.ended = True

    trainer = Flood()
    async with polled(trainer, interval=1.0) as memory:
        await trainer.until(lambda: trainer.ended)
    assert trainer.sent < 5_000_000 and memory.samples[KEY].progress.step == 7


async def test_an_answer_may_come_in_several_packets() -> None:
    trainer = Trainer(pieces=3)
    async with polled(trainer) as memory:
        await trainer.until(lambda: trainer.requests >= 2)
        assert memory.silences.get(KEY) is None
    assert trainer.connections == 1 and memory.samples[KEY].progress.step == 7


def test_of_too_many_connections_those_of_trainers_that_are_asked_often_are_kept() -> None:
    def pods(count: int, kind: Turn) -> list[tuple[object, Turn]]:
        return [(replace(make_pod(), uid=f"{kind.name}-{n}"), kind) for n in range(count)]

    def kept(turns: list[tuple[object, Turn]]) -> dict[str, int]:
        uids = [uid.partition("-")[0] for uid in keeping(turns, 10)]  # type: ignore[arg-type]
        return {kind: uids.count(kind) for kind in set(uids)}

    few = pods(4, Turn.IN_TURN) + pods(3, Turn.SOON) + pods(50, Turn.NEVER)
    assert kept(few) == {"IN_TURN": 4, "SOON": 3}
    assert kept(few + pods(4, Turn.EACH_ROUND)) == {"EACH_ROUND": 4}
    assert kept(few + pods(40, Turn.EACH_ROUND)) == {"EACH_ROUND": 10}


@pytest.mark.parametrize(
    ("descriptors", "kept"), [(resource.RLIM_INFINITY, MAX_KEPT), (1 << 20, MAX_KEPT), (1024, 256)]
)
def test_kept_connections_leave_file_descriptors_for_the_rest(
    descriptors: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert most_kept() == kept
