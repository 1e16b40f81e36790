"""Many jobs at once, beside Kubernetes' own Job controller: `make bench-scale`.

    python -m bench.scale.burst --rounds 5
    python -m bench.scale.burst --rounds 1 --only gangs --jobs 50        # a quick probe
    python -m bench.scale.burst --rounds 1 --only gangs --profile FILE   # the operator under cProfile

In turn TrainingJobs and Indexed Jobs of the same pods are applied, and deleted once all run. Measured is the
time until every pod is Running and every TrainingJob says so (`ready` 8/8, condition Running); then the time
until no pod and no job is left. Three shapes: `gangs` (125 x 8), `singles` (1,000 x 1), `gang` (1 x 1,024).

`floor` is a bare asyncio client that makes, in the same run and without any logic, the writes that the
operator was seen to make for each job. The last line is JSON; ratios are medians of rounds, each to the round
beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from spottrain_operator.names import API_VERSION, FIELD_MANAGER, JOB_LABEL, KIND, PLURAL

from bench.scale import world as worlds
from bench.scale.audit import Log, Write, by_verb
from bench.scale.client import (
    APPLY,
    AT_ONCE,
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
from bench.scale.world import NAMESPACE, PODS, Size, World, built_in_job, jobs_path, load, say, training_job

PATIENCE: Final = 900.0
STATUS: Final = f"patch {PLURAL}/status"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    name: str
    jobs: int
    workers: int

    @property
    def pods(self) -> int:
        return self.jobs * self.workers


SHAPES: Final = (
    Shape(name="gangs", jobs=125, workers=8),
    Shape(name="singles", jobs=1000, workers=1),
    Shape(name="gang", jobs=1, workers=1024),
)


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
def training_says(workers: int) -> Callable[[Json], bool]:
    def says(job: Json) -> bool:
        status = job.get("status") or {}
        runs = any(c["type"] == "Running" and c["status"] == "True" for c in status.get("conditions") or ())
        return runs and status.get("ready") == f"{workers}/{workers}"

    return says


def job_says(workers: int) -> Callable[[Json], bool]:
    return lambda job: (job.get("status") or {}).get("ready") == workers


async def play(world: World, shape: Shape, kind: str, part: str) -> Round:
    """Applies and deletes them, of the kind `trainingjobs` or `jobs`."""
    body, says = (training_job, training_says) if kind == PLURAL else (built_in_job, job_says)
    path, api = jobs_path(kind), world.api
    names = [f"{shape.name}-{part}-{number}" for number in range(shape.jobs)]
    async with (
        seen(api, PODS, POD_RUNNING, table=True) as pods,
        seen(api, path, says(shape.workers)) as jobs,
    ):
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
    pods: tuple[Json, ...]
    service: Json | None
    status: Json


async def sample(api: Api, shape: Shape) -> Sample:
    """By a job that is made for it, and deleted."""
    name, path = f"sample-{shape.name}", jobs_path(PLURAL)
    await api.call("POST", path, training_job(name, shape.workers))
    async with (
        seen(api, path, training_says(shape.workers)) as jobs,
        seen(api, PODS, POD_RUNNING, table=True) as there,
    ):
        await wait(lambda: f"{name} does not run", lambda: name in jobs.fitting, seconds=PATIENCE)
        job = await api.call("GET", f"{path}/{name}")
        pods = (await api.call("GET", f"{PODS}?labelSelector={JOB_LABEL}={name}"))["items"]
        services = (await api.call("GET", f"/api/v1/namespaces/{NAMESPACE}/services"))["items"]
        await api.delete(f"{path}/{name}")
        # The operator must have released the pods before it ends.
        gone = lambda: not jobs.live and not there.live  # noqa: E731
        await wait(lambda: f"{name} is still there", gone, seconds=PATIENCE)
    of = [s for s in services if s["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]]
    return Sample(
        name=name,
        pods=tuple(map(_as_new, pods)),
        service=_as_new(of[0]) if of else None,
        status=job["status"],
    )


def _as_new(found: Json) -> Json:
    meta = {k: found["metadata"][k] for k in ("name", "labels", "annotations") if k in found["metadata"]}
    spec = {k: v for k, v in found["spec"].items() if k not in ("nodeName", "clusterIP", "clusterIPs")}
    return {"metadata": meta, "spec": spec}


async def floor(world: World, shape: Shape, made: Sample, status_writes: int, part: str) -> float:
    """Seconds until all pods run and all statuses are written; nobody else is there to write."""
    names = [f"{shape.name}-{part}-{number}" for number in range(shape.jobs)]
    path, api = jobs_path(PLURAL), world.api
    async with seen(api, PODS, POD_RUNNING, table=True) as pods:
        began = time.monotonic()

        async def one(name: str) -> None:
            await bare.call("POST", path, training_job(name, shape.workers))
            await _write_as_the_operator(bare, name, shape, made, status_writes, pods)

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:
            bare = Api(kube=api.kube, session=session)
            await asyncio.gather(*map(one, names))
        seconds = time.monotonic() - began
        await each(lambda name: api.delete(f"{path}/{name}"), names)
        await each(lambda name: api.delete(f"{PODS}/{name}"), sorted(pods.live))
        await wait(lambda: f"{len(pods.live)} pods are left", lambda: not pods.live, seconds=PATIENCE)
    services = f"/api/v1/namespaces/{NAMESPACE}/services"
    await api.delete(services)
    return seconds


async def _write_as_the_operator(
    api: Api, name: str, shape: Shape, made: Sample, status_writes: int, pods: Seen
) -> None:
    bodies = [renamed(body, made.name, name) for body in made.pods]
    await api.call("POST", f"{PODS}?dryRun=All&fieldManager={FIELD_MANAGER}", bodies[0])

    async def write_status() -> None:
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}}
        query = f"fieldManager={FIELD_MANAGER}&force=true"
        target = f"{jobs_path(PLURAL)}/{name}/status?{query}"
        await api.call("PATCH", target, body | {"status": made.status}, kind=APPLY)

    await write_status()
    if made.service is not None:
        service = renamed(made.service, made.name, name)
        await api.call("POST", f"/api/v1/namespaces/{NAMESPACE}/services", service)
    await asyncio.gather(*(api.call("POST", PODS, body) for body in bodies))
    for _ in range(status_writes - 2):
        await write_status()
    own = {body["metadata"]["name"] for body in bodies}
    await wait(lambda: f"pods of {name} do not run", lambda: own <= pods.fitting, seconds=PATIENCE)
    await write_status()


def renamed(body: Json, old: str, new: str) -> Json:
    found: Json = json.loads(json.dumps(body).replace(old, new))
    return found


# --- figures ------------------------------------------------------------------------------------------
def median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def figures(shape: Shape, ours: Sequence[Round], theirs: Sequence[Round]) -> dict[str, Any]:
    pairs = list(zip(ours, theirs, strict=True))
    writes = [write for each_round in ours for write in each_round.writes]
    made = shape.jobs * len(ours)
    return {
        "ratio": median(a.said / b.running for a, b in pairs),
        "ratio_both_say_so": median(a.said / b.said for a, b in pairs),
        "delete_ratio": median(a.deleted / b.deleted for a, b in pairs),
        "status_writes_per_job": round(
            sum(w.resource == f"{PLURAL}/status" and w.made for w in writes) / made, 2
        ),
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
                f"{shape.name} {shape.jobs} x {shape.workers}, round {number}, {kind}: running "
                f"{found.running:.1f} s, said {found.said:.1f} s, deleted {found.deleted:.1f} s; "
                f"processor {found.cpu}"
            )
    return figures(shape, ours, theirs)


async def measure_floor(
    world: World, shape: Shape, found: dict[str, Any], made: Sample, rounds: int
) -> dict[str, Any]:
    writes = max(2, round(found["status_writes_per_job"]))
    floors, theirs = [], []
    for number in range(1, rounds + 1):
        try:
            floors.append(await floor(world, shape, made, writes, f"f{number}"))
        except (Refused, Timeout) as error:  # the figures that are there already must not be lost
            say(f"{shape.name}: the bare client failed: {error}")
            return {"floor_ratio": None}
        theirs.append((await play(world, shape, "jobs", f"g{number}")).running)
        say(f"{shape.name}, floor {number}: {floors[-1]:.1f} s beside {theirs[-1]:.1f} s")
    ratios = [a / b for a, b in zip(floors, theirs, strict=True)]
    return {"floor_ratio": median(ratios), "floor_seconds": median(floors)}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    chosen = [s for s in SHAPES if s.name in options.only]
    shapes = [smaller(shape, options) for shape in chosen]
    size = Size(nodes=options.nodes, gpus=options.gpus, zones=options.zones)
    at_begin = load()
    result: dict[str, Any] = {}
    async with worlds.world(size, profile=options.profile) as world:
        world.operator.start()
        await world.operator.ready(world.api.session)
        for shape in shapes:
            rounds = options.rounds if shape is shapes[0] else min(options.rounds, options.other_rounds)
            found = await measure(world, shape, rounds)
            result[shape.name] = found
        if options.floors:
            made = [await sample(world.api, shape) for shape in shapes]
            world.operator.end()
            for shape, of in zip(shapes, made, strict=True):
                result[shape.name] |= await measure_floor(
                    world, shape, result[shape.name], of, options.floors
                )
    first: dict[str, Any] = result.pop(shapes[0].name)
    about = {"jobs": shapes[0].jobs, "workers": shapes[0].workers, "rounds": options.rounds}
    where = {"nodes": size.nodes, "zones": size.zones, "load": [at_begin, load()]}
    return first | result | about | where


def smaller(shape: Shape, options: argparse.Namespace) -> Shape:
    if shape.name != "gangs":
        return shape
    return Shape(name=shape.name, jobs=options.jobs, workers=options.workers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--other-rounds", type=int, default=3, help="of all shapes but the first, at most")
    parser.add_argument("--floors", type=int, default=2, help="rounds of the bare client")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--jobs", type=int, default=SHAPES[0].jobs, help="of the shape `gangs`")
    parser.add_argument("--workers", type=int, default=SHAPES[0].workers, help="of each of these jobs")
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--zones", type=int, default=1, help="over which the nodes are spread, at most 6")
    parser.add_argument("--profile", type=Path, help="file for the operator's profile")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
