"""How often which trainer is asked for its progress."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from spottrain.contract import Progress
from spottrain_operator.api.observed import Limits, PodView, Silence
from spottrain_operator.api.training_job import CostStatus, Job, JobKey
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.observe import Sources
from spottrain_operator.control.progress import MAX_PER_SECOND, Poller, chosen
from spottrain_operator.control.work_queue import Lane, WorkQueue
from spottrain_operator.status.changes import with_progress

from tests.builders import (
    KEY,
    NOW,
    POOL,
    deleted,
    make_job,
    make_observed,
    make_pod,
    notice,
    raw_spec,
    sample,
    started,
)
from tests.support.virtualtime import run_virtually
from tests.unit.controller.fake_cluster import FakeCluster, begun

HANG = {"failurePolicy": {"hangTimeoutSeconds": 60}}


def poller_of(caches: Caches, memory: Memory, **more: Any) -> Poller:
    cluster = more.pop("cluster", FakeCluster())
    sources = Sources(cluster=cluster, caches=caches, memory=memory, default_pool=POOL)
    given: dict[str, Any] = {"queue": WorkQueue(), "interval": 10, "now": lambda: NOW} | more
    return Poller(sources=sources, **given)


async def runs(poller: Poller, seconds: float) -> None:
    task = asyncio.create_task(poller.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _trainers(count: int, spec: dict[str, Any], name: str = "p", **more: Any) -> list[tuple[PodView, Job]]:
    job = make_job(raw_spec(**spec), status=started())
    return [(replace(make_pod(**more), uid=f"{name}-{number}"), job) for number in range(count)]


def test_the_number_of_queries_is_bounded_and_everyone_has_a_turn() -> None:
    trainers = _trainers(5000, {})
    rounds = [chosen(trainers, number, 500) for number in range(10)]
    assert max(map(len, rounds)) <= 1.15 * 500, "by their UIDs they are spread almost evenly"
    asked = Counter(pod.uid for pods in rounds for pod in pods)
    assert set(asked.values()) == {1} and len(asked) == 5000


@pytest.mark.parametrize(("spec", "pod"), [(HANG, {}), ({}, {"notice": notice()}), ({}, deleted())])
def test_those_on_whose_answer_a_decision_depends_are_asked_in_each_round(
    spec: dict[str, Any], pod: dict[str, Any]
) -> None:
    trainers = _trainers(700, spec, "now", **pod) + _trainers(5000, {})
    for number in range(3):
        asked = Counter(pod.uid.partition("-")[0] for pod in chosen(trainers, number, 500))
        assert asked["now"] == 700 and asked["p"] > 0


@pytest.mark.parametrize(
    ("state", "age", "sums_age", "wakes", "writes"),
    [
        ("Training", 61, 61, False, False),
        ("Training", 501, 499, False, True),
        ("Training", 501, 501, True, False),  # one write of the plan has both
        ("Training", 61, 501, False, False),
        ("Saving", 1, 1, True, False),
    ],
)
async def test_a_new_state_wakes_its_job_and_further_steps_are_written_by_the_poller(
    state: str, age: float, sums_age: float, wakes: bool, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = await begun()
    before, job = sample(), w.caches.jobs.get(KEY)
    assert job is not None
    sums = CostStatus(update_time=before.at + timedelta(seconds=age - sums_age))
    job = replace(job, status=replace(with_progress(job.status, make_observed(job=job), before), cost=sums))
    w.cluster.jobs[KEY.name]["status"] = job.status.to_json()
    w.caches.jobs.put(replace(job, resource_version=job.resource_version + 1))
    w.cluster.jobs[KEY.name]["metadata"]["resourceVersion"] = str(job.resource_version + 1)
    queue, later = WorkQueue(), sample(before.progress.step + 1, state=state, jobUID=KEY.uid).progress
    now = before.at + timedelta(seconds=age)
    poller = poller_of(w.caches, w.memory, cluster=w.cluster, queue=queue, now=lambda: now)
    w.memory.write_interval = timedelta(seconds=500)
    monkeypatch.setattr(poller, "_poll", AsyncMock(return_value=later))
    (pod,) = w.caches.pods.trainers()
    await poller._ask(cast(Any, None), pod)
    assert (KEY in queue._waiting[Lane.EVENT]) == wakes
    written, known = w.status, w.caches.jobs.get(KEY)
    assert written.progress is not None and written.progress.step == before.progress.step + writes
    assert (
        known is not None
        and known.status == written
        and written.attempts[0].last_step == written.progress.step
    )


def test_with_many_jobs_figures_and_bookkeeping_are_written_less_often() -> None:
    few, many = Limits().spread(timedelta(seconds=50)), Limits().spread(timedelta(minutes=14))
    assert few == Limits()
    assert (many.progress_interval, many.cost_interval) == (timedelta(minutes=14),) * 2
    assert many.books_interval == timedelta(minutes=28)


async def test_progress_that_comes_beside_a_write_of_the_job_is_dropped() -> None:
    w = await begun()
    job, poller = w.caches.jobs.get(KEY), poller_of(w.caches, w.memory, cluster=w.cluster)
    assert job is not None
    w.cluster._bump(w.cluster.jobs[KEY.name])
    before = w.status
    await poller._write(job, sample(99))
    assert w.status == before and w.caches.jobs.get(KEY) is job


@pytest.mark.parametrize("ends", [deleted(), {"notice": notice()}])
def test_a_trainer_is_asked_at_once_when_its_pod_is_to_end(
    ends: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be killed before its next turn, and then nobody else knows what it had saved."""

    async def story() -> list[float]:
        loop, caches, memory = asyncio.get_running_loop(), Caches(), Memory()
        caches.jobs.put(make_job(status=started()))
        caches.pods.put(make_pod())
        poller = poller_of(caches, memory, interval=600)
        asked: list[float] = []

        async def poll(_: object, pod: PodView) -> Progress:
            asked.append(loop.time())
            return sample(40, jobUID=KEY.uid, durableStep=36).progress

        monkeypatch.setattr(poller, "_poll", poll)
        running = asyncio.create_task(runs(poller, 20))
        await asyncio.sleep(5)
        caches.pods.put(make_pod(resource_version=2, **ends))
        told = loop.time()
        await running
        heard = memory.of(KEY).sample
        assert heard is not None and heard.progress.durableStep == 36
        return [at - told for at in asked]

    (after,) = run_virtually(story())
    assert 0 <= after <= 1, "once"


@pytest.mark.parametrize(("jobs", "seconds"), [(50, 10), (2000, 40)])
def test_with_many_jobs_each_is_asked_less_often_and_at_even_intervals(
    jobs: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> dict[str, list[float]]:
        caches, memory = Caches(), Memory()
        for number in range(jobs):
            key = JobKey(namespace="ns", name=f"j{number}", uid=f"u{number}")
            caches.jobs.put(replace(make_job(status=started()), key=key))
            caches.pods.put(replace(make_pod(), uid=f"p{number}", job=key))
        poller = poller_of(caches, memory)
        asked: dict[str, list[float]] = {}

        async def poll(_: object, pod: PodView) -> Silence:
            asked.setdefault(pod.uid, []).append(asyncio.get_running_loop().time())
            return Silence(pod_uid=pod.uid, refused=False)

        monkeypatch.setattr(poller, "_poll", poll)
        await runs(poller, 3 * seconds - 0.01)
        return asked

    asked = run_virtually(story())
    assert len(asked) == jobs and {len(times) for times in asked.values()} == {3}
    for times in asked.values():
        for earlier, later in pairwise(times):
            assert later - earlier == pytest.approx(seconds, abs=1)
    every = [at for times in asked.values() for at in times]
    busiest = max(sum(second <= at < second + 1 for at in every) for second in range(int(3 * seconds)))
    assert busiest <= 1.6 * MAX_PER_SECOND
