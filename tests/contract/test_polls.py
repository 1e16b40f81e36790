"""The operator's poller asks the runtime's own server for its progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
from spottrain.core.progress import ProgressBoard, serve
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.observe import Sources
from spottrain_operator.control.progress import Poller
from spottrain_operator.control.work_queue import WorkQueue
from spottrain_operator.io.health import Health

from tests.builders import KEY, NOW, POOL, make_job, make_pod, started
from tests.unit.controller.fake_cluster import FakeCluster


def trainer() -> tuple[ProgressBoard, int]:
    """The runtime's server: what it tells, and its port."""
    board = ProgressBoard(attempt=1)
    board.update(state="Training", job_uid=KEY.uid)
    port = serve(board, 0)
    assert port is not None
    return board, port


@asynccontextmanager
async def polling(address: str, port: int) -> AsyncIterator[Memory]:
    """The operator's poller for one running job, at most for 10 s; yields what it has heard."""
    caches, memory = Caches(), Memory()
    caches.jobs.put(make_job(status=started()))
    caches.pods.put(make_pod(ip=address, running_since=NOW))
    poller = Poller(
        sources=Sources(cluster=FakeCluster(), default_pool=POOL, caches=caches, memory=memory),
        queue=WorkQueue(),
        interval=0.02,
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


async def test_a_trainer_is_asked_again_and_again() -> None:
    board, port = trainer()
    async with polling("127.0.0.1", port) as memory:
        for step in range(1, 4):
            board.update(step=step)
            while (heard := memory.of(KEY).sample) is None or heard.progress.step < step:
                assert memory.of(KEY).silence is None
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_trainer_and_operator_are_reached_by_both_kinds_of_addresses(address: str) -> None:
    _, port = trainer()
    async with polling(address, port) as memory:
        while memory.of(KEY).sample is None:
            await asyncio.sleep(0.005)
    runner = await Health(ready=lambda: True).start(0)
    try:
        _, writer = await asyncio.open_connection(address, runner.addresses[0][1])
        writer.close()
    finally:
        await runner.cleanup()
