"""Notices for a third of the nodes within a minute: `make bench-storm`.

    python -m bench.scale.storm --jobs 1000 --nodes 250

All jobs train, and their trainers answer the operator's polls. Then 30 % of the nodes get a notice, at random
moments of a minute: their Node and the pods on it are annotated as the agent does it. Each pod on them must
be deleted, and its job start again elsewhere and train.

Times are of the API server's audit log. The truth is taken from a watch of the pods: each attempt with a pod
on a node with a notice is one interruption of its job. The last line is JSON; exit code 1 where one of these
is not 0: duplicate_ranks (a pod that was created twice), charged_failures, unrecovered (jobs that do not
train in the end), miscounted (jobs whose status has another number of interruptions or attempts than there
were).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families
from spottrain_operator.agent import plan as agent
from spottrain_operator.agent.findings import NodeEnding
from spottrain_operator.names import AWS_SPOT_NOTICE, PLURAL, POD_SELECTOR, Cause

from bench.scale import world as worlds
from bench.scale.audit import Log, Write
from bench.scale.client import AGENT, MERGE, Api, Json, Refused, Timeout, each, seen, wait
from bench.scale.world import PODS, Size, World, jobs_path, load, say, training_job

NOTICE_SECONDS: Final = 120
"""What EC2 gives a spot instance."""
STATUS, NODE = 2, 6
"""Columns of the table of pods."""
PATIENCE: Final = 900.0


# --- the pods, and where they are -----------------------------------------------------------------------
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


# --- the cloud ------------------------------------------------------------------------------------------
async def give_notice(api: Api, node: str, there: Places) -> None:
    """What the agent writes when it reads a notice: the node, then the pods on it."""
    now = datetime.now(UTC)
    deadline = now + timedelta(seconds=NOTICE_SECONDS)
    cause = NodeEnding(source=AWS_SPOT_NOTICE, action="terminate", id=node, at=deadline)
    notice = agent.NodeNotice(cause=cause, deadline=deadline, seen=now)
    for _ in range(20):
        raw = await api.call("GET", f"/api/v1/nodes/{node}")
        known = agent.Node(
            resource_version=raw["metadata"]["resourceVersion"],
            taints=tuple(raw["spec"].get("taints") or ()),
            annotations=raw["metadata"].get("annotations") or {},
        )
        with suppress(Refused):  # written by kwok meanwhile
            patch = agent.node_patch(agent.Marks(notice=notice), known)
            await api.call("PATCH", f"/api/v1/nodes/{node}", patch, kind=MERGE)
            break
    else:
        raise Timeout(f"node {node} could not be annotated")
    for pod in there.on(node):
        view = agent.Pod(namespace=worlds.NAMESPACE, name=pod, uid=there.uids[pod])
        with suppress(Refused):  # gone
            await api.call("PATCH", f"{PODS}/{pod}", agent.pod_patch(notice, view), kind=MERGE)


async def strike(api: Api, nodes: Sequence[str], there: Places, seconds: float, random: Random) -> None:
    async def one(node: str) -> None:
        await asyncio.sleep(random.uniform(0, seconds))
        await give_notice(api, node, there)

    await asyncio.gather(*map(one, nodes))


# --- the judgement --------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds from each notice until the operator acted on a pod of that node."""

    deleted: tuple[float, ...]
    replaced: tuple[float, ...]


def times(writes: Iterable[Write], on: Mapping[str, str]) -> Times:
    """`on`: the node of each pod."""
    noticed: dict[str, float] = {}
    deleted: dict[Rank, float] = {}
    created: dict[Rank, float] = {}
    for write in writes:
        if write.made and write.agent == AGENT and (write.verb, write.resource) == ("patch", "nodes"):
            noticed.setdefault(write.name, write.answered)
        if write.operators and write.made and write.resource == "pods":
            into = {"delete": deleted, "create": created}.get(write.verb)
            if into is not None:
                into.setdefault(Rank.of(write.name), write.at if write.verb == "delete" else write.answered)
    hit = {Rank.of(pod): noticed[node] for pod, node in on.items() if node in noticed}
    after = {rank: created.get(Rank(rank.job, rank.attempt + 1, rank.rank)) for rank in hit}
    return Times(
        deleted=tuple(deleted[rank] - at for rank, at in hit.items() if rank in deleted),
        replaced=tuple(again - at for rank, at in hit.items() if (again := after[rank]) is not None),
    )


def duplicates(writes: Iterable[Write]) -> int:
    """Pods that were created more than once."""
    created = Counter(w.name for w in writes if w.made and (w.verb, w.resource) == ("create", "pods"))
    return sum(number > 1 for number in created.values())


def truth(on: Mapping[str, str], noticed: Iterable[str]) -> Counter[str]:
    """Interruptions by job: attempts that had a pod on a node with a notice."""
    doomed = set(noticed)
    attempts = {(r.job, r.attempt) for r in (Rank.of(pod) for pod, node in on.items() if node in doomed)}
    return Counter(job for job, _ in attempts)


def miscounted(jobs: Iterable[Json], interruptions: Mapping[str, int]) -> list[str]:
    found = []
    for job in jobs:
        name, status = job["metadata"]["name"], job.get("status") or {}
        wanted = interruptions.get(name, 0)
        if (status.get("interruptions", 0), status.get("attempt")) != (wanted, wanted + 1):
            found.append(name)
    return found


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest that so many are not above."""
    ordered = sorted(values)
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3) if ordered else None


def spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "greatest": quantile(values, 1)}


def counter(metrics: str, name: str, **labels: str) -> float:
    """Sum of a counter's samples with these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


# --- the play -------------------------------------------------------------------------------------------
def trains(job: Json) -> bool:
    """By its status: the trainer has answered, and so it would be replaced early."""
    status = job.get("status") or {}
    return status.get("phase") == "Running"


async def play(world: World, options: argparse.Namespace) -> dict[str, Any]:
    api, path, random = world.api, jobs_path(PLURAL), Random(options.seed)
    names = [f"storm-{number}" for number in range(options.jobs)]
    doomed = random.sample(world.nodes, int(options.share * len(world.nodes)))
    async with places(api) as there, seen(api, path, trains) as jobs:
        await each(lambda name: api.call("POST", path, training_job(name, options.workers)), names)
        count = lambda: f"{len(jobs.fitting)} of {len(names)} jobs train"  # noqa: E731
        await wait(count, lambda: len(jobs.fitting) == len(names), seconds=PATIENCE)
        say(f"{len(names)} jobs train; {len(doomed)} of {len(world.nodes)} nodes get their notice now")
        began, before = time.monotonic(), world.cpu()
        with closing(Log(world.server.audit_log)) as log:
            await strike(api, doomed, there, options.seconds, random)
            with suppress(Timeout):  # what has not recovered is counted
                await wait(count, lambda: _calm(there, jobs.fitting, doomed, len(names)), seconds=PATIENCE)
            recovered = time.monotonic() - began
            await asyncio.sleep(options.settle)  # what would still go wrong
            writes = log.writes()
        raws = (await api.call("GET", path))["items"]
        metrics = await world.operator.metrics(api.session)
        return judged(raws, writes, there, doomed, metrics) | {
            "seconds_until_all_train": round(recovered, 1),
            "operator_cpu_seconds": worlds.spent(before, world.cpu())["operator"],
        }


def _calm(there: Places, fitting: set[str], doomed: Sequence[str], jobs: int) -> bool:
    return len(fitting) == jobs and not any(there.nodes[pod] in doomed for pod in there.running)


def judged(
    raws: Sequence[Json], writes: Sequence[Write], there: Places, doomed: Sequence[str], metrics: str
) -> dict[str, Any]:
    found, wanted = times(writes, there.nodes), truth(there.nodes, doomed)
    wrong = miscounted(raws, wanted)
    if wrong:
        say(f"miscounted: {', '.join(wrong[:20])}")
    ended = counter(metrics, "spottrain_attempts_ended_total", cause=Cause.SPOT_NOTICE)
    return {
        "interruptions": sum(wanted.values()),
        "notice_to_deletion_s": spread(found.deleted),
        "notice_to_replacement_s": spread(found.replaced),
        "duplicate_ranks": duplicates(writes),
        "charged_failures": sum((raw.get("status") or {}).get("failures", 0) for raw in raws),
        "unrecovered": sum(not trains(raw) for raw in raws),
        "miscounted": len(wrong),
        "metric_minus_truth": ended - sum(wanted.values()),
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    at_begin = load()
    size = Size(nodes=options.nodes, zones=options.zones, stop_seconds=options.stop_seconds)
    async with worlds.world(size, profile=options.profile) as world:
        world.operator.start()
        await world.operator.ready(world.api.session)
        found = await play(world, options)
    about = {"jobs": options.jobs, "workers": options.workers, "nodes": options.nodes, "seed": options.seed}
    return about | found | {"load": [at_begin, load()]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1, help="of each job")
    parser.add_argument("--nodes", type=int, default=250, help="of 8 GPUs each")
    parser.add_argument("--zones", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.3, help="of the nodes that get a notice")
    parser.add_argument("--seconds", type=float, default=60, help="within which they get it")
    parser.add_argument("--stop-seconds", type=float, default=1, help="from DELETE to the trainer's end")
    parser.add_argument("--settle", type=float, default=15, help="seconds to wait once all jobs train again")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", type=Path, help="file for the operator's profile")
    figures = asyncio.run(run(parser.parse_args()))
    print(json.dumps(figures))
    bad = ("duplicate_ranks", "charged_failures", "unrecovered", "miscounted")
    return 1 if any(figures[name] for name in bad) else 0


if __name__ == "__main__":
    sys.exit(main())
