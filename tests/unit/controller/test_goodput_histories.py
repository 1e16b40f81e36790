"""Whatever happens, the parts of status.goodput are those of a clock that saw every second of the job.

hypothesis draws a history: nodes come and go, trainers work, save, crash and get notices, people suspend the
job, and the operator is down, is killed between two writes, or forgets what it had polled. Beside it, `Clock`
counts each second where it belongs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from spottrain.contract import Outcome, Progress, TimeSplit
from spottrain_operator.api.bookkeeping import NO_BOOKS
from spottrain_operator.api.observed import Sample
from spottrain_operator.api.prices import parse
from spottrain_operator.api.training_job import KEPT_ATTEMPTS, Status
from spottrain_operator.api.wire import rfc3339, timestamp
from spottrain_operator.names import ATTEMPT_LABEL, RANK_LABEL
from spottrain_operator.policies.goodput import PARTS, REPORTED

from tests.builders import KEY, word
from tests.unit.controller.fake_cluster import Json, World

PRICES = parse(
    '[{"instanceType": "g5", "capacityType": "Spot", "usdPerHour": 36, "zone": "a"},'
    ' {"instanceType": "g5", "capacityType": "OnDemand", "usdPerHour": 108}]'
)
LABELS = {
    "karpenter.sh/capacity-type": "spot",
    "node.kubernetes.io/instance-type": "g5",
    "topology.kubernetes.io/zone": "a",
}
OUTCOMES = {"done": Outcome.DONE, "saved": Outcome.INTERRUPTED, "lost": Outcome.INTERRUPTED_LOST}
CODES = {"done": 0, "saved": 75, "lost": 79, "killed": 137}
STEPS = st.one_of(
    st.tuples(st.just("start"), st.booleans()),
    st.tuples(st.just("time"), st.sampled_from((1, 7, 40, 310))),
    st.tuples(st.just("end"), st.sampled_from(tuple(CODES))),
    st.tuples(st.just("start"), st.booleans()),
    st.tuples(st.just("time"), st.sampled_from((7, 40))),
    st.tuples(st.just("bind"), st.booleans()),
    st.tuples(st.just("run"), st.none()),
    st.tuples(st.just("notice"), st.none()),
    st.tuples(st.just("take"), st.none()),
    st.tuples(st.just("suspend"), st.booleans()),
    st.tuples(st.just("down"), st.booleans()),
    st.tuples(st.just("forget"), st.none()),
    st.tuples(st.just("crash"), st.integers(1, 4)),
)


class Trainer:
    """Rank 0 of an attempt: what it would report of its seconds."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.steps = 0

    def work(self, together: bool) -> str:
        """Another second; returns where it belongs."""
        if self.seconds["startup"] < 3:
            part = "startup"
        elif not together:
            part = "waiting"
        else:
            self.steps += 1
            part = {1: "dataWait", 2: "checkpointStall"}.get(self.steps % 9, "productive")
        self.seconds[part] += 1
        self.seconds["unsaved"] += part == "productive"
        if part == "checkpointStall":
            self.seconds["unsaved"] = 0
        return part

    @property
    def split(self) -> TimeSplit:
        return TimeSplit(**{name: float(value) for name, value in self.seconds.items()})


class Clock:
    """The seconds of the job by where they went."""

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()
        self.allocated = 0
        self.unnoticed_wait = 0
        """Seconds of `waiting` since the end of an attempt that the operator has not seen."""


class PaidWorld(World):
    """Its nodes have prices, and its trainers report their seconds."""

    def __init__(self, spec: Json) -> None:
        self.trainers: dict[int, Trainer] = {}
        super().__init__(spec)

    def _start(self) -> None:
        super()._start()
        self.reconciler = replace(self.reconciler, sources=replace(self.sources, prices=lambda: PRICES))

    def _poll(self) -> None:
        for pod in self.caches.pods.of(KEY):
            if pod.rank == 0 and pod.running_since and pod.attempt == self.status.attempt:
                split = self.trainers[pod.attempt].split
                progress = Progress(state="Training", attempt=pod.attempt, step=1, timeSplit=split)
                self.memory.of(KEY).sample = Sample(progress=progress, at=self.cluster.now)


class History:
    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.world = PaidWorld(
            {
                "workers": workers,
                "capacity": {"sameZone": False},
                "failurePolicy": {"maxFailures": 999, "maxInterruptions": 999, "maxNoProgress": None},
            }
        )
        self.cluster = self.world.cluster
        self.cluster.nodes.clear()
        self.clock = Clock()
        self.exact = True
        """Whether every trainer that ended left a message."""
        self.allocated: dict[int, bool] = {}
        """By attempt: whether it has all of its nodes; False once it had them."""
        self.machines = 0
        self.down = False
        """Whether the operator is."""

    async def do(self, step: str, value: Any) -> None:
        await getattr(self, f"_{step}")(value)
        self._see_bindings()
        if not self.down:
            await self._settle(None)

    # --- the world ---
    def _pods(self, attempt: int | None = None, *, live: bool = False) -> list[Json]:
        pods = sorted(self.cluster.pods.values(), key=lambda p: (_attempt(p), _rank(p)))
        return [
            pod for pod in pods if attempt in (None, _attempt(pod)) and not (live and not self._lives(pod))
        ]

    def _lives(self, pod: Json) -> bool:
        lost = pod["spec"].get("nodeName", "") not in ("", *self.cluster.nodes)
        return pod["metadata"]["name"] in self.cluster.live() and not lost

    def _see_bindings(self) -> None:
        for attempt in {_attempt(pod) for pod in self._pods()}:
            bound = [pod for pod in self._pods(attempt) if "nodeName" in pod["spec"]]
            if attempt not in self.allocated and len(bound) == self.workers:
                self.allocated[attempt] = True
        for attempt, has in self.allocated.items():
            self.allocated[attempt] = has and bool(self._pods(attempt, live=True))

    def _add_node(self, name: str) -> None:
        self.cluster.add_node(name)
        stamp = rfc3339(self.cluster.now, timespec="seconds")
        self.cluster.nodes[name]["metadata"] |= {"labels": LABELS, "creationTimestamp": stamp}
        self.cluster.nodes[name]["spec"]["providerID"] = "aws:///a/i-1"

    async def _start(self, again: bool) -> None:
        """All pods that wait for a node get one, and run three seconds later."""
        for _ in range(self.workers):
            await self._bind(again)
        self._see_bindings()
        await self._time(3)
        await self._run(None)

    async def _bind(self, again: bool) -> None:
        """The scheduler finds a node for a pod, which may be one that was used before."""
        pending = [p for p in self._pods(live=True) if "nodeName" not in p["spec"]]
        pending = [p for p in pending if "deletionTimestamp" not in p["metadata"]]
        if not pending:
            return
        taken = {p["spec"].get("nodeName") for p in self._pods(live=True)}
        free = [name for name in self.cluster.nodes if name not in taken]
        if not (again and free):
            self.machines += 1
            free = [f"node-{self.machines}"]
            self._add_node(free[0])
        stamp = rfc3339(self.cluster.now, timespec="seconds")
        pending[0]["spec"]["nodeName"] = free[0]
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp}
        pending[0]["status"] = {"phase": "Pending", "conditions": [scheduled]}
        self.cluster._bump(pending[0])

    async def _run(self, _: None) -> None:
        """The kubelets start the containers of the pods that have a node."""
        for pod in self._pods(live=True):
            if "nodeName" in pod["spec"] and pod["status"]["phase"] == "Pending":
                running = {"running": {"startedAt": rfc3339(self.cluster.now, timespec="seconds")}}
                pod["status"] |= {"phase": "Running", "podIP": "10.0.0.1"}
                pod["status"]["containerStatuses"] = [{"name": "trainer", "state": running}]
                self.cluster._bump(pod)
                if _rank(pod) == 0:
                    self.world.trainers[_attempt(pod)] = Trainer()

    async def _time(self, seconds: int) -> None:
        self._collect_lost()
        for _ in range(seconds):
            self._tick()
            self.cluster.now += timedelta(seconds=1)
            self._kill_overdue()

    def _collect_lost(self) -> None:
        """Kubernetes' pod garbage collector fails the pods whose node does not exist."""
        lost = (
            pod for pod in self._pods() if pod["spec"].get("nodeName", "") not in ("", *self.cluster.nodes)
        )
        for pod in lost:
            if pod["status"]["phase"] in ("Pending", "Running"):
                stamp = rfc3339(self.cluster.now, timespec="seconds")
                reason = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
                pod["status"].setdefault("conditions", []).append(reason | {"lastTransitionTime": stamp})
                pod["status"]["phase"] = "Failed"
                pod["metadata"] |= {"deletionTimestamp": stamp, "deletionGracePeriodSeconds": 0}
                self.cluster._bump(pod)
                self.cluster._collect(pod["metadata"]["name"])

    def _kill_overdue(self) -> None:
        """No kubelet lets a deleted pod live beyond its grace period."""
        for pod in self._pods(live=True):
            deadline = pod["metadata"].get("deletionTimestamp")
            if deadline and "nodeName" in pod["spec"] and timestamp(deadline) <= self.cluster.now:
                self._end_pod(pod, "killed")
                self._see_bindings()

    def _tick(self) -> None:
        status = self.world.status
        running = {
            _attempt(pod): self._tick_of(_attempt(pod))
            for pod in self._pods(live=True)
            if _rank(pod) == 0 and pod["status"]["phase"] == "Running"
        }
        for attempt in (number for number, has in self.allocated.items() if has):
            starts = any(_rank(pod) == 0 for pod in self._pods(attempt, live=True))
            part = running.get(attempt, "startup" if starts else "other")
            self.clock.parts[part] += 1
            self.clock.allocated += 1
        over = status.terminal or status.phase == "Suspended" or not status.attempt
        if not any(self.allocated.values()) and not over:
            self.clock.parts["waiting"] += 1
            self.clock.unnoticed_wait += 1

    def _tick_of(self, attempt: int) -> str:
        pods = self._pods(attempt, live=True)
        together = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        return self.world.trainers[attempt].work(len(together) == self.workers)

    async def _end(self, how: str) -> None:
        """The oldest trainer ends, with what its kind of end says."""
        bound = [pod for pod in self._pods(live=True) if "nodeName" in pod["spec"]]
        if bound:
            self._end_pod(bound[0], how)

    def _end_pod(self, pod: Json, how: str) -> None:
        """Ends a pod; only a rank 0 that ran can leave a message, and loses what it had not saved."""
        name, ran = pod["metadata"]["name"], pod["status"]["phase"] == "Running"
        said = self._last_words(_attempt(pod), how) if ran and _rank(pod) == 0 else ""
        running = pod["status"]["containerStatuses"][0]["state"]["running"] if ran else {}
        self.cluster.end(name, CODES[how] if said else CODES["killed"], said)
        if ran and name in self.cluster.pods:
            pod["status"]["containerStatuses"][0]["state"]["terminated"] |= running
        self.clock.unnoticed_wait = 0

    def _last_words(self, attempt: int, how: str) -> str:
        trainer = self.world.trainers[attempt]
        if how in ("done", "saved"):
            trainer.seconds["unsaved"] = 0
        lost = trainer.seconds["unsaved"]
        self.clock.parts["productive"] -= lost
        self.clock.parts["rollback"] += lost
        if how == "killed":
            self.exact = False
            return ""
        return word(OUTCOMES[how], step=5, durableStep=5, timeSplit=trainer.split)

    async def _notice(self, _: None) -> None:
        """An operator that is up deletes the pod once its file has the deadline."""
        for pod in [p for p in self._pods(live=True) if "nodeName" in p["spec"]][:1]:
            self.cluster.give_notice(pod["spec"]["nodeName"], 100)
        if not self.down:
            await self._settle(None)
            await self._time(2)
            await self._settle(None)
            await self._time(2)

    async def _take(self, _: None) -> None:
        """A node is gone without a word; the operator sees it at once."""
        for pod in [p for p in self._pods(live=True) if "nodeName" in p["spec"]][:1]:
            self.exact = False
            self.cluster.nodes.pop(pod["spec"]["nodeName"])
            self._see_bindings()
            await self._settle(None)

    async def _suspend(self, wanted: bool) -> None:
        """The operator is up when people look; pods that lack a node, or their team, end at once."""
        await self._settle(None)
        job = self.cluster.jobs[KEY.name]
        job["spec"]["suspend"] = wanted
        job["metadata"]["generation"] += 1
        self.cluster._bump(job)
        await self._settle(None)
        for pod in self._pods(live=True) if wanted else ():
            if not self.allocated.get(_attempt(pod)) and pod["metadata"]["name"] in self.cluster.pods:
                self._end_pod(pod, "killed")
        self._see_bindings()
        await self._settle(None)

    # --- the operator ---
    async def _down(self, down: bool) -> None:
        self.down = down

    async def _forget(self, _: None) -> None:
        self.world._start()

    async def _crash(self, writes: int) -> None:
        self.cluster.crash_after_effect = writes % 2 == 0
        self.cluster.crash_at = self.cluster.writes + writes

    async def _settle(self, _: None) -> None:
        self._see_bindings()
        waited, status = self.clock.unnoticed_wait, self.world.status
        await self.world.settle()
        over = self.world.status.terminal or self.world.status.phase == "Suspended"
        if over and not (status.terminal or status.phase == "Suspended"):
            self.clock.parts["waiting"] -= waited  # it had ended before the operator saw it
        self.clock.unnoticed_wait = 0
        self._see_bindings()


def _attempt(pod: Json) -> int:
    return int(pod["metadata"]["labels"][ATTEMPT_LABEL])


def _rank(pod: Json) -> int:
    return int(pod["metadata"]["labels"].get(RANK_LABEL, 0))


# --- what must hold -------------------------------------------------------------------------------------
def check(status: Status, history: History) -> None:
    goodput, clock = status.goodput, history.clock
    if goodput is None:
        assert not clock.allocated
        return
    parts = {name: getattr(goodput, name) for name in PARTS}
    assert all(value >= 0 for value in parts.values()) and sum(parts.values()) == goodput.wanted
    wanted = sum(clock.parts.values())
    assert abs(goodput.wanted - wanted) <= Decimal(wanted) / 1000, (goodput, clock.parts)
    assert abs(goodput.allocated - clock.allocated) <= Decimal(clock.allocated) / 1000
    if history.exact:
        seen = {name: clock.parts[REPORTED.get(name, name)] for name in PARTS}
        both = ("startup", "waiting")  # of a rank that waits for others, the first part is not known
        for name in set(PARTS) - {*both}:
            assert parts[name] == seen[name], (name, parts, seen)
        assert sum(parts[name] for name in both) == sum(seen[name] for name in both)
    for shown in (goodput.runtime, goodput.scheduling, goodput.paid):
        assert shown == "Unknown" or 0 <= Decimal(shown.rstrip("%")) <= 100


def check_money(history: History) -> None:
    status, books = history.world.status, history.world.books
    cost = status.cost
    if cost is None or books == NO_BOOKS:  # it has forgotten them, and is down
        return
    if cost.update_time != books.ledger.time:  # it has forgotten them since they were last written
        return
    assert cost.lost_time is None
    assert cost.on_demand_ideal <= books.ledger.sums.on_demand_use
    assert cost.saving == "Unknown" or Decimal(cost.saving.rstrip("%")) <= 100
    if status.attempt <= KEPT_ATTEMPTS:
        for name in ("spent", "unknown_seconds"):
            assert sum(getattr(record, name) for record in status.attempts) == getattr(cost, name), name


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(STEPS, min_size=6, max_size=30),
    workers=st.sampled_from((1, 1, 2)),
)
@example(  # a wait that is counted before the suspension, and forgotten after it
    steps=[("start", False), ("end", "saved"), ("time", 40), ("suspend", True), ("forget", None)], workers=1
)
async def test_each_second_is_where_it_belongs(steps: list[tuple[str, Any]], workers: int) -> None:
    history = History(workers)
    await history.do("settle", None)
    for step, value in steps:
        await history.do(step, value)
        check_money(history)
    history.cluster.crash_at, history.down = None, False
    for pod in history._pods(live=True):  # so that all of them are accounted to their end
        if "nodeName" in pod["spec"]:
            history._end_pod(pod, "saved")
    await history.do("settle", None)
    if not history.world.status.terminal:
        await history.do("suspend", True)  # waiting alone is not written
    check(history.world.status, history)
    check_money(history)
