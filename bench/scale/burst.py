"""Many jobs at once, beside Kubernetes' own Job controller.

In turn TrainingJobs and Indexed Jobs of the same pods are applied, and deleted once all run. Measured is the
time until every pod is Running and every TrainingJob says so (`ready` 8/8, condition Running); then the time
until no pod and no job is left.

`floor` is a bare asyncio client that makes, in the same run and without any logic, the writes that the
operator was seen to make for each job; `writes_per_job` and `floor_writes_per_job` are both sides' by the
API server's audit log. The last line is JSON; ratios are medians of rounds, each to the round beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from spottrain_operator.names import FIELD_MANAGER, JOB_LABEL, PLURAL

from bench.scale import options as shared
from bench.scale import world as worlds
from bench.scale.audit import Log, Write, by_verb
from bench.scale.client import (
    AT_ONCE,
    MERGE,
    POD_RUNNING,
    Api,
    Json,
    Refused,
    Seen,
    Timeout,
    each,
    seen,
    wait,
)
from bench.scale.world import (
    NAMESPACE,
    PODS,
    World,
    built_in_job,
    job_says_running,
    jobs_path,
    load,
    say,
    says_running,
    training_job,
)

PATIENCE: Final = 900.0
BAD: Final = ()
SERVICES, EVENTS = (f"/api/v1/namespaces/{NAMESPACE}/{kind}" for kind in ("services", "events"))
FLOOR: Final = "bench-floor"
"""User agent of the bare client."""
AS_MANAGER: Final = f"fieldManager={FIELD_MANAGER}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    jobs: int
    workers: int

    @property
    def pods(self) -> int:
        return self.jobs * self.workers


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    running: float
    """Seconds from the first POST until all pods are Running."""
    said: float
    """The same until every job's status says so as well."""
    deleted: float
    """Seconds from the first DELETE until no pod and no job is left."""
    cpu: dict[str, float]
    writes: tuple[Write, ...]
    """The operator's, until every job said so."""


# --- one round ----------------------------------------------------------------------------------------
async def play(world: World, shape: Shape, kind: str, part: str) -> Round:
    """Applies and deletes them, of the kind `trainingjobs` or `jobs`."""
    ours = kind == PLURAL
    body, says = (training_job, says_running) if ours else (built_in_job, job_says_running)
    path, api = jobs_path(kind), world.api
    names = names_of(shape, part)
    async with seen(api, PODS, POD_RUNNING, table=True) as pods, seen(api, path, says) as jobs:
        with closing(Log(world.server.audit_log)) as log:
            before, began = world.cpu(), time.monotonic()
            await each(lambda name: api.call("POST", path, body(name, shape.workers)), names)
            await _all_there(shape, pods, jobs)
            cpu = worlds.spent(before, world.cpu())
            writes = tuple(w for w in log.writes() if w.operators)
        deleting = time.monotonic()
        await each(lambda name: api.delete(f"{path}/{name}"), names)
        left = lambda: f"{len(pods.live)} pods and {len(jobs.live)} {kind} are left"  # noqa: E731
        await wait(left, lambda: not pods.live and not jobs.live, seconds=PATIENCE)
        return Round(
            running=max(pods.reached.values()) - began,
            said=max(*pods.reached.values(), *jobs.reached.values()) - began,
            deleted=time.monotonic() - deleting,
            cpu=cpu,
            writes=writes,
        )


def names_of(shape: Shape, part: str) -> list[str]:
    return [f"job-{part}-{number}" for number in range(shape.jobs)]


async def _all_there(shape: Shape, pods: Seen, jobs: Seen) -> None:
    def lacks() -> str:
        return (
            f"{len(pods.fitting)} of {shape.pods} pods run, {len(jobs.fitting)} of {shape.jobs} jobs say so"
        )

    def there() -> bool:
        return len(pods.fitting) == shape.pods and len(jobs.reached) == shape.jobs

    await wait(lacks, there, seconds=PATIENCE)


# --- the floor ----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What the operator made for one job: bodies to POST again under other names."""

    name: str
    uid: str
    pods: tuple[Json, ...]
    services: tuple[Json, ...]
    events: tuple[Json, ...]
    status: Json


async def sample(api: Api, workers: int) -> Sample:
    """By a job that is made for it, and deleted."""
    name, path = "job-sample", jobs_path(PLURAL)
    await api.call("POST", path, training_job(name, workers))
    async with seen(api, path, says_running) as jobs, seen(api, PODS, POD_RUNNING, table=True) as there:
        await wait(lambda: f"{name} does not run", lambda: name in jobs.fitting, seconds=PATIENCE)
        job = await api.call("GET", f"{path}/{name}")
        uid = job["metadata"]["uid"]
        pods = (await api.call("GET", f"{PODS}?labelSelector={JOB_LABEL}={name}"))["items"]
        services = (await api.call("GET", SERVICES))["items"]
        events = (await api.call("GET", f"{EVENTS}?fieldSelector=involvedObject.uid={uid}"))["items"]
        await api.delete(f"{path}/{name}")
        # The operator must have released the pods before it ends.
        gone = lambda: not jobs.live and not there.live  # noqa: E731
        await wait(lambda: f"{name} is still there", gone, seconds=PATIENCE)
    own = (s for s in services if s["metadata"]["ownerReferences"][0]["uid"] == uid)
    return Sample(
        name=name,
        uid=uid,
        pods=tuple(map(_as_new, pods)),
        services=tuple(map(_as_new, own)),
        events=tuple(map(_event_as_new, events)),
        status=job["status"],
    )


def _as_new(found: Json) -> Json:
    meta = {k: found["metadata"][k] for k in ("name", "labels", "annotations") if k in found["metadata"]}
    spec = {k: v for k, v in found["spec"].items() if k not in ("nodeName", "clusterIP", "clusterIPs")}
    return {"metadata": meta, "spec": spec}


def _event_as_new(found: Json) -> Json:
    return found | {"metadata": {"name": found["metadata"]["name"]}}


def renamed(body: Json, words: Mapping[str, str]) -> Json:
    """With other words, wherever they stand."""
    text = json.dumps(body)
    for old, new in words.items():
        text = text.replace(old, new)
    found: Json = json.loads(text)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    seconds: float
    """Until all pods run and all statuses are written."""
    writes: tuple[Write, ...]


async def floor(world: World, shape: Shape, made: Sample, status_writes: int, part: str) -> Floor:
    """Nobody else is there to write."""
    path, api, names = jobs_path(PLURAL), world.api, names_of(shape, part)
    connector = aiohttp.TCPConnector(limit=AT_ONCE)
    async with seen(api, PODS, POD_RUNNING, table=True) as pods:
        with closing(Log(world.server.audit_log)) as log:
            async with aiohttp.ClientSession(connector=connector, headers={"User-Agent": FLOOR}) as session:
                bare = Api(kube=api.kube, session=session)
                began = time.monotonic()

                async def one(name: str) -> None:
                    await bare.call("POST", path, training_job(name, shape.workers))
                    await _write_as_the_operator(bare, name, made, status_writes, pods)

                await asyncio.gather(*map(one, names))
                seconds = time.monotonic() - began
            # A job is applied in the other rounds as well, and is not one of the operator's writes.
            writes = tuple(w for w in log.writes() if w.agent == FLOOR and w.resource != PLURAL)
        await each(lambda name: api.delete(f"{path}/{name}"), names)
        await each(lambda name: api.delete(f"{PODS}/{name}"), sorted(pods.live))
        await wait(lambda: f"{len(pods.live)} pods are left", lambda: not pods.live, seconds=PATIENCE)
    await api.delete(SERVICES)
    return Floor(seconds=seconds, writes=writes)


async def _write_as_the_operator(api: Api, name: str, made: Sample, status_writes: int, pods: Seen) -> None:
    """The writes for one job, whose pods are made once all that precedes them is there."""
    # A UID of its own: else the Service of each job would have the pods of all.
    words = {made.name: name, made.uid: str(uuid.uuid4())}
    lists = {part: made.status[part] for part in ("conditions", "attempts")}
    statuses = (
        (lists if number else dict(made.status)) | {"readyWorkers": number} for number in range(status_writes)
    )

    async def write_status() -> None:
        """Writes all of it at first, and then what changes: else the API server would store nothing."""
        target = f"{jobs_path(PLURAL)}/{name}/status?{AS_MANAGER}&fieldValidation=Strict"
        await api.call("PATCH", target, {"status": next(statuses)}, kind=MERGE)

    async def post(path: str, body: Json, query: str = f"{AS_MANAGER}&fieldValidation=Strict") -> None:
        await api.call("POST", f"{path}?{query}", renamed(body, words))

    await write_status()
    for service in made.services:
        await post(SERVICES, service)
    await asyncio.gather(*(post(PODS, body) for body in made.pods))
    for event in made.events:
        await post(EVENTS, event, "")
    for _ in range(status_writes - 2):
        await write_status()
    own = {renamed(body["metadata"], words)["name"] for body in made.pods}
    await wait(lambda: f"pods of {name} do not run", lambda: own <= pods.fitting, seconds=PATIENCE)
    await write_status()


# --- figures ------------------------------------------------------------------------------------------
def median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def figures(shape: Shape, ours: Sequence[Round], theirs: Sequence[Round]) -> dict[str, Any]:
    pairs = list(zip(ours, theirs, strict=True))
    writes = [write for each_round in ours for write in each_round.writes]
    made = shape.jobs * len(ours)
    statuses = sum(w.resource == f"{PLURAL}/status" and w.made for w in writes)
    return {
        "ratio": median(a.said / b.running for a, b in pairs),
        "ratio_both_say_so": median(a.said / b.said for a, b in pairs),
        "delete_ratio": median(a.deleted / b.deleted for a, b in pairs),
        "status_writes_per_job": round(statuses / made, 2),
        "seconds": median(a.said for a in ours),
        "seconds_until_running": median(a.running for a in ours),
        "job_controller_seconds": median(b.running for b in theirs),
        "delete_seconds": median(a.deleted for a in ours),
        "job_controller_delete_seconds": median(b.deleted for b in theirs),
        "operator_cpu_seconds": median(a.cpu.get("operator", 0.0) for a in ours),
        "controller_manager_cpu_seconds": median(b.cpu.get("kube-controller", 0.0) for b in theirs),
        "writes_per_job": by_verb(writes, made),
        "ratios": [round(a.said / b.running, 2) for a, b in pairs],
        "delete_ratios": [round(a.deleted / b.deleted, 2) for a, b in pairs],
    }


async def measure(world: World, shape: Shape, rounds: int) -> dict[str, Any]:
    ours: list[Round] = []
    theirs: list[Round] = []
    for number in range(1, rounds + 1):
        for kind, into in ((PLURAL, ours), ("jobs", theirs)):
            found = await play(world, shape, kind, f"{'o' if kind == PLURAL else 't'}{number}")
            into.append(found)
            say(
                f"{shape.jobs} x {shape.workers}, round {number}, {kind}: running {found.running:.1f} s, "
                f"said {found.said:.1f} s, deleted {found.deleted:.1f} s; processor {found.cpu}"
            )
    return figures(shape, ours, theirs)


async def measure_floor(
    world: World, shape: Shape, found: dict[str, Any], made: Sample, rounds: int
) -> dict[str, Any]:
    floors, theirs = [], []
    for number in range(1, rounds + 1):
        try:
            floors.append(
                await floor(world, shape, made, max(2, round(found["status_writes_per_job"])), f"f{number}")
            )
        except (Refused, Timeout) as error:  # the figures that are there already must not be lost
            say(f"the bare client failed: {error}")
            return {"floor_ratio": None}
        theirs.append((await play(world, shape, "jobs", f"g{number}")).running)
        say(f"floor {number}: {floors[-1].seconds:.1f} s beside {theirs[-1]:.1f} s")
    writes = by_verb([write for each_floor in floors for write in each_floor.writes], shape.jobs * rounds)
    say(f"writes for each job: of the operator {found['writes_per_job']}, of the bare client {writes}")
    return {
        "floor_ratio": median(a.seconds / b for a, b in zip(floors, theirs, strict=True)),
        "floor_seconds": median(each_floor.seconds for each_floor in floors),
        "floor_writes_per_job": writes,
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    shape, at_begin = Shape(jobs=options.jobs, workers=options.workers), load()
    async with worlds.world(shared.size(options)) as world:
        world.operator.start()
        await world.operator.ready(world.api.session)
        found = await measure(world, shape, options.rounds)
        if options.floors:
            made = await sample(world.api, shape.workers)
            world.operator.end()
            found |= await measure_floor(world, shape, found, made, options.floors)
    about = {"jobs": shape.jobs, "workers": shape.workers, "rounds": options.rounds}
    return found | about | {"nodes": options.nodes, "zones": options.zones, "load": [at_begin, load()]}


def arguments() -> argparse.ArgumentParser:
    parser = shared.parser(__doc__, jobs=125, workers=8, nodes=200, gpus=8, zones=1)
    shared.add(parser, "rounds", int, 5, "in turn")
    shared.add(parser, "floors", int, 2, "rounds of the bare client")
    return parser
