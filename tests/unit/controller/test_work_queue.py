"""The work queue: deduplication, one worker for a key, backoff of its own for each key; the log's lines."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import replace
from datetime import timedelta

import pytest
from spottrain_operator.api.training_job import JobKey
from spottrain_operator.control.work_queue import RESYNC_SHARE, TOGETHER_SECONDS, Lane, WorkQueue
from spottrain_operator.io.logs import JsonLines, about
from spottrain_operator.io.metrics import QUEUE_DEPTH, QUEUE_WAIT, RECONCILE_LATENCY

from tests.builders import KEY
from tests.support.virtualtime import run_virtually, virtually

A, B = (JobKey(namespace="ns", name=name, uid=name) for name in "ab")


async def _run(queue: WorkQueue, do, until: asyncio.Event, workers: int = 3) -> None:  # type: ignore[no-untyped-def]
    tasks = [asyncio.create_task(queue.work(do)) for _ in range(workers)]
    await asyncio.wait_for(until.wait(), 10)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_key_that_waits_is_held_once() -> None:
    queue = WorkQueue()
    for _ in range(5):
        queue.add(A)
    assert await queue.take() == A
    queue.done(A)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.take(), 0.05)


async def test_no_two_workers_work_on_one_key_and_what_comes_meanwhile_is_not_lost() -> None:
    queue, at_work, looks, over = WorkQueue(), set[JobKey](), list[JobKey](), asyncio.Event()

    async def do(key: JobKey) -> None:
        assert key not in at_work
        at_work.add(key)
        if looks.count(key) == 0:
            queue.add(key)  # an event in the middle of the work
        await asyncio.sleep(0.01)
        at_work.discard(key)
        looks.append(key)
        if len(looks) == 4:
            over.set()

    queue.add(A)
    queue.add(B)
    await _run(queue, do, over)
    assert sorted(k.name for k in looks) == ["a", "a", "b", "b"]


async def test_a_failing_key_comes_back_and_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    queue, looks, over = WorkQueue(first_delay=0.01), list[str](), asyncio.Event()

    async def do(key: JobKey) -> None:
        looks.append(key.name)
        if key == A and looks.count("a") < 4:
            raise RuntimeError("boom")
        if looks.count("a") == 4 and "b" in looks:
            over.set()

    queue.add(A)
    queue.add(B)
    with caplog.at_level(logging.CRITICAL):
        await _run(queue, do, over, workers=1)
    assert looks[:2] == ["a", "b"] and looks.count("b") == 1


@virtually
async def test_facts_wait_a_moment_and_make_one_reconcile() -> None:
    queue, loop = WorkQueue(), asyncio.get_running_loop()
    for _ in range(3):
        queue.add_soon(A)
        await asyncio.sleep(0.3)
    assert await queue.take() == A and loop.time() == pytest.approx(TOGETHER_SECONDS)
    queue.add_soon(A)  # in the middle of the work
    queue.done(A)
    assert await queue.take() == A and loop.time() == pytest.approx(2 * TOGETHER_SECONDS)
    queue.done(A)
    queue.add_soon(A)
    queue.add(A)  # what does not wait takes the facts along
    assert await queue.take() == A and loop.time() == pytest.approx(2 * TOGETHER_SECONDS)
    queue.done(A)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.take(), 10)


async def test_of_several_delays_the_earliest_counts() -> None:
    queue = WorkQueue()
    queue.add_after(A, 60)
    queue.add_after(A, 0.01)
    queue.add_after(A, 30)
    assert await asyncio.wait_for(queue.take(), 5) == A


@virtually
async def test_delays_that_do_not_apply_any_more_are_not_kept() -> None:
    queue = WorkQueue()
    queue.add_after(B, 5000)
    for _ in range(1000):
        queue.add_after(A, 0.1)
        assert await queue.take() == A
        queue.done(A)
        queue.add_after(A, 3600)
    assert len(queue._timers) == 2 and await _taken(queue, 2) == ["a", "b"]


async def test_an_answer_says_when_to_look_again() -> None:
    queue, looks, over = WorkQueue(), list[JobKey](), asyncio.Event()

    async def do(key: JobKey) -> timedelta | None:
        looks.append(key)
        if len(looks) == 3:
            over.set()
        return timedelta(milliseconds=5)

    queue.add(A)
    await _run(queue, do, over)
    assert set(looks) == {A} and len(looks) >= 3


@virtually
async def test_a_key_is_processed_again_with_the_resync_at_the_latest_unless_it_rests() -> None:
    queue, looks = WorkQueue(resync=300), dict[str, list[float]]()

    async def do(key: JobKey) -> timedelta | None:
        looks.setdefault(key.name, []).append(asyncio.get_running_loop().time())
        return {"a": timedelta.max, "b": timedelta(seconds=200)}.get(key.name)

    for key in (A, B, replace(A, name="rests")):
        queue.add(key)
    worker = asyncio.create_task(queue.work(do))
    await asyncio.sleep(650)
    worker.cancel()
    assert looks == {"a": [0, 300, 600], "b": [0, 200, 400, 600], "rests": [0]}


async def test_the_depth_that_is_told_falls_when_a_key_is_taken() -> None:
    queue = WorkQueue()
    queue.add(A)
    queue.add(B)
    queue.add(B, Lane.RESYNC)
    assert _depth() == 2
    await queue.take()
    assert _depth() == 1
    await queue.take()
    assert _depth() == 0


def _depth() -> float:
    ((sample,),) = (family.samples for family in QUEUE_DEPTH.collect())
    return sample.value


async def _churn(queue: WorkQueue, seconds: float, keys: int = 50) -> None:
    """Never leaves the queue without a ready key."""
    loop = asyncio.get_running_loop()
    many = [JobKey(namespace="ns", name=f"k{n}", uid=f"k{n}") for n in range(keys)]
    while loop.time() < seconds:
        for key in many:
            queue.add(key)
        await asyncio.sleep(0.01)


async def _when_done(
    queue: WorkQueue, do_seconds: float, until: float, workers: int = 1
) -> dict[str, list[float]]:
    loop, looks = asyncio.get_running_loop(), dict[str, list[float]]()

    async def do(key: JobKey) -> None:
        looks.setdefault(key.name, []).append(loop.time())
        await asyncio.sleep(do_seconds)

    tasks = [asyncio.create_task(queue.work(do)) for _ in range(workers)]
    await asyncio.sleep(until)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return looks


@virtually
async def test_what_is_due_is_taken_in_its_time_though_other_keys_never_stop_coming() -> None:
    queue = WorkQueue()
    queue.add_after(A, 1.0)
    churn = asyncio.create_task(_churn(queue, 4.0))
    looks = await _when_done(queue, 0.1, 6.0)
    await churn
    (at,) = looks["a"]
    assert 0.999 <= at <= 1.3, "at most the key that is being worked on and one more go before it"


@virtually
async def test_a_key_that_waits_behind_a_backlog_is_taken_when_it_is_due() -> None:
    """It was added by an event as well: that it stands in the line already must not cost it its time."""
    queue = WorkQueue()
    for n in range(100):
        queue.add(JobKey(namespace="ns", name=f"k{n}", uid=f"k{n}"))
    queue.add(A)
    queue.add_after(A, 1.0)
    assert (await _when_done(queue, 0.1, 20.0))["a"] == [pytest.approx(1.1, abs=0.15)], "and only once"


def test_keys_that_are_due_again_and_again_do_not_hold_up_the_others() -> None:
    async def story() -> float:
        queue, loop = WorkQueue(), asyncio.get_running_loop()
        due = [JobKey(namespace="ns", name=f"due{n}", uid=f"due{n}") for n in range(50)]
        seen: dict[str, float] = {}

        async def do(key: JobKey) -> timedelta | None:
            seen.setdefault(key.name, loop.time())
            await asyncio.sleep(0.1)
            return timedelta(seconds=0.2) if key in due else None

        for key in due:
            queue.add_after(key, 0.01)
        task = asyncio.create_task(queue.work(do))
        await asyncio.sleep(1.0)
        queue.add(A)
        await asyncio.sleep(3.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return seen["a"]

    assert run_virtually(story()) <= 1.3


def _keys(prefix: str, count: int) -> list[JobKey]:
    return [JobKey(namespace="ns", name=f"{prefix}{n}", uid=f"{prefix}{n}") for n in range(count)]


async def _taken(queue: WorkQueue, count: int) -> list[str]:
    names = []
    for _ in range(count):
        key = await queue.take()
        names.append(key.name)
        queue.done(key)
    return names


async def test_events_go_before_a_resync_which_gets_its_share_all_the_same() -> None:
    queue = WorkQueue()
    for key in _keys("r", 100):
        queue.add(key, Lane.RESYNC)
    for key in _keys("e", 40):
        queue.add(key)
    names = await _taken(queue, 140)
    begun = names[: 5 * RESYNC_SHARE]
    assert sum(name.startswith("r") for name in begun) == 5
    assert sorted(names) == sorted(k.name for k in _keys("r", 100) + _keys("e", 40))


async def test_an_event_takes_a_key_out_of_the_resyncs_lane() -> None:
    queue = WorkQueue()
    for key in [*_keys("r", 100), A]:
        queue.add(key, Lane.RESYNC)
    queue.add(A)
    queue.add(B, Lane.EVENT)
    queue.add(B, Lane.RESYNC)
    assert await _taken(queue, 2) == ["a", "b"]
    assert "a" not in await _taken(queue, 100), "it is processed once"


@virtually
async def test_what_is_due_passes_a_resync_and_events() -> None:
    queue = WorkQueue()
    for key in _keys("r", 100):
        queue.add(key, Lane.RESYNC)
    queue.add(A, Lane.RESYNC)
    queue.add_after(A, 1.0)
    churn = asyncio.create_task(_churn(queue, 4.0))
    looks = await _when_done(queue, 0.1, 6.0)
    await churn
    assert looks["a"] == [pytest.approx(1.1, abs=0.2)]


def _waited(lane: Lane) -> float:
    return float(QUEUE_WAIT.labels(lane)._sum.get())


def test_the_wait_in_the_queue_is_measured_from_the_event_or_the_due_time() -> None:
    async def story() -> None:
        queue = WorkQueue()
        queue.add(A)
        queue.add_after(B, 1.0)
        await asyncio.sleep(3.0)
        assert set(await _taken(queue, 2)) == {"a", "b"}

    events, due = _waited(Lane.EVENT), _waited(Lane.DUE)
    run_virtually(story())
    assert _waited(Lane.EVENT) - events == pytest.approx(3.0)
    assert _waited(Lane.DUE) - due == pytest.approx(2.0)


def test_the_latency_is_the_wait_and_the_work_together() -> None:
    async def work(_: JobKey) -> None:
        await asyncio.sleep(2.0)

    async def story() -> None:
        queue = WorkQueue()
        queue.add(A)
        await asyncio.sleep(3.0)
        worker = asyncio.create_task(queue.work(work))
        await asyncio.sleep(5.0)
        worker.cancel()

    latency = RECONCILE_LATENCY.labels(Lane.EVENT)._sum
    before = latency.get()
    run_virtually(story())
    assert latency.get() - before == pytest.approx(5.0)


def test_a_line_names_its_job_attempt_and_rank() -> None:
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "pod %s", "args": ("p",)})
    record.__dict__ |= about(KEY, attempt=3, rank=1)
    line = json.loads(JsonLines().format(record))
    assert (line["namespace"], line["job"], line["attempt"], line["rank"]) == ("ns", "job", 3, 1)
    assert line["message"] == "pod p" and line["time"].endswith("Z") and "reason" not in line


def test_an_exception_is_one_line_too() -> None:
    try:
        raise ValueError("boom\nsecond")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    text = JsonLines().format(record)
    assert "\n" not in text and "boom" in json.loads(text)["traceback"]
