"""What kstatus takes a TrainingJob for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spottrain_operator.errors import ApiError
from spottrain_operator.names import Condition

from tests.builders import KEY
from tests.support.kstatus import kstatus
from tests.unit.controller.fake_cluster import World, begun


def shown(w: World) -> str:
    return kstatus(w.cluster.jobs[KEY.name])


def kinds(w: World) -> set[str]:
    """The types of its conditions that are kstatus' own."""
    return {str(c.type) for c in w.status.conditions} & {"Stalled"}


def edit(w: World, **capacity: Any) -> None:
    job = w.cluster.jobs[KEY.name]
    job["spec"]["capacity"] |= capacity
    job["metadata"]["generation"] += 1
    w.cluster._bump(job)


def refuse_dry_runs(w: World) -> Callable[[bool], None]:
    """A policy of the cluster that refuses the job's pods; what is returned switches it."""
    refused = True

    async def create(manifest: dict[str, Any]) -> dict[str, Any]:
        if refused:
            raise ApiError(422, "spec.containers[0]: Invalid value")
        return manifest

    def switch(on: bool) -> None:
        nonlocal refused
        refused = on

    w.cluster.dry_run_pod = create  # type: ignore[method-assign]
    return switch


async def test_a_job_that_is_accepted_is_current_whether_it_has_nodes_runs_or_is_done() -> None:
    w = World()
    await w.settle()
    assert shown(w) == "Current" and not w.status.is_true(Condition.SCHEDULED)
    await w.begin()
    assert shown(w) == "Current" and w.status.is_true(Condition.RUNNING)
    await w.ends(w.pod(1), 0, '{"outcome": "done"}')
    assert shown(w) == "Current" and w.status.terminal and kinds(w) == set()


async def test_a_refused_job_is_stalled_with_the_words_of_accepted_until_its_spec_is_right() -> None:
    w = World()
    switch = refuse_dry_runs(w)
    await w.settle()
    stalled, accepted = w.status.condition(Condition.STALLED), w.status.condition(Condition.ACCEPTED)
    assert stalled is not None and accepted is not None
    assert shown(w) == "Failed" and (stalled.reason, stalled.message) == (accepted.reason, accepted.message)
    switch(False)
    edit(w, pendingTimeoutSeconds=901)
    assert shown(w) == "InProgress"
    await w.settle()
    assert shown(w) == "Current" and kinds(w) == set() and w.status.is_true(Condition.ACCEPTED)


async def test_a_changed_spec_is_checked_and_written_once() -> None:
    w = await begun()
    seen, real = list[str](), w.cluster.write_status

    async def write_status(*args: Any, **more: Any) -> Any:
        written = await real(*args, **more)
        seen.append(shown(w))
        return written

    w.cluster.write_status = write_status  # type: ignore[method-assign]
    edit(w, pendingTimeoutSeconds=901)
    await w.settle()
    assert seen == ["Current"]
    switch = refuse_dry_runs(w)
    edit(w, pendingTimeoutSeconds=902)
    await w.settle()
    assert seen[1:] == ["Failed"]
    switch(False)
    edit(w, pendingTimeoutSeconds=903)
    await w.settle()
    assert "Failed" not in seen[2:] and seen[-1] == "Current", "the old refusal does not concern the new spec"


async def test_a_job_that_has_failed_is_stalled_for_good() -> None:
    w = await begun({"failurePolicy": {"maxFailures": 0}})
    await w.ends(w.pod(1), 1, "Traceback: boom")
    failed, stalled = w.status.condition(Condition.FAILED), w.status.condition(Condition.STALLED)
    assert failed is not None and stalled is not None
    assert shown(w) == "Failed" and (stalled.reason, stalled.message) == (failed.reason, failed.message)


async def test_a_suspended_job_waits_for_nothing() -> None:
    w = World({"suspend": True})
    await w.settle()
    assert shown(w) == "Current" and kinds(w) == set()
