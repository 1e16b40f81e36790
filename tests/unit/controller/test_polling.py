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
from spottrain_operator.api.observed import PodView, Silence
from spottrain_operator.api.training_job import JobKey
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.progress import MAX_PER_SECOND, PATIENCE, Poller, Turn, chosen, spaced, turn
from spottrain_operator.control.work_queue import WorkQueue
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

SELF = {"checkpoint": {"mode": "Self"}}
HANG = {"failurePolicy": {"hangTimeoutSeconds": 60}}
SILENT = Silence(pod_uid=make_pod().uid, refused=True)
MUTE = replace(SILENT, began=NOW, lasted=PATIENCE)


@pytest.mark.parametrize(
    ("spec", "pod", "heard", "often"),
    [
        ({}, {}, {}, Turn.SOON),
        ({}, {}, {"sample": sample()}, Turn.IN_TURN),
        ({}, {}, {"sample": sample(state="Starting")}, Turn.SOON),
        ({}, {}, {"sample": sample(attempt=2)}, Turn.SOON),
        ({}, {}, {"silence": SILENT}, Turn.SOON),
        ({}, {}, {"silence": SILENT, "late": True}, Turn.IN_TURN),  # it may only import for long
        ({}, deleted(), {"sample": sample()}, Turn.EACH_ROUND),
        ({}, {"notice": notice()}, {"sample": sample()}, Turn.EACH_ROUND),
        (HANG, {}, {"sample": sample()}, Turn.EACH_ROUND),
        (SELF, {}, {}, Turn.SOON),
        (SELF, {}, {"silence": SILENT}, Turn.SOON),
        (SELF, {}, {"silence": SILENT, "late": True}, Turn.IN_TURN),  # one answer may be lost
        (SELF, {}, {"silence": MUTE, "late": True}, Turn.NEVER),
        ({}, {}, {"silence": MUTE, "late": True}, Turn.IN_TURN),
        (SELF, {}, {"silence": replace(MUTE, pod_uid="another"), "late": True}, Turn.SOON),
        (SELF, {}, {"silence": MUTE, "sample": sample(), "late": True}, Turn.IN_TURN),
        (SELF, {}, {"silence": MUTE, "sample": sample(state="Starting"), "late": True}, Turn.IN_TURN),
        (SELF, {}, {"silence": MUTE, "sample": sample(attempt=2), "late": True}, Turn.NEVER),
        (SELF, deleted(), {"silence": MUTE, "late": True}, Turn.EACH_ROUND),
        (SELF, {"notice": notice()}, {"silence": MUTE, "late": True}, Turn.EACH_ROUND),
        (SELF | HANG, {}, {"silence": MUTE, "sample": sample(), "late": True}, Turn.EACH_ROUND),
        (SELF | HANG, {}, {"silence": MUTE, "late": True}, Turn.EACH_ROUND),
        (SELF, {}, {"sample": sample(), "late": True}, Turn.IN_TURN),
    ],
)
def test_a_trainer_is_asked_as_often_as_its_next_answer_matters(
    spec: dict[str, Any], pod: dict[str, Any], heard: dict[str, Any], often: Turn
) -> None:
    job = make_job(raw_spec(**spec), status=started())
    known = {"silence": None, "sample": None, "late": False} | heard
    assert turn(make_pod(**pod), job, **known) is often


def test_a_pod_whose_job_is_not_known_is_not_asked() -> None:
    assert turn(make_pod(), None, silence=None, sample=None, late=False) is Turn.NEVER


@pytest.mark.parametrize(
    ("pod", "heard", "often"),
    [
        ({}, {"sample": sample()}, Turn.IN_TURN),
        ({}, {"silence": MUTE, "late": True}, Turn.IN_TURN),
        (deleted(), {}, Turn.EACH_ROUND),
    ],
)
def test_a_trainer_whose_jobs_spec_cannot_be_read_is_asked(
    pod: dict[str, Any], heard: dict[str, Any], often: Turn
) -> None:
    job = replace(make_job(status=started()), spec=None)
    assert turn(make_pod(**pod), job, **({"silence": None, "sample": None, "late": False} | heard)) is often


def poller_of(caches: Caches, memory: Memory, **more: Any) -> Poller:
    given: dict[str, Any] = {"queue": WorkQueue(), "interval": 10, "now": lambda: NOW}
    given |= {"cluster": FakeCluster(), "default_pool": POOL} | more
    return Poller(caches=caches, memory=memory, write_interval=timedelta(seconds=60), **given)


async def runs(poller: Poller, seconds: float) -> None:
    task = asyncio.create_task(poller.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("answered_before", [False, True])
def test_an_image_of_its_own_is_asked_until_it_was_silent_for_five_minutes(
    answered_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a new process finds it, in an attempt that has run for hours."""

    async def story() -> list[float]:
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        caches, memory, pod = Caches(), Memory(), make_pod(running_since=NOW - timedelta(hours=3))
        caches.jobs.put(make_job(raw_spec(**SELF), status=started()))
        caches.pods.put(pod)
        poller = poller_of(caches, memory, now=lambda: NOW + timedelta(seconds=loop.time() - began))
        asked: list[float] = []

        async def poll(_: object, pod: PodView) -> Progress | Silence:
            asked.append(loop.time() - began)
            if answered_before and len(asked) == 2:
                return sample().progress
            return Silence(pod_uid=pod.uid, refused=True)

        monkeypatch.setattr(poller, "_poll", poll)
        await runs(poller, 1200)
        return asked

    last = run_virtually(story())[-1]
    assert last > 1180 if answered_before else 300 <= last <= 330


def _pods(count: int, name: str = "p") -> list[PodView]:
    return [replace(make_pod(), uid=f"{name}-{number}") for number in range(count)]


@pytest.mark.parametrize(("soon", "in_turn"), [(0, 5000), (5000, 0), (200, 5000), (5000, 200), (5000, 5000)])
def test_the_number_of_queries_is_bounded_and_everyone_has_a_turn(soon: int, in_turn: int) -> None:
    most = 500.0
    turns = [(pod, Turn.SOON) for pod in _pods(soon, "s")] + [(p, Turn.IN_TURN) for p in _pods(in_turn, "t")]
    rounds = [chosen(turns, number, most) for number in range(20)]
    assert max(map(len, rounds)) <= 1.15 * most, "by their UIDs they are spread almost evenly"
    asked = Counter(pod.uid for pods in rounds for pod in pods)
    assert set(asked) == {pod.uid for pod, _ in turns}
    if soon == 200:
        assert all(asked[pod.uid] == 20 for pod, kind in turns if kind is Turn.SOON)


def test_what_must_not_wait_is_asked_in_each_round_however_many_there_are() -> None:
    turns = [(pod, Turn.EACH_ROUND) for pod in _pods(700, "now")]
    turns += [(pod, Turn.IN_TURN) for pod in _pods(5000)] + [(pod, Turn.NEVER) for pod in _pods(9, "never")]
    for number in range(3):
        names = {pod.uid.partition("-")[0] for pod in chosen(turns, number, 500)}
        asked = [pod for pod in chosen(turns, number, 500) if pod.uid.startswith("now")]
        assert len(asked) == 700 and names == {"now", "p"}


@pytest.mark.parametrize(("jobs", "seconds"), [(50, 60), (600, 60), (5000, 500)])
def test_further_steps_are_written_less_often_with_many_jobs(jobs: int, seconds: float) -> None:
    turns = [(pod, Turn.IN_TURN) for pod in _pods(jobs)] + [(pod, Turn.NEVER) for pod in _pods(3000, "never")]
    assert spaced(timedelta(seconds=60), turns) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("state", "age", "wakes", "writes"),
    [("Training", 61, False, False), ("Training", 501, False, True), ("Saving", 1, True, False)],
)
async def test_a_new_state_wakes_its_job_and_further_steps_are_written_by_the_poller(
    state: str, age: float, wakes: bool, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = await begun()
    before, job = sample(), w.caches.jobs.get(KEY)
    assert job is not None
    job = replace(job, status=with_progress(job.status, make_observed(job=job), before))
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
    assert (KEY in queue._dirty) == wakes
    written, known = w.status, w.caches.jobs.get(KEY)
    assert written.progress is not None and written.progress.step == before.progress.step + writes
    assert (
        known is not None
        and known.status == written
        and written.attempts[0].last_step == written.progress.step
    )


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
        assert memory.samples[KEY].progress.durableStep == 36
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
            memory.samples[key] = sample()
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
