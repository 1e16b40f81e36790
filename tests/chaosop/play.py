"""One scene: its job, its nodes, what is done to them, and what is seen of it in the end. Run by stage.py."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, Final

from spottrain_operator.names import (
    HOSTNAME_LABEL,
    INSTANCE_TYPE_LABEL,
    OUTCOME_FINALIZER,
    ZONE_LABEL,
)

from tests.api.scene import job_body
from tests.chaosop.api import JSON, MERGE, Api, Json, job_path, node_path
from tests.chaosop.audit import MARKS, Mark, mark_query
from tests.chaosop.kubelet import Machine, Pod
from tests.chaosop.scene import Act, Blow, Scene
from tests.chaosop.strike import deal
from tests.chaosop.trainer import Attempt, Head
from tests.chaosop.truth import Deed

JOB: Final = "job"
POOL_LABEL: Final = "chaos.spottrain.dev/scene"
PATIENCE: Final = 150.0
"""Seconds in which nothing happens before a job is called stuck."""
SETTLED: Final = 60.0
"""Seconds for the pods of a job that is over to be let go."""
AFTERMATH: Final = 3.0
"""Seconds in which a job that is over is watched for signs of life."""
LOOK: Final = 0.05
SPARE: Final = 2
"""Nodes of each kind beyond one for each worker."""
WAITS: Final = Act(blow=Blow.DONE)
"""Of an attempt that is only a request for spot."""
PASSED_ON: Final = 2.0
"""Seconds after which an act is performed that an attempt before it was spared."""
CAPACITY: Final[dict[str, Json]] = {
    "SpotFirst": {"interruptions": 1, "pendingSeconds": 700, "returnAfterSeconds": 60},
    "Cheapest": {"pendingSeconds": 700},
}
"""The operator's clock jumps by up to 600 s: no pod waits for too long because of that."""
POOLS: Final = [{"name": "spot", "platform": "EKS"}, {"name": "other", "platform": "EKS", "type": "OnDemand"}]
MACHINE: Final = {"cpu": "8", "memory": "64Gi", "pods": "20", "nvidia.com/gpu": "1"}


class Stuck(Exception):
    """Says what did not come."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What there is to judge, beside the audit log."""

    deeds: tuple[Deed, ...]
    status: Json
    """Of the job when it was over, or was given up."""
    later: Json
    """After all has been deleted around it."""
    over_at: str = ""
    """RFC 3339, when it was seen to be over; "" where it never was."""
    stuck: tuple[str, ...] = ()
    """What did not come: the end of the job, or of its pods."""


@dataclass(kw_only=True)
class Play:
    scene: Scene
    api: Api
    say: Callable[[str], None]
    random: Random = field(init=False)
    head: Head = field(default_factory=Head)
    machines: dict[str, Machine] = field(default_factory=dict)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    pods: dict[str, Pod] = field(default_factory=dict)
    """By UID, those that exist."""
    struck: list[Attempt] = field(default_factory=list)
    job: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = Random(f"{self.scene.seed}/{self.scene.number}/play")
        self._acts: Iterator[Act] = iter(self.scene.acts)
        self._upcoming: Act | None = next(self._acts, None)
        self._current: Attempt | None = None
        """The last one that was more than a request for spot."""
        self._count = itertools.count(1)
        self._strikes: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._touched = time.monotonic()
        self._dry = False
        self._over = False

    # --- the story ---
    async def run(self) -> Seen:
        await self._set_up()
        over_at, stuck = "", list[str]()
        try:
            await self._ended()
            over_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            await self.until(self._let_go, "the finalizers of its pods to go", seconds=SETTLED)
        except Stuck as error:
            stuck.append(str(error))
        self._over = True
        status = self.status
        if over_at:
            await self._aftermath()
        seen_later = self.status
        try:
            await self._take_down()
        except Stuck as error:
            stuck.append(str(error))
        return Seen(deeds=self._deeds(), status=status, later=seen_later, over_at=over_at, stuck=tuple(stuck))

    async def _set_up(self) -> None:
        namespace = self.scene.namespace
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        await self.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace, "labels": labels}})
        for kind, name in (("serviceaccounts", "default"), ("configmaps", MARKS)):
            await self.api.call(
                "POST", f"/api/v1/namespaces/{namespace}/{kind}", {"metadata": {"name": name}}
            )
        self._dry = self._upcoming is not None and self._upcoming.blow is Blow.DELETED_EARLY
        machines = ["SPOT"] * (self.scene.workers + SPARE)
        if self.scene.policy.mixes:
            machines += ["ON_DEMAND"] * (self.scene.workers + SPARE)
        await asyncio.gather(*map(self._add_node, machines))
        body = {"apiVersion": "spottrain.io/v1alpha1", "kind": "TrainingJob"} | self._job()
        await self.api.call("POST", f"{job_path(namespace)}?fieldValidation=Strict", body)

    def _job(self) -> Json:
        scene = self.scene
        pod: dict[str, Any] = {
            "containers": [{"name": "trainer", "image": "example.com/train:1"}],
            "nodeSelector": {POOL_LABEL: scene.namespace},
            "terminationGracePeriodSeconds": scene.grace,
            "securityContext": {"runAsNonRoot": True},
        }
        policy = scene.policy
        budgets = {"maxFailures": policy.failures, "maxInterruptions": policy.interruptions}
        more: Json = {"workers": scene.workers} if scene.workers > 1 else {}
        return job_body(
            JOB,
            template={"spec": pod},
            failurePolicy=budgets | {"backoffSeconds": policy.backoff},
            capacity=self._capacity(),
            **more,
        )

    def _capacity(self) -> Json:
        policy = self.scene.policy
        if not policy.mixes:
            return {"type": policy.capacity}
        rules = dict(CAPACITY[policy.capacity])
        if policy.deadline:
            at = datetime.now(UTC) + timedelta(seconds=policy.deadline)
            rules["deadline"] = at.strftime("%Y-%m-%dT%H:%M:%SZ")
        name = policy.capacity[0].lower() + policy.capacity[1:]
        return {"type": policy.capacity, "pools": POOLS, name: rules}

    async def _ended(self) -> None:
        self._touched = time.monotonic()
        while not self.phase_over:
            self._check()
            if time.monotonic() - self._touched > PATIENCE and not self._waits_for_its_start():
                now = f"phase {self.status.get('phase')}, attempt {self.status.get('attempt')}"
                raise Stuck(f"nothing has happened for {PATIENCE:.0f} s: {now}")
            await asyncio.sleep(LOOK)

    def _waits_for_its_start(self) -> bool:
        """Whether a backoff goes on: an operator whose clock was ahead has set its end late."""
        at = self.status.get("nextStartTime")
        end = timedelta(seconds=PATIENCE)
        return at is not None and datetime.now(UTC) < datetime.fromisoformat(at) + end

    def _let_go(self) -> bool:
        return not any(
            OUTCOME_FINALIZER in (p.raw["metadata"].get("finalizers") or ()) for p in self.pods.values()
        )

    async def _aftermath(self) -> None:
        """Terminal is terminal, whatever is deleted around it, and whatever the spec says by now."""
        for pod in list(self.pods.values()):
            await self.api.delete_pod(pod.raw, grace=0)
        for machine in list(self.machines.values())[:2]:
            await self.remove_node(machine)
        patch: Json = {"metadata": {"annotations": {"a": "b"}}}
        if self.scene.edited:
            policy = {"maxFailures": 50, "maxInterruptions": 500, "backoffSeconds": 0}
            patch["spec"] = {"failurePolicy": policy}
        await self.api.try_call("PATCH", job_path(self.scene.namespace, JOB), patch, kind=MERGE)
        await asyncio.sleep(AFTERMATH)

    async def _take_down(self) -> None:
        self._over = True
        for task in tuple(self._tasks):
            task.cancel()
        await self.api.try_call("DELETE", job_path(self.scene.namespace, JOB))
        for pod in list(self.pods.values()):  # nobody plays the garbage collector
            await self.api.delete_pod(pod.raw, grace=0)
        try:
            await self.until(lambda: not self.pods, "the pods of the deleted job to go", seconds=SETTLED)
        finally:
            for machine in list(self.machines.values()):
                await machine.power_off()
                await self.api.try_call("DELETE", node_path(machine.name))

    # --- what is seen ---
    @property
    def status(self) -> Json:
        return dict(self.job.get("status") or {})

    @property
    def phase_over(self) -> bool:
        ends = ("Succeeded", "Failed")
        conditions = self.status.get("conditions") or ()
        return any(c["type"] in ends and c["status"] == "True" for c in conditions)

    def saw_job(self, kind: str, raw: Json) -> None:
        if kind != "DELETED":
            self.job = raw
            self.say(f"job: {summary(self.status)}")
            self._deal_acts()

    def saw_pod(self, kind: str, raw: Json) -> None:
        uid = raw["metadata"]["uid"]
        pod = self.pods.get(uid)
        if kind == "DELETED":
            self.pods.pop(uid, None)
            if pod is not None:
                self.say(f"{pod.name}: its object is gone")
                self.spawn(pod.kill())
        elif pod is not None:
            pod.update(raw)
        else:
            self._begin_pod(raw)

    def _begin_pod(self, raw: Json) -> None:
        number = int(raw["metadata"]["labels"]["spottrain.io/attempt"])
        pod = Pod(
            raw=raw,
            api=self.api,
            attempt=self.attempts.get(number) or self._begin(number),
            machines=self.machines,
            random=self.random,
            say=self.say,
            spawn=self.spawn,
            address=self._address(),
        )
        self.say(f"{pod.name}: made")
        self.pods[raw["metadata"]["uid"]] = pod
        self._touched = time.monotonic()
        self._deal_acts()
        pod.start()

    def _address(self) -> str:
        """On the loopback: /progress is really asked, and nothing leaves the machine."""
        high, low = divmod(self.scene.number, 256)
        return f"127.{16 + high % 200}.{low}.{next(self._count) % 250 + 1}"

    # --- attempts and acts ---
    def _begin(self, number: int) -> Attempt:
        attempt = Attempt(
            number=number,
            workers=self.scene.workers,
            act=WAITS,
            head=self.head,
            mark=self._mark,
            did=self._did,
        )
        self.attempts[number] = attempt
        return attempt

    def _deal_acts(self) -> None:
        """Deals the next act to the job's attempt; what comes after that is a request for spot."""
        before, attempt = self._current, self.attempts.get(self.status.get("attempt", 0))
        if attempt is None or attempt is before:
            return
        if before is not None and not before.struck:  # it ended by nobody's doing; its act is for this one
            attempt.act = replace(before.act, after=min(before.act.after, PASSED_ON))
            self._strikes[before.number].cancel()
        else:
            attempt.act = self._upcoming or Act(blow=Blow.DONE)
            self._upcoming = next(self._acts, None)
        if attempt.act.blow is Blow.REJECTED and attempt.trainers:  # its pods run already
            attempt.act = replace(attempt.act, blow=Blow.DELETED)
        self.say(f"attempt {attempt.number}: {attempt.act}")
        self._current = attempt
        self._strikes[attempt.number] = self.spawn(self._strike(attempt))

    async def _strike(self, attempt: Attempt) -> None:
        early = attempt.act.blow is Blow.DELETED_EARLY
        dry = self._upcoming is not None and self._upcoming.blow is Blow.DELETED_EARLY
        if not early and (dry or self._dry):
            await self.until(
                lambda: self._bound(attempt) or not dry, "its pods to have nodes", seconds=PATIENCE
            )
            await self.cordon(dry)
        try:
            await deal(self, attempt)
        except Stuck as error:
            self.say(f"attempt {attempt.number}: not struck: {error}")

    def _bound(self, attempt: Attempt) -> bool:
        pods = self.pods_of(attempt)
        return len(pods) == self.scene.workers and all(p.node for p in pods)

    def _did(self, attempt: Attempt) -> None:
        self._touched = time.monotonic()
        self.say(f"attempt {attempt.number}: {attempt.act.blow}")
        self.struck.append(attempt)

    def _deeds(self) -> tuple[Deed, ...]:
        # One that is stopped for a move may say that it is done, and was not struck.
        done = [a for a in self.attempts.values() if a.told_done and not a.struck]
        made = (Deed(attempt=a.number, blow=a.act.blow, finished=a.told_done) for a in (*self.struck, *done))
        return tuple(sorted(made, key=lambda d: d.attempt))

    async def pod_of(self, attempt: Attempt) -> Pod:
        """The pod that the act is to hit."""

        def look() -> Pod | None:
            return next((p for p in self.pods_of(attempt) if p.rank == attempt.act.rank), None)

        await self.until(lambda: look() is not None, "the pod that is to be hit", seconds=PATIENCE)
        found = look()
        assert found is not None
        return found

    def has_seen(self, attempt: Attempt) -> bool:
        """Whether the job's status tells that all pods of the attempt have been seen."""
        records = (r for r in self.status.get("attempts") or () if r["number"] == attempt.number)
        return any(record.get("createdWorkers", 0) >= self.scene.workers for record in records)

    def pods_of(self, attempt: Attempt) -> list[Pod]:
        return [p for p in self.pods.values() if p.attempt is attempt]

    async def predecessors_word(self, attempt: Attempt) -> None:
        """While an earlier attempt may still say that it is done, nothing is done to this one."""
        earlier = [a for a in self.struck if a.act.may_finish and a.number < attempt.number]
        await self.until(lambda: not any(a.trainers for a in earlier), "an earlier attempt's end")
        if self.head.state == "done":
            await asyncio.Event().wait()

    async def _mark(self, mark: Mark, attempt: int) -> None:
        path = f"/api/v1/namespaces/{self.scene.namespace}/configmaps/{MARKS}?{mark_query(mark, attempt)}"
        await self.api.call("PATCH", path, {"data": {"last": f"{mark}-{attempt}"}}, kind=MERGE)
        self.say(f"attempt {attempt}: {mark}")

    # --- nodes ---
    async def _add_node(self, capacity: str) -> None:
        name = f"{self.scene.namespace}-n{next(self._count)}"
        labels = {
            HOSTNAME_LABEL: name,
            ZONE_LABEL: "zone-a",
            INSTANCE_TYPE_LABEL: "local.gpu",
            "eks.amazonaws.com/capacityType": capacity,
            POOL_LABEL: self.scene.namespace,
        }
        node = {
            "metadata": {"name": name, "labels": labels},
            "spec": {"unschedulable": self._dry},
            "status": {"capacity": MACHINE, "allocatable": MACHINE},
        }
        self.machines[name] = Machine(name=name, capacity=capacity)
        await self.api.call("POST", "/api/v1/nodes", node, kind=JSON)
        while not _ready(await self.api.try_call("GET", node_path(name)) or {}):
            await asyncio.sleep(LOOK)
        # The node lifecycle controller's part.
        await self.api.try_call("PATCH", node_path(name), {"spec": {"taints": None}}, kind=MERGE)

    def grow_soon(self, capacity: str) -> None:
        """The autoscaler's part."""
        self.spawn(self._grow(self.random.uniform(0.1, 1.5), capacity))

    async def _grow(self, delay: float, capacity: str) -> None:
        await asyncio.sleep(delay)
        if not self._over:
            await self._add_node(capacity)

    async def remove_node(self, machine: Machine) -> None:
        """The machine stops, and its Node object goes."""
        was_on = machine.on
        await machine.power_off()
        await self.api.try_call("DELETE", node_path(machine.name))
        self.machines.pop(machine.name, None)
        self.say(f"node {machine.name} is no more")
        if was_on:
            self.grow_soon(machine.capacity)

    async def cordon(self, closed: bool) -> None:
        self._dry = closed
        for name in list(self.machines):
            await self.api.try_call("PATCH", node_path(name), {"spec": {"unschedulable": closed}}, kind=MERGE)

    # --- helpers ---
    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Beside the story; an error in it ends the story."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"{self.scene.name}: the world itself has failed") from self._error

    async def until(self, look: Callable[[], bool], what: str, *, seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not look():
            self._check()
            if time.monotonic() > end:
                raise Stuck(f"waited {seconds:.0f} s in vain for {what}")
            await asyncio.sleep(LOOK)


def summary(status: Json) -> str:
    counters = (f"{name} {status.get(name, 0)}" for name in ("attempt", "failures", "interruptions"))
    return f"{status.get('phase')}, {', '.join(counters)}"


def _ready(node: Json) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
