"""The operator's poller asks the runtime's own server for its progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from spottrain.core.progress import IDLE_SECONDS, ProgressBoard, serve
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.progress import KEPT_SECONDS, Poller
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.io.health import Health

from tests.builders import KEY, NOW, make_job, make_pod, started
from tests.support.connections import close_server


@asynccontextmanager
async def counted(port: int) -> AsyncIterator[tuple[int, list[object]]]:
    """Forwards to this port; yields its own port, and the connections that were made to it."""
    made: list[object] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(writer)
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer), return_exceptions=True)
        ended.append(writer)

    ended: list[object] = []
    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], made
    await close_server(server)
    async with asyncio.timeout(10):
        while len(ended) < len(made):
            await asyncio.sleep(0.005)


def trainer(idle_seconds: float = IDLE_SECONDS) -> tuple[ProgressBoard, int]:
    """The runtime's server: what it tells, and its port."""
    board = ProgressBoard(attempt=1)
    board.update(state="Training", job_uid=KEY.uid)
    port = serve(board, 0, idle_seconds=idle_seconds)
    assert port is not None
    return board, port


@asynccontextmanager
async def polling(address: str, port: int) -> AsyncIterator[Memory]:
    """The operator's poller for one running job, at most for 10 s; yields what it has heard."""
    caches, memory = Caches(), Memory()
    caches.jobs.put(make_job(status=started()))
    caches.pods.put(make_pod(ip=address, running_since=NOW))
    poller = Poller(
        caches=caches,
        memory=memory,
        queue=WorkQueue(),
        interval=0.02,
        write_interval=timedelta(seconds=60),
        now=lambda: datetime.now(UTC),
        port=port,
    )
    task = asyncio.create_task(poller.run())
    try:
        async with asyncio.timeout(10):
            yield memory
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(("idle_seconds", "one_connection"), [(IDLE_SECONDS, True), (0.001, False)])
async def test_a_trainer_is_asked_over_the_connection_that_it_keeps(
    idle_seconds: float, one_connection: bool
) -> None:
    board, port = trainer(idle_seconds)
    async with counted(port) as (forwarded, made), polling("127.0.0.1", forwarded) as memory:
        for step in range(1, 4):
            board.update(step=step)
            while KEY not in memory.samples or memory.samples[KEY].progress.step < step:
                assert KEY not in memory.silences
                await asyncio.sleep(0.005)
    assert (len(made) == 1) == one_connection


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_trainer_and_operator_are_reached_by_both_kinds_of_addresses(address: str) -> None:
    _, port = trainer()
    async with polling(address, port) as memory:
        while KEY not in memory.samples:
            await asyncio.sleep(0.005)
    runner = await Health(alive=lambda: True, ready=lambda: True).start(0)
    try:
        _, writer = await asyncio.open_connection(address, runner.addresses[0][1])
        writer.close()
    finally:
        await runner.cleanup()


def test_the_operator_closes_an_unused_connection_before_the_trainer_does() -> None:
    assert KEPT_SECONDS < IDLE_SECONDS
