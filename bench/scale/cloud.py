"""The pods and their nodes as the API server has them, and the notices that a cloud gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from spottrain_operator.agent import plan as agent
from spottrain_operator.agent.findings import Finding
from spottrain_operator.names import AWS_SPOT_NOTICE, POD_SELECTOR

from bench.scale.client import MERGE, Api, Refused, Timeout
from bench.scale.world import PODS

NOTICE_SECONDS: Final = 120
"""What EC2 gives a spot instance."""
STATUS, NODE = 2, 6
"""Columns of the table of pods."""


@dataclass(frozen=True, order=True, slots=True)
class Rank:
    """A pod by what its name says."""

    job: str
    attempt: int
    rank: int

    @classmethod
    def of(cls, pod: str) -> Rank:
        job, _, attempt, rank = pod.rsplit("-", 3)
        return cls(job, int(attempt), int(rank))


@dataclass(kw_only=True)
class Places:
    """Which pods there were on which node, and which of them run."""

    nodes: dict[str, str] = field(default_factory=dict)
    """By pod, also of those that are gone."""
    uids: dict[str, str] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)

    async def follow(self, api: Api) -> None:
        async for kind, row in api.watch(f"{PODS}?labelSelector={POD_SELECTOR}", table=True):
            meta, cells = row["object"]["metadata"], row["cells"]
            name = meta["name"]
            if cells[NODE] not in ("", "<none>"):
                self.nodes[name] = cells[NODE]
            self.uids[name] = meta["uid"]
            runs = kind != "DELETED" and cells[STATUS] == "Running"
            (self.running.add if runs else self.running.discard)(name)

    def on(self, node: str) -> list[str]:
        return [pod for pod in self.running if self.nodes.get(pod) == node]


@asynccontextmanager
async def places(api: Api) -> AsyncIterator[Places]:
    found = Places()
    task = asyncio.create_task(found.follow(api))
    try:
        yield found
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def give_notice(api: Api, node: str, there: Places) -> None:
    """What the agent writes when it reads a notice: the node, then the pods on it."""
    now = datetime.now(UTC)
    deadline = now + timedelta(seconds=NOTICE_SECONDS)
    cause = Finding(source=AWS_SPOT_NOTICE, action="terminate", id=node, at=deadline)
    notice = agent.NodeNotice(cause=cause, deadline=deadline, seen=now)
    for _ in range(20):
        raw = await api.call("GET", f"/api/v1/nodes/{node}")
        with suppress(Refused):  # written by kwok meanwhile
            patch = agent.node_patch(agent.Marks(notice=notice), raw)
            await api.call("PATCH", f"/api/v1/nodes/{node}", patch, kind=MERGE)
            break
    else:
        raise Timeout(f"node {node} could not be annotated")
    for pod in there.on(node):
        view = {"metadata": {"uid": there.uids[pod]}, "status": {}}
        with suppress(Refused):  # gone
            await api.call("PATCH", f"{PODS}/{pod}", agent.pod_patch(notice, view), kind=MERGE)
