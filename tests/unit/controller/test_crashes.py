"""SIGKILL of the operator between any two writes: it goes on, starts no attempt twice, loses no outcome.

A story (a job's life with the world's doings) is told once without a crash to learn its number of writes,
then again with a crash at each of them, before and after the write takes effect. Both tellings must end
alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from spottrain.contract import Outcome
from spottrain_operator.names import INTERRUPT_ANNOTATION

from tests.builders import word
from tests.unit.controller.fake_cluster import World, begun

Story = Callable[[World], Awaitable[None]]
SPOT_FIRST = {
    "type": "SpotFirst",
    "pools": [{"name": "spot", "platform": "AWS"}, {"name": "od", "platform": "AWS", "type": "OnDemand"}],
    "spotFirst": {"pendingSeconds": 30, "returnAfterSeconds": 120},
}


async def reclaimed_with_notice(w: World) -> None:
    await w.begin()
    w.pass_time(30)
    await w.noticed("node-a", 100)
    await w.after(2)
    await w.after(2)
    w.pass_time(20)
    await w.ends(w.pod(1), 75, word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0))
    await w.binds(w.pod(2), "node-b")
    w.pass_time(60)
    await w.ends(w.pod(2), 0, word(Outcome.DONE, step=20, durableStep=20, startStep=9))


async def node_vanishes(w: World) -> None:
    await w.begin()
    w.pass_time(60)
    del w.cluster.nodes["node-a"]
    await w.settle()
    await w.binds(w.pod(2), "node-b")
    w.pass_time(60)
    await w.ends(w.pod(2), 0, word(Outcome.DONE, startStep=5))


async def fails_then_works(w: World) -> None:
    await w.begin()
    await w.ends(w.pod(1), 1, "Traceback: boom")
    await w.after(11)
    await w.binds(w.pod(2), "node-a")
    await w.ends(w.pod(2), 0, word(Outcome.DONE))


async def returns_to_spot(w: World) -> None:
    """On demand, as no spot node came; a request that gets none, one that is granted, and the hand-over."""
    await w.settle()
    await w.after(31)
    await w.after(25)
    await w.binds(w.pod(2), "node-a")
    w.saved[2] = 9
    await w.after(70)  # its time on demand is not over
    await w.after(70)
    await w.after(31)
    await w.after(130)
    await w.binds(w.pod(4), "node-b")
    await w.after(21)
    await w.ends(w.pod(2), 75, word(Outcome.INTERRUPTED, step=12, durableStep=12, startStep=0))
    w.pass_time(60)
    await w.ends(w.pod(4), 0, word(Outcome.DONE, step=20, durableStep=20, startStep=12))


async def deleted_by_hand(w: World) -> None:
    await w.begin()
    pod = w.cluster.pods[w.pod(1)]["metadata"]
    pod |= {"deletionTimestamp": "2026-03-01T12:00:30Z", "deletionGracePeriodSeconds": 30}
    w.cluster._bump(w.cluster.pods[w.pod(1)])
    await w.settle()
    w.pass_time(5)
    await w.ends(w.pod(1), 0)
    await w.after(11)
    await w.binds(w.pod(2), "node-a")
    w.pass_time(60)
    await w.ends(w.pod(2), 0, word(Outcome.DONE))


async def done_during_the_notice(w: World) -> None:
    await w.begin()
    w.pass_time(30)
    await w.noticed("node-a", 100)
    await w.after(2)
    await w.after(2)
    await w.ends(w.pod(1), 0, word(Outcome.DONE, step=20))


async def refuses_its_configuration(w: World) -> None:
    await w.settle()
    w.cluster.bind(w.pod(1), "node-a")
    await w.ends(w.pod(1), 64, word(Outcome.BAD_CONFIGURATION, reason="StoreDenied", message="403"))


async def interrupted_on_request(w: World) -> None:
    await w.begin()
    w.pass_time(60)
    w.saved[1] = 5
    await w.annotates(INTERRUPT_ANNOTATION, "drill-1")
    w.pass_time(5)
    await w.ends(w.pod(1), 75, word(Outcome.INTERRUPTED, step=9, durableStep=9, startStep=0))
    await w.binds(w.pod(2), "node-a")
    w.pass_time(60)
    await w.ends(w.pod(2), 0, word(Outcome.DONE, step=20, durableStep=20, startStep=9))


STORIES: list[tuple[Story, dict[str, object], tuple[int, int, int, str]]] = [
    (reclaimed_with_notice, {}, (2, 0, 1, "Succeeded")),
    (node_vanishes, {}, (2, 0, 1, "Succeeded")),
    (fails_then_works, {}, (2, 1, 0, "Succeeded")),
    (deleted_by_hand, {}, (2, 0, 1, "Succeeded")),
    (done_during_the_notice, {}, (2, 0, 1, "Succeeded")),
    (refuses_its_configuration, {}, (1, 1, 0, "Failed")),
    (interrupted_on_request, {}, (2, 0, 0, "Succeeded")),
    (returns_to_spot, {"capacity": SPOT_FIRST}, (4, 0, 0, "Succeeded")),
]


def _outcome(w: World) -> tuple[int, int, int, str]:
    s = w.status
    return s.attempt, s.failures, s.interruptions, s.phase


def _check_end(w: World, expected: tuple[int, int, int, str]) -> None:
    assert _outcome(w) == expected
    assert len(w.cluster.posted) == len(set(w.cluster.posted)), "a pod's name was POSTed twice"
    numbers = [r.number for r in w.status.attempts]
    assert numbers == sorted(set(numbers)) and numbers[-1] == expected[0]
    held = [n for n, p in w.cluster.pods.items() if p["metadata"].get("finalizers")]
    assert not held or w.cluster.live(), f"finalizers left on {held}"


@pytest.mark.parametrize("after_effect", [True, False], ids=["after", "before"])
@pytest.mark.parametrize(("story", "spec", "expected"), STORIES)
async def test_a_crash_at_any_write_changes_nothing_in_the_end(
    story: Story, spec: dict[str, object], expected: tuple[int, int, int, str], after_effect: bool
) -> None:
    whole = World(spec)
    await story(whole)
    _check_end(whole, expected)
    # All begin alike, and one of them has the crashes of the beginning.
    first = 1 if (story, spec) == STORIES[0][:2] else whole.begun_after + 1
    for k in range(first, whole.cluster.writes + 1):
        world = World(spec)
        world.cluster.crash_at, world.cluster.crash_after_effect = k, after_effect
        await story(world)
        _check_end(world, expected)
        assert world.cluster.posted == whole.cluster.posted, f"crash at write {k}"
        told = [(r.number, r.cause, r.exit_code, r.durable_step) for r in world.status.attempts]
        assert told == [(r.number, r.cause, r.exit_code, r.durable_step) for r in whole.status.attempts], (
            f"write {k}"
        )


async def test_a_trainer_that_is_done_as_it_is_about_to_be_deleted_is_done() -> None:
    """Its end is not in the cache yet: the DELETE meets a newer version, and nothing was written by then."""
    w = await begun({"failurePolicy": {"maxInterruptions": 0}})
    w.pass_time(30)
    await w.noticed("node-a", 100)
    delete = w.cluster.delete_pod

    async def late(name: str, **more: Any) -> None:
        w.cluster.delete_pod = delete  # type: ignore[method-assign]
        w.cluster.end(w.pod(1), 0, word(Outcome.DONE, step=9))
        await delete(name, **more)

    w.cluster.delete_pod = late  # type: ignore[method-assign]
    await w.after(4)
    assert w.cluster.delete_pod == delete, "it was asked for"
    assert w.status.phase == "Succeeded" and (w.status.interruptions, w.status.failures) == (0, 0)


async def test_a_notice_that_is_withdrawn_frees_the_replacement_once() -> None:
    w = await begun()
    w.pass_time(60)
    await w.noticed("node-a", 40)
    await w.after(2)
    await w.ends(w.pod(1), 75)
    pod = w.cluster.pods[w.pod(2)]
    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}]
    w.cluster._bump(pod)
    await w.settle()
    assert w.status.attempt == 2
    w.cluster.add_node("node-a")  # another machine, the same name
    await w.after(30)
    assert (w.status.attempt, w.status.interruptions) == (3, 1)
    assert list(w.cluster.pods) == [w.pod(3)] and w.cluster.posted == [w.pod(n) for n in (1, 2, 3)]
    assert "affinity" not in w.cluster.pods[w.pod(3)]["spec"]
