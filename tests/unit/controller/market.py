"""A market of nodes in which one Cheapest job lives, moment by moment, under the operator's `plan`.

Spot is there in given times only; on-demand comes after given waits. A trainer does a step each STEP
seconds, saves each 10 minutes, and saves at SIGTERM. A spot node goes with a notice of two minutes, or
without one: then the steps since the last save are lost. Each plan knows what the one before wrote, and
nothing else, as after a kill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from spottrain.contract import EXIT_CODE_OF, Outcome, Progress
from spottrain_operator.api.bookkeeping import NO_BOOKS, Bookkeeping
from spottrain_operator.api.node_pools import of_node
from spottrain_operator.api.observed import Ended, NodeView, Notice, PodView, Sample
from spottrain_operator.api.prices import PriceList
from spottrain_operator.api.training_job import Job, Status
from spottrain_operator.control.actions import Annotate, Create, Delete, Plan, Release
from spottrain_operator.control.plan import plan

from tests.builders import KEY, NOW, make_job, make_node, make_observed, raw_spec, word

STEP: Final = 10.0
INTERVAL: Final = 600.0
BOOT: Final = 90.0
SAVE: Final = 20.0
"""Seconds of a save at SIGTERM."""
POLL: Final = 300.0
POOLS: Final[list[dict[str, Any]]] = [
    {"name": "cheap", "platform": "AWS", "nodeSelector": {"node.kubernetes.io/instance-type": "g5"}},
    {"name": "sure", "platform": "AWS", "type": "OnDemand"}
    | {"nodeSelector": {"node.kubernetes.io/instance-type": "g5"}},
]
ENOUGH: Final = 5000
"""Plans; no job of these tests needs a quarter of them."""


@dataclass
class Node:
    """A pod of the job and the node that it gets."""

    view: PodView
    spot: bool
    granted: float | None
    """When it gets its node; None: never."""
    opened: float | None = None
    """When it could begin: it has its node, and no pod before it has the checkpoints."""
    start_step: int = 0
    stopped_at: float | None = None
    ended: Ended | None = None
    over_at: float | None = None
    lost: bool = False
    released: bool = False


@dataclass
class Market:
    spec: dict[str, Any]
    spot: Sequence[tuple[float, float]]
    """Times in which spot is there, in seconds: from, until."""
    prices: PriceList
    status: Status
    steps: int
    restart: float = 200.0
    waits: Sequence[float] = (600.0,)
    """Of each start on demand in turn."""
    notice: float = 0.0
    """Seconds from the notice of a spot node's end to that end."""
    cruel: float | None = None
    """Spot as it hurts most: each request is granted after so many seconds, and lost just before a save."""
    lag: float = 0.1
    """Seconds until the operator sees an event."""
    now: float = 0.0
    durable: int = 0
    pods: list[Node] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    """Capacity types of the attempts."""
    done_at: float | None = None
    told: list[Plan] = field(default_factory=list)
    books: Bookkeeping = NO_BOOKS

    # --- the world ---
    def _until(self, at: float) -> float:
        """When spot goes that is there at this time; the time itself where it is not."""
        if self.cruel is not None:
            return at + self.restart + INTERVAL - 0.1
        return next((end for begin, end in self.spot if begin <= at < end), at)

    def _grant(self, spot: bool) -> float | None:
        if not spot:
            number = sum(kind == "OnDemand" for kind in self.made) - 1
            return self.now + self.waits[number % len(self.waits)]
        if self.cruel is not None:
            return self.now + self.cruel
        times = (max(begin, self.now) + BOOT for begin, end in self.spot if end > max(begin, self.now) + BOOT)
        return next(times, None)

    def _step(self, node: Node, at: float) -> int:
        if node.opened is None:
            return 0
        trained = max(0.0, min(at, node.stopped_at or at) - node.opened - self.restart)
        return min(self.steps, node.start_step + int((trained + 1e-6) // STEP))

    def _saved(self, node: Node, at: float) -> int:
        """The step of the last save within the interval."""
        if node.opened is None:
            return 0
        since = max(0.0, at - node.opened - self.restart)
        return self._step(node, node.opened + self.restart + since // INTERVAL * INTERVAL)

    def _end(self, node: Node) -> float | None:
        """When the pod ends by itself."""
        if node.granted is None or node.ended is not None or node.lost:
            return None
        times = [math.inf]
        if node.opened is not None:
            times.append(node.opened + self.restart + (self.steps - node.start_step) * STEP)
        if node.spot:
            times.append(self._until(node.granted))
        if node.stopped_at is not None:
            times.append(node.stopped_at + SAVE)
        return min(times)

    def _happen(self) -> None:
        """What has come by now: nodes, ends, losses."""
        for node in self.pods:
            if node.granted is not None and node.granted <= self.now and not node.view.node:
                if node.view.deleted is not None:
                    node.granted = None
                    continue
                at = stamp(node.granted)
                where = f"node-{node.view.attempt}"
                node.view = replace(
                    node.view, node=where, phase="Running", bound=at, running_since=at, unschedulable=""
                )
            if node.view.node and node.opened is None and not self._earlier(node):
                node.opened, node.start_step = self._opens(node), self.durable
            end = self._end(node) if node.view.node else None
            if end is not None and end <= self.now:
                self._stop(node, end)
            elif node.view.node and node.ended is None and not node.lost:
                self.durable = max(self.durable, self._saved(node, self.now))

    def _earlier(self, node: Node) -> bool:
        """Whether a pod before this one still has the checkpoints."""
        others = (n for n in self.pods if n.view.attempt < node.view.attempt and n.view.node)
        return any(n.ended is None and not n.lost for n in others)

    def _opens(self, node: Node) -> float:
        assert node.granted is not None
        ends = (n.over_at for n in self.pods if n.view.attempt < node.view.attempt and n.over_at is not None)
        return max([node.granted, *ends])

    def _stop(self, node: Node, at: float) -> None:
        node.over_at = at
        step = self._step(node, at)
        if step >= self.steps:
            self.durable, self.done_at = self.steps, at
            self._report(node, Outcome.DONE, step, at)
        elif node.stopped_at is not None and at >= node.stopped_at + SAVE:
            self.durable = max(self.durable, step)
            self._report(node, Outcome.INTERRUPTED, step, at)
        else:
            self.durable = max(self.durable, self._saved(node, at))
            node.lost = True

    def _report(self, node: Node, outcome: Outcome, step: int, at: float) -> None:
        message = word(outcome, step=step, durableStep=step, totalSteps=self.steps, startStep=node.start_step)
        node.ended = Ended(exit_code=EXIT_CODE_OF[outcome], message=message, finished=stamp(at))
        phase = "Succeeded" if outcome is Outcome.DONE else "Failed"
        node.view = replace(node.view, phase=phase, running_since=None, ended=node.ended)

    # --- the operator ---
    def look(self) -> Plan:
        """One reconcile."""
        self._happen()
        job = self._job()
        nodes = tuple(self._nodes())
        seen = make_observed(
            *(node.view for node in self.pods),
            job=job,
            nodes=nodes,
            now=stamp(self.now),
            sample=self._sample(),
        )
        made = plan(replace(seen, prices=self.prices, books=self.books))
        self.books = made.books or self.books
        self.told.append(made)
        for action in (*made.before, *made.after):
            if isinstance(action, Delete):
                self._delete(action.pod)
            elif isinstance(action, Annotate):
                node = self._node_of(action.pod)
                node.view = replace(node.view, notice=self._notice(node))
        self.status = made.status or self.status
        for action in made.after:
            if isinstance(action, Create):
                self._create(action)
            elif isinstance(action, Release):
                self._node_of(action.pod).released = True
        self.pods = [
            n for n in self.pods if not (n.released and n.view.deleted is not None and self._over(n))
        ]
        return made

    def _over(self, node: Node) -> bool:
        return node.ended is not None or node.lost or not node.view.node

    def _job(self) -> Job:
        return make_job(self.spec, status=self.status)

    def _nodes(self) -> list[NodeView]:
        found = {True: "spot", False: "on-demand"}
        return [
            make_node(
                node.view.node,
                instance_type="g5",
                created=node.view.bound,
                found=of_node({"karpenter.sh/capacity-type": found[node.spot]}, "aws:///us-east-1a/i-1"),
                notice=self._notice(node),
            )
            for node in self.pods
            if node.view.node and not node.lost
        ]

    def _notice(self, node: Node) -> Notice | None:
        if not node.spot or not self.notice or node.granted is None:
            return None
        end = self._until(node.granted)
        begin = max(end - self.notice, node.granted)
        told = Notice(deadline=stamp(end), source="AWS spot/instance-action", seen=stamp(begin))
        return told if begin <= self.now else None

    def _sample(self) -> Sample | None:
        live = [n for n in self.pods if n.view.node and n.ended is None and not n.lost]
        node = next((n for n in live if n.view.attempt == self.status.attempt), None)
        if node is None:
            return None
        step = self._step(node, self.now)
        trains = node.opened is not None and self.now >= node.opened + self.restart
        progress = Progress(
            state="Training" if trains else "Starting",
            attempt=node.view.attempt,
            step=step if trains else 0,
            totalSteps=self.steps if trains else 0,
            startStep=node.start_step if trains else None,
            durableStep=self.durable if trains else None,
            etaSeconds=(self.steps - step) * STEP if trains else None,
            jobUID=KEY.uid,
        )
        return Sample(progress=progress, at=stamp(self.now))

    def _node_of(self, pod: PodView) -> Node:
        return next(node for node in self.pods if node.view.uid == pod.uid)

    def _delete(self, pod: PodView) -> None:
        node = self._node_of(pod)
        grace = pod.grace if pod.node else 0
        if node.view.deleted is None:
            node.view = replace(node.view, deleted=stamp(self.now + grace), deletion_grace=grace)
            node.stopped_at = self.now if node.view.node else None

    def _create(self, action: Create) -> None:
        record = self.status.record(action.attempt)
        assert record is not None
        self.made.append(record.capacity_type)
        meta = action.manifest["metadata"]
        view = PodView(
            name=meta["name"],
            namespace=KEY.namespace,
            uid=f"uid-{meta['name']}",
            job=KEY,
            resource_version=1,
            attempt=action.attempt,
            created=stamp(self.now),
            grace=action.manifest["spec"]["terminationGracePeriodSeconds"],
            holds_outcome=True,
            unschedulable="no nodes",
        )
        spot = record.capacity_type == "Spot"
        self.pods.append(Node(view=view, spot=spot, granted=self._grant(spot)))

    # --- time ---
    def run(self, until: float) -> None:
        """Lives on until the job has ended, or until a time."""
        for _ in range(ENOUGH):
            made = self.look()
            if self.status.terminal or self.now > until:
                return
            self.now = self._next(made)
        raise AssertionError(f"still living at {self.now} s after {ENOUGH} plans: {made.reason}")

    def _next(self, made: Plan) -> float:
        times = [self.now + POLL]
        if made.recheck_after is not None:
            times.append(self.now + made.recheck_after.total_seconds())
        if made.status is not None or made.after:
            times.append(self.now)  # its own writes come back as events
        for node in self.pods:
            if node.granted is not None and not node.view.node and node.view.deleted is None:
                times.append(node.granted)
            end = self._end(node) if node.view.node else None
            if end is not None:
                times.append(end)
            if node.view.node and node.spot and self.notice and node.granted is not None:
                times.append(self._until(node.granted) - self.notice)
            if node.opened is not None and self.now < node.opened + self.restart + STEP:
                times.append(node.opened + self.restart + STEP)  # the first step is polled soon
        return min(t for t in times if t >= self.now) + self.lag


def stamp(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def spec_of(deadline: float | None, **capacity: Any) -> dict[str, Any]:
    more: dict[str, Any] = {"type": "Cheapest", "pools": POOLS} | capacity
    if deadline is not None:
        more["cheapest"] = {"deadline": stamp(deadline).isoformat()} | more.get("cheapest", {})
    return raw_spec(capacity=more)
