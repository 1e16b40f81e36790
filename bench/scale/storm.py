"""Notices for a third of the nodes within a minute.

All jobs train, and their trainers answer the operator's polls. Then 30 % of the nodes get a notice, at random
moments of a minute: their Node and the pods on it are annotated as the agent does it. Each pod on them must
be deleted, and its job start again elsewhere and train.

Times are of the API server's audit log. The truth is taken from a watch of the pods: each attempt with a pod
on a node with a notice is one interruption of its job. A job has recovered when its status is at an attempt
after these interruptions and says Running with all ranks ready, and the API server has these pods running on
nodes without a notice. After `--settle` seconds it is counted. The last line is JSON; exit code 1 where one
of these is not 0: duplicate_ranks (created more than once), charged_failures, unrecovered, miscounted (jobs
whose status has another number of interruptions or attempts than there were). `further_attempts`: of gangs of
which only a part got nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from spottrain_operator.names import PLURAL, Cause

from bench.scale import options as shared
from bench.scale import world as worlds
from bench.scale.audit import Log, Write
from bench.scale.client import AGENT, Api, Json, Timeout, each, seen, wait
from bench.scale.cloud import Places, Rank, give_notice, places
from bench.scale.metrics import value
from bench.scale.world import World, jobs_path, load, say, says_running, training_job, trains
from bench.spread import percentiles

PATIENCE: Final = 900.0
BAD: Final = ("duplicate_ranks", "charged_failures", "unrecovered", "miscounted")
LOOK: Final = 1.0
SHOWN: Final = 10
"""Jobs of each mistake that are printed."""
AFTER: Final = 15.0
"""Seconds in which what has recovered could still go wrong."""


async def strike(api: Api, nodes: Sequence[str], there: Places, seconds: float, random: Random) -> None:
    async def one(node: str) -> None:
        await asyncio.sleep(random.uniform(0, seconds))
        await give_notice(api, node, there)

    await asyncio.gather(*map(one, nodes))


# --- the judgement --------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds from the first notice of an attempt until the operator acted on the pod of that node."""

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
    hit = first_notices(noticed, on)
    after = {rank: created.get(Rank(rank.job, rank.attempt + 1, rank.rank)) for rank in hit}
    return Times(
        deleted=tuple(deleted[rank] - at for rank, at in hit.items() if rank in deleted),
        replaced=tuple(again - at for rank, at in hit.items() if (again := after[rank]) is not None),
    )


def first_notices(noticed: Mapping[str, float], on: Mapping[str, str]) -> dict[Rank, float]:
    """Of each attempt the rank whose node was the first to get a notice: it ends the whole attempt."""
    first: dict[tuple[str, int], tuple[float, Rank]] = {}
    for pod, node in on.items():
        if node in noticed:
            rank = Rank.of(pod)
            found, attempt = (noticed[node], rank), (rank.job, rank.attempt)
            first[attempt] = min(first.get(attempt, found), found)
    return {rank: at for at, rank in first.values()}


def duplicates(writes: Iterable[Write]) -> int:
    """Ranks of an attempt that were created more than once."""
    creates = (w for w in writes if w.operators and w.made and (w.verb, w.resource) == ("create", "pods"))
    return sum(number > 1 for number in Counter(Rank.of(write.name) for write in creates).values())


def truth(on: Mapping[str, str], noticed: Collection[str]) -> Counter[str]:
    """Interruptions by job: attempts that had a pod on a node with a notice."""
    attempts = {(r.job, r.attempt) for r in (Rank.of(pod) for pod, node in on.items() if node in noticed)}
    return Counter(job for job, _ in attempts)


def miscounted(jobs: Iterable[Json], interruptions: Mapping[str, int]) -> list[str]:
    """A gang may have had further attempts, because half of it got no nodes; other jobs may not."""
    found = []
    for job in jobs:
        name, status = job["metadata"]["name"], job.get("status") or {}
        wanted, gang = interruptions.get(name, 0), job["spec"]["workers"] > 1
        more = status.get("attempt", 0) - wanted - 1
        if status.get("interruptions", 0) != wanted or more < 0 or (more and not gang):
            found.append(name)
    return found


def unrecovered(jobs: Iterable[Json], there: Places, noticed: Collection[str]) -> list[str]:
    """Jobs that do not run in an attempt after their interruptions, by status or by their pods."""
    interruptions = truth(there.nodes, noticed)
    running = {Rank.of(pod) for pod in there.running if there.nodes[pod] not in noticed}
    found = []
    for job in jobs:
        name, workers = job["metadata"]["name"], job["spec"]["workers"]
        attempt = (job.get("status") or {}).get("attempt", 0)
        ranks = {Rank(name, attempt, rank) for rank in range(workers)}
        if attempt <= interruptions[name] or not says_running(job) or not ranks <= running:
            found.append(name)
    return found


def told(job: Json, interruptions: Mapping[str, int]) -> str:
    """What the status of a job says, for people."""
    name, status = job["metadata"]["name"], job.get("status") or {}
    ends = [record.get("cause", "") for record in status.get("attempts") or ()]
    untrue = [c for c in status.get("conditions") or () if c["status"] != "True"]
    reasons = ", ".join(f"{c['type']}={c['status']} {c['reason']} ({c.get('message', '')})" for c in untrue)
    return (
        f"{name} had {interruptions.get(name, 0)} interruptions and says {status.get('interruptions', 0)}; "
        f"attempt {status.get('attempt')} of ends {ends}, ready {status.get('ready')}; {reasons}"
    )


# --- the play -------------------------------------------------------------------------------------------
async def play(world: World, options: argparse.Namespace) -> dict[str, Any]:
    api, path, random = world.api, jobs_path(PLURAL), Random(options.seed)
    names = [f"storm-{number}" for number in range(options.jobs)]
    doomed = set(random.sample(world.nodes, int(options.share * len(world.nodes))))
    async with places(api) as there, seen(api, path, trains) as jobs:
        with closing(Log(world.server.audit_log)) as log:
            await each(lambda name: api.call("POST", path, training_job(name, options.workers)), names)
            count = lambda: f"{len(jobs.fitting)} of {len(names)} jobs train"  # noqa: E731
            await wait(count, lambda: len(jobs.fitting) == len(names), seconds=PATIENCE)
            say(f"{len(names)} jobs train; {len(doomed)} of {len(world.nodes)} nodes get their notice now")
            began, before = time.monotonic(), world.cpu()
            await strike(api, sorted(doomed), there, options.seconds, random)
            with suppress(Timeout):  # what has not recovered is counted
                await wait(
                    count,
                    lambda: not unrecovered(jobs.live.values(), there, doomed),
                    seconds=options.settle,
                    every=LOOK,
                )
            recovered = time.monotonic() - began
            await asyncio.sleep(AFTER)
            writes = log.writes()
        raws = (await api.call("GET", path))["items"]
        metrics = await world.operator.metrics(api.session)
        return judged(raws, writes, there, doomed, metrics) | {
            "seconds_until_recovered": round(recovered, 1),
            "operator_cpu_seconds": worlds.spent(before, world.cpu())["operator"],
        }


def judged(
    raws: Sequence[Json], writes: Sequence[Write], there: Places, doomed: Collection[str], metrics: str
) -> dict[str, Any]:
    """`raws`: the jobs as the API server lists them."""
    found, wanted = times(writes, there.nodes), truth(there.nodes, doomed)
    lost, wrong = unrecovered(raws, there, doomed), miscounted(raws, wanted)
    for what, names in (("unrecovered", lost), ("miscounted", wrong)):
        for raw in [raw for raw in raws if raw["metadata"]["name"] in names][:SHOWN]:
            say(f"{what}: {told(raw, wanted)}")
    ended = value(metrics, "spottrain_attempts_ended_total", cause=Cause.SPOT_NOTICE)
    return {
        "interruptions": sum(wanted.values()),
        "notice_to_deletion_s": percentiles(found.deleted),
        "notice_to_replacement_s": percentiles(found.replaced),
        "duplicate_ranks": duplicates(writes),
        "charged_failures": sum((raw.get("status") or {}).get("failures", 0) for raw in raws),
        "unrecovered": len(lost),
        "miscounted": len(wrong),
        "further_attempts": sum((raw.get("status") or {}).get("attempt", 0) - 1 for raw in raws)
        - sum(wanted.values()),
        "metric_minus_truth": ended - sum(wanted.values()),
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    at_begin = load()
    async with worlds.world(shared.size(options)) as world:
        world.operator.start()
        await world.operator.ready(world.api.session)
        found = await play(world, options)
    about = {"jobs": options.jobs, "workers": options.workers, "nodes": options.nodes, "seed": options.seed}
    return about | found | {"load": [at_begin, load()]}


def arguments() -> argparse.ArgumentParser:
    parser = shared.parser(
        __doc__, jobs=1000, workers=1, nodes=250, gpus=8, zones=3, stop_seconds=1.0, seed=1
    )
    shared.add(parser, "share", float, 0.3, "of the nodes that get a notice")
    shared.add(parser, "seconds", float, 60.0, "within which they get it")
    shared.add(parser, "settle", float, 120.0, "seconds after it in which all jobs must train again")
    return parser
