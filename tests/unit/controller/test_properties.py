"""Whatever happens, in any order: the operator comes to rest, counts each ending once, stays ended.

hypothesis draws a history (pods are bound and end, nodes get notices and vanish, people delete pods, the
operator crashes at some write, its caches miss events), and the rules below hold after each step of it.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spottrain.contract import Outcome
from spottrain_operator.names import INTERRUPT_ANNOTATION
from spottrain_operator.policies.restart import UNCOUNTED

from tests.builders import KEY, word
from tests.unit.controller.fake_cluster import Crash, World

NODES = ("node-a", "node-b", "node-c")
CHEAPEST: dict[str, Any] = {
    "type": "Cheapest",
    "cheapest": {"deadline": "2026-03-01T13:00:00Z"},
    "pools": [{"name": "a", "platform": "AWS"}, {"name": "b", "platform": "AWS", "type": "OnDemand"}],
}
"""An hour to go; the work is unknown."""
ENDS: list[tuple[int, str]] = [
    (0, ""),
    (0, word(Outcome.DONE, startStep=3)),
    (1, "Traceback: boom"),
    (75, word(Outcome.INTERRUPTED, durableStep=7, startStep=3)),
    (75, ""),
    (76, ""),
    (79, ""),
    (64, ""),
    (137, ""),
]
STEPS = st.one_of(
    st.tuples(st.just("bind"), st.sampled_from(NODES)),
    st.tuples(st.just("end"), st.sampled_from(ENDS)),
    st.tuples(st.just("notice"), st.sampled_from(NODES)),
    st.tuples(st.just("vanish"), st.sampled_from(NODES)),
    st.tuples(st.just("return"), st.sampled_from(NODES)),
    st.tuples(st.just("delete"), st.none()),
    st.tuples(st.just("suspend"), st.booleans()),
    st.tuples(st.just("time"), st.sampled_from((1, 15, 200))),
    st.tuples(st.just("clock"), st.sampled_from((0, -110, 110))),
    st.tuples(st.just("drill"), st.sampled_from(("a", "b"))),
    st.tuples(st.just("crash"), st.tuples(st.integers(1, 4), st.booleans())),
    st.tuples(st.just("look"), st.none()),
    st.tuples(st.just("settle"), st.none()),
)


class History:
    def __init__(self, spec: dict[str, object]) -> None:
        self.world = World(spec)
        self.cluster = self.world.cluster
        self.ended_as: str | None = None

    async def do(self, step: str, value: Any) -> None:
        await getattr(self, f"_{step}")(value)
        self.check()

    # --- the world's doings ---
    async def _bind(self, node: str) -> None:
        free = [
            n
            for n, p in self.cluster.pods.items()
            if "nodeName" not in p["spec"] and n in self.cluster.live()
        ]
        free = [n for n in free if "deletionTimestamp" not in self.cluster.pods[n]["metadata"]]
        if free and node in self.cluster.nodes:
            self.cluster.bind(free[0], node)

    async def _end(self, how: tuple[int, str]) -> None:
        bound = [
            n
            for n in self.cluster.live()
            if self.cluster.pods[n]["spec"].get("nodeName") in self.cluster.nodes
        ]
        if bound:
            self.cluster.end(bound[0], *how)

    async def _notice(self, node: str) -> None:
        if node in self.cluster.nodes:
            self.cluster.give_notice(node, 100)

    async def _vanish(self, node: str) -> None:
        self.cluster.nodes.pop(node, None)

    async def _return(self, node: str) -> None:
        self.cluster.add_node(node)

    async def _delete(self, _: None) -> None:
        for name in self.cluster.live()[:1]:
            meta = self.cluster.pods[name]["metadata"]
            at, self.cluster.crash_at = self.cluster.crash_at, None
            await self.cluster.delete_pod(name, uid=meta["uid"], version=None, grace=None)
            self.cluster.crash_at = at + 1 if at is not None else None

    async def _suspend(self, wanted: bool) -> None:
        job = self.cluster.jobs[KEY.name]
        if job["spec"].get("suspend", False) != wanted:
            job["spec"]["suspend"] = wanted
            job["metadata"]["generation"] += 1
            self.cluster._bump(job)

    async def _time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    async def _clock(self, ahead: float) -> None:
        """The operator's clock is set to another time than the API server's."""
        self.world.ahead = ahead

    async def _drill(self, request: str) -> None:
        job = self.cluster.jobs[KEY.name]
        job["metadata"].setdefault("annotations", {})[INTERRUPT_ANNOTATION] = request
        self.cluster._bump(job)

    # --- the operator's ---
    async def _crash(self, how: tuple[int, bool]) -> None:
        writes, self.cluster.crash_after_effect = how
        self.cluster.crash_at = self.cluster.writes + writes

    async def _look(self, _: None) -> None:
        """A reconcile on whatever the caches happen to hold."""
        try:
            await self.world.reconciler(KEY)
        except Crash:
            self.world._start()

    async def _settle(self, _: None) -> None:
        await self.world.settle()

    # --- what must hold ---
    def check(self) -> None:
        status, posted = self.world.status, self.cluster.posted
        assert len(posted) == len(set(posted)), "a pod's name was POSTed twice"
        self.world._check()
        judged = [r for r in status.attempts if r.cause]
        if status.attempt <= 20:
            uncharged = [r for r in judged if not r.charged and r.cause not in UNCOUNTED]
            assert status.failures == sum(1 for r in judged if r.charged)
            assert status.interruptions == len(uncharged)
        if self.ended_as:
            assert status.phase == self.ended_as
        self.ended_as = str(status.phase) if status.terminal else None


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(STEPS, max_size=25),
    workers=st.sampled_from((1, 1, 2, 3)),
    chosen=st.sampled_from(({}, {}, CHEAPEST, CHEAPEST | {"maxCostUSD": 100})),
)
async def test_any_history_converges(
    steps: list[tuple[str, Any]], workers: int, chosen: dict[str, Any]
) -> None:
    history = History(
        {
            "workers": workers,
            "capacity": {"sameZone": False} | chosen,
            "failurePolicy": {"maxFailures": 50, "maxNoProgress": 100},
        }
    )
    for step, value in steps:
        await history.do(step, value)
    await history.do("settle", None)
    status, world = history.world.status, history.world
    if status.terminal:
        return
    # Time and a healthy node bring any job that is not ended to its end, and to nothing left behind.
    world.cluster.crash_at, world.ahead = None, 0.0
    world.cluster.nodes.clear()
    world.cluster.add_node("node-new")
    await history.do("suspend", False)
    for _ in range(3):
        world.pass_time(400)
        await history.do("settle", None)
    for _ in range(3):  # an attempt may have to be given up first, and the next one to wait
        for _ in range(workers):
            await history.do("bind", "node-new")
        await history.do("settle", None)
        if world.pod(world.status.attempt) in world.cluster.live():
            break
        world.pass_time(400)
        await history.do("settle", None)
    if world.status.terminal:  # by what was under way
        return
    world.cluster.end(world.pod(world.status.attempt), 0, word(Outcome.DONE))
    await history.do("settle", None)
    for name in world.cluster.live():  # the other ranks, which the operator has deleted
        assert "deletionTimestamp" in world.cluster.pods[name]["metadata"]
        world.cluster.end(name, 0)
    await history.do("settle", None)
    assert world.status.phase == "Succeeded"
    assert not [n for n, p in world.cluster.pods.items() if p["metadata"].get("finalizers")]
