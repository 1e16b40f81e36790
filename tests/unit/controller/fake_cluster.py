"""An API server in memory, a kubelet, a crash at a chosen write; and beside them the operator's process.

The rules that the operator leans on: unique names, resourceVersion and uid preconditions, finalizers that
hold a deleted object, the CEL rules of the status. Every write is counted; the `crash_at`-th is carried
out or not (both are crashes to survive), and then `Crash` is raised, as a SIGKILL ends the process there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast

from spottrain.contract import Env, Progress
from spottrain_operator.api.bookkeeping import NO_BOOKS, Bookkeeping
from spottrain_operator.api.job_defaults import NO_DEFAULTS, JobDefaults
from spottrain_operator.api.kueue import OFF, WORKLOADS, WorkloadView
from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import Sample
from spottrain_operator.api.training_job import JobKey, Status
from spottrain_operator.api.validation import parse_job
from spottrain_operator.api.views import pod_view
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.control.apply import AT_ONCE
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.informer import Informer, Informers
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.observe import Sources
from spottrain_operator.control.reconcile import Reconciler
from spottrain_operator.control.workloads import KIND
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import Cluster, Page
from spottrain_operator.names import (
    ATTEMPT_LABEL,
    DEFAULTS_CONFIG_MAP,
    JOB_UID_LABEL,
    OUTCOME_FINALIZER,
    PLURAL,
    QUEUE_LABEL,
    pod_name,
)

from tests.builders import KEY, NOW, POOL, raw_job, raw_spec

Json = dict[str, Any]
Objects = list[Json]
T = TypeVar("T")


def copied(value: T) -> T:
    """A copy of what came as JSON; `copy.deepcopy` takes ten times as long."""
    return cast(T, json.loads(json.dumps(value)))


class Crash(BaseException):
    """The operator's process ends here."""


class FakeCluster(Cluster):
    def __init__(self) -> None:
        self.now: datetime = NOW
        self.jobs: dict[str, Json] = {}
        self.pods: dict[str, Json] = {}
        self.nodes: dict[str, Json] = {}
        self.node_pools: list[Json] | None = None
        """Karpenter's. None: it is not installed."""
        self.posted: list[str] = []
        self.events: list[Json] = []
        self.told_of: dict[str, list[Json]] = {}
        """Events about pods, by UID."""
        self.others: dict[str, Json] = {}
        self.serves: dict[str, Json] = {}
        """What is served beside, by group or `group/version`."""
        self.config_maps_read = 0
        self.writes = 0
        self.crash_at: int | None = None
        self.crash_after_effect = True
        self._version = itertools.count(100)

    # --- the world ---
    def add_job(self, spec: Json | None = None, **meta: Any) -> None:
        self.jobs[KEY.name] = raw_job(spec, resourceVersion=str(next(self._version)), **meta)

    def add_node(self, name: str) -> None:
        conditions = [{"type": "Ready", "status": "True"}]
        meta = {"name": name, "uid": name, "resourceVersion": str(next(self._version)), "labels": {}}
        self.nodes[name] = {"metadata": meta, "spec": {}, "status": {"conditions": conditions}}

    def give_notice(self, node: str, seconds: float) -> None:
        notes = {
            "spottrain.io/termination-deadline": rfc3339(self.now + timedelta(seconds=seconds)),
            "spottrain.io/termination-source": "AWS spot/instance-action",
            "spottrain.io/notice-seen": rfc3339(self.now),
        }
        self.nodes[node]["metadata"]["annotations"] = notes
        self._bump(self.nodes[node])

    def bind(self, name: str, node: str) -> None:
        pod = self.pods[name]
        pod["spec"]["nodeName"] = node
        state = {
            "name": "trainer",
            "state": {"running": {"startedAt": rfc3339(self.now, timespec="seconds")}},
        }
        pod["status"] = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [state]}
        self._bump(pod)

    def end(self, name: str, code: int, message: str = "") -> None:
        """The kubelet reports the trainer's end, and lets go of a pod that is to be deleted."""
        pod = self.pods[name]
        when = rfc3339(self.now, timespec="seconds")
        ended = {"exitCode": code, "message": message, "finishedAt": when}
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        pod["status"]["containerStatuses"] = [{"name": "trainer", "state": {"terminated": ended}}]
        self._bump(pod)
        self._collect(name)

    def admit(self, flavor: str) -> None:
        """Kueue admits the job's Workload."""
        assignment = {"name": "main", "flavors": {"nvidia.com/gpu": flavor}, "count": 1}
        admission = {"clusterQueue": "all", "podSetAssignments": [assignment]}
        self.others[f"resourceflavors/{flavor}"] = {"spec": {"nodeLabels": {"flavor": flavor}}}
        said = {"QuotaReserved": "True", "Admitted": "True", "Evicted": "False"}
        self._kueue_says(said, "Admitted", {"admission": admission})

    def evict(self) -> None:
        """Kueue asks for the quota of the job's Workload."""
        self._kueue_says({"Evicted": "True"}, "Preempted", {})

    def _kueue_says(self, said: dict[str, str], reason: str, more: Json) -> None:
        workload = self.workload
        assert workload is not None
        known = {c["type"]: c for c in workload.get("status", {}).get("conditions", ())}
        known |= {kind: {"type": kind, "status": value, "reason": reason} for kind, value in said.items()}
        workload["status"] = workload.get("status", {}) | more | {"conditions": list(known.values())}
        self._bump(workload)

    @property
    def workload(self) -> Json | None:
        return next((raw for name, raw in self.others.items() if name.startswith("workloads/")), None)

    def live(self) -> list[str]:
        return [
            n
            for n, p in self.pods.items()
            if p.get("status", {}).get("phase", "Pending") in ("Pending", "Running")
        ]

    def attempts_alive(self) -> dict[str, list[str]]:
        alive: dict[str, list[str]] = {}
        for name in self.live():
            alive.setdefault(self.pods[name]["metadata"]["labels"][ATTEMPT_LABEL], []).append(name)
        return alive

    # --- reads ---
    async def get(self, kind: str, name: str, namespace: str = "", *, seconds: float = 0.0) -> Json | None:
        """Each by a method of its own, so that a test can refuse it: get_pod, get_job, get_object..."""
        if kind in ("pods", "nodes", "configmaps", "persistentvolumeclaims"):
            found: Json | None = await getattr(self, f"get_{kind.removesuffix('s')}")(name)
            return found
        return await (self.get_job(name) if kind == PLURAL else self.get_object(kind, name))

    async def get_job(self, name: str) -> Json | None:
        return copied(self.jobs.get(name))

    async def get_node(self, name: str) -> Json | None:
        return copied(self.nodes.get(name))

    async def get_pod(self, name: str) -> Json | None:
        return copied(self.pods.get(name))

    async def get_persistentvolumeclaim(self, name: str) -> Json | None:
        return await self.get_object("persistentvolumeclaims", name)

    async def get_configmap(self, name: str) -> Json | None:
        self.config_maps_read += name == DEFAULTS_CONFIG_MAP
        return await self.get_object("configmaps", name)

    async def get_object(self, kind: str, name: str) -> Json | None:
        return copied(self.others.get(f"{kind.rpartition('/')[2]}/{name}"))

    async def list(
        self, kind: str, namespace: str, *, labels: str = "", fields: str = "", limit: int = 0
    ) -> list[Json]:
        label, uid = (labels or fields).split("=")
        if kind == "events":
            return await self.pod_events(uid)
        assert (kind, label) == ("pods", JOB_UID_LABEL)
        return await self.list_pods(uid)

    async def pod_events(self, uid: str) -> Objects:
        return copied(self.told_of.get(uid, []))

    async def list_pods(self, uid: str) -> Objects:
        return [copied(p) for p in self.pods.values() if p["metadata"]["labels"][JOB_UID_LABEL] == uid]

    async def pages(self, kind: str, namespace: str) -> AsyncIterator[Page]:
        if kind == "nodepools" and self.node_pools is None:
            raise ApiError(404, "the server could not find the requested resource")
        tables: dict[str, Any] = {"pods": self.pods, "nodes": self.nodes, PLURAL: self.jobs}
        tables[WORKLOADS] = {name: raw for name, raw in self.others.items() if name.startswith("workloads/")}
        tables["nodepools"] = {pool["metadata"]["name"]: pool for pool in self.node_pools or ()}
        items = [copied(raw) for raw in tables[kind].values()]
        yield Page(items=items, version=str(next(self._version)))

    async def watch(self, kind: str, namespace: str, version: str) -> AsyncGenerator[Json]:
        raise NotImplementedError("nothing is watched here: World.look lists")
        yield

    # --- writes ---
    async def create(self, kind: str, manifest: Json, *, dry_run: bool = False, seconds: float = 0.0) -> Json:
        if kind == "events":
            self.events.append(manifest)
            return manifest
        if kind == "pods":
            return await (self.dry_run_pod(manifest) if dry_run else self.create_pod(manifest))
        return await self.create_object(kind, manifest)

    async def patch(
        self,
        kind: str,
        name: str,
        namespace: str,
        change: Json,
        *,
        uid: str = "",
        version: int | None = None,
        form: str = "",
        subresource: str = "",
        seconds: float = 0.0,
    ) -> Json:
        if kind == "configmaps":
            return await self.write_config_map(change)
        if kind == "pods":
            annotations = change["metadata"].get("annotations")
            if annotations is not None:
                return await self.annotate_pod(name, uid=uid, annotations=annotations)
            return await self.release_pod(name, uid=uid)
        if kind == PLURAL and subresource:
            assert version is not None
            return await self.write_status(name, uid=uid, version=version, change=change["status"])
        if kind == PLURAL:
            return await self.hold_job(name, finalizers=change["metadata"]["finalizers"])
        return await self.patch_object_status(kind, name, change)

    async def delete(
        self,
        kind: str,
        name: str,
        namespace: str,
        *,
        uid: str,
        version: int | None = None,
        grace: int | None = None,
    ) -> None:
        if kind == "pods":
            await self.delete_pod(name, uid=uid, version=version, grace=grace)
        elif kind == PLURAL:
            with self._write():
                self.jobs.pop(name, None)
        else:
            await self.delete_object(kind, name, uid=uid)

    async def dry_run_pod(self, manifest: Json) -> Json:
        return manifest

    async def create_pod(self, manifest: Json) -> Json:
        name = manifest["metadata"]["name"]
        with self._write():
            if name in self.pods:
                raise ApiError(409, f'pods "{name}" already exists')
            pod = copied(manifest)
            self._check_gate(pod)
            uid = f"{name}-{len(self.posted)}"
            stamp = {"uid": uid, "creationTimestamp": rfc3339(self.now, timespec="seconds")}
            pod["metadata"] |= stamp | {"resourceVersion": str(next(self._version))}
            pod["status"] = {"phase": "Pending"}
            self.pods[name] = pod
            self.posted.append(name)
        return copied(self.pods[name])

    async def write_config_map(self, manifest: Json) -> Json:
        with self._write():
            self.others[f"configmaps/{manifest['metadata']['name']}"] = copied(manifest)
        return manifest

    async def delete_pod(self, name: str, *, uid: str, version: int | None, grace: int | None) -> None:
        with self._write():
            pod = self._pod(name, uid)
            if version not in (None, int(pod["metadata"]["resourceVersion"])):
                raise ApiError(409, f"pod {name} has changed")
            ended = pod["status"]["phase"] in ("Succeeded", "Failed") or "nodeName" not in pod["spec"]
            seconds = 0 if ended else pod["spec"]["terminationGracePeriodSeconds"] if grace is None else grace
            deadline = rfc3339(self.now + timedelta(seconds=seconds), timespec="seconds")
            if (
                "deletionTimestamp" not in pod["metadata"]
                or seconds < pod["metadata"]["deletionGracePeriodSeconds"]
            ):
                pod["metadata"] |= {"deletionTimestamp": deadline, "deletionGracePeriodSeconds": seconds}
            self._bump(pod)
            self._collect(name)

    async def annotate_pod(self, name: str, *, uid: str, annotations: Json) -> Json:
        with self._write():
            pod = self._pod(name, uid)
            pod["metadata"].setdefault("annotations", {}).update(annotations)
            self._bump(pod)
        return copied(pod)

    async def release_pod(self, name: str, *, uid: str) -> Json:
        with self._write():
            pod = self._pod(name, uid)
            finalizers = pod["metadata"].get("finalizers", [])
            pod["metadata"]["finalizers"] = [f for f in finalizers if f != OUTCOME_FINALIZER]
            self._bump(pod)
            self._collect(name)
        return copied(pod)

    async def write_status(self, name: str, *, uid: str, version: int, change: Json) -> Json:
        with self._write():
            job = self.jobs.get(name)
            if job is None:
                raise ApiError(404, "gone")
            if job["metadata"]["uid"] != uid or int(job["metadata"]["resourceVersion"]) != version:
                raise ApiError(409, "the object has been modified")
            status = merged(job.get("status", {}), copied(change))
            self._check_rules(job.get("status", {}), status)
            job["status"] = status
            self._bump(job)
        return copied(job)

    async def hold_job(self, name: str, *, finalizers: Sequence[str]) -> Json:
        with self._write():
            job = self.jobs[name]
            job["metadata"]["finalizers"] = finalizers
            self._bump(job)
        return copied(job)

    async def create_object(self, kind: str, manifest: Json) -> Json:
        with self._write():
            name = f"{kind.rpartition('/')[2]}/{manifest['metadata']['name']}"
            if name in self.others:
                raise ApiError(409, f"{name} already exists")
            made = copied(manifest)
            uid = {"uid": f"{name}-{self.writes}", "resourceVersion": str(next(self._version))}
            made["metadata"] = {"generation": 1} | made["metadata"] | uid
            self.others[name] = made
        return copied(made)

    async def patch_object_status(self, kind: str, name: str, patch: Json) -> Json:
        with self._write():
            found = self.others.get(f"{kind.rpartition('/')[2]}/{name}")
            if found is None:
                raise ApiError(404, "gone")
            meta, wanted = found["metadata"], patch["metadata"]
            if (meta["uid"], meta["resourceVersion"]) != (wanted["uid"], wanted["resourceVersion"]):
                raise ApiError(409, "the object has been modified")
            status = found.get("status", {}) | copied(patch["status"])
            found["status"] = {k: v for k, v in status.items() if v is not None}
            self._bump(found)
        return copied(found)

    async def delete_object(self, kind: str, name: str, *, uid: str) -> None:
        with self._write():
            key = f"{kind.rpartition('/')[2]}/{name}"
            if key not in self.others:
                raise ApiError(404, "gone")
            if self.others[key]["metadata"]["uid"] != uid:
                raise ApiError(409, "uid precondition failed")
            del self.others[key]

    async def served(self, group: str) -> Json | None:
        return self.serves.get(group)

    # --- rules ---
    def _check_rules(self, old: Json, new: Json) -> None:
        for counter in ("attempt", "failures", "interruptions"):
            if new.get(counter, 0) < old.get(counter, 0):
                raise ApiError(422, f"{counter} never goes down")
        if "defaults" in old and new.get("defaults") != old["defaults"]:
            raise ApiError(422, "defaults stay as they were when the job was accepted")
        if lost := _ends(old) - _ends(new):
            raise ApiError(422, f"{lost} stay True once they are")

    def _check_gate(self, pod: Json) -> None:
        """A new pod waits for every earlier one that may still write; without end for one that trains on."""
        gate: Json = next((e for e in pod["spec"]["containers"][0]["env"] if e["name"] == Env.GATE_UNTIL), {})
        for name in self.live():
            old = self.pods[name]
            if old["spec"].get("nodeName") in self.nodes and _attempt(old) < _attempt(pod):
                until = datetime.fromisoformat(old["metadata"].get("deletionTimestamp") or rfc3339(self.now))
                assert float(gate.get("value", 0)) > until.timestamp(), f"{name} may still write"

    def _pod(self, name: str, uid: str) -> Json:
        pod = self.pods.get(name)
        if pod is None:
            raise ApiError(404, "not found")
        if pod["metadata"]["uid"] != uid:
            raise ApiError(409, "uid precondition failed")
        return pod

    def _collect(self, name: str) -> None:
        """A deleted pod goes when no finalizer holds it and its kubelet (if any) has ended it."""
        pod = self.pods[name]
        meta, phase = pod["metadata"], pod["status"]["phase"]
        forced = meta.get("deletionGracePeriodSeconds") == 0
        if (
            "deletionTimestamp" in meta
            and not meta.get("finalizers")
            and (forced or phase in ("Succeeded", "Failed"))
        ):
            del self.pods[name]

    def _bump(self, raw: Json) -> None:
        raw["metadata"]["resourceVersion"] = str(next(self._version))

    def _write(self) -> _Write:
        return _Write(self)


def _attempt(pod: Json) -> int:
    return int(pod["metadata"]["labels"][ATTEMPT_LABEL])


def merged(old: Json, patch: Json) -> Json:
    """By RFC 7386."""
    objects = {name: value for name, value in old.items() if isinstance(value, dict)}
    change = {k: merged(objects.get(k, {}), v) if isinstance(v, dict) else v for k, v in patch.items()}
    return {name: value for name, value in (old | change).items() if value is not None}


def _ends(status: Json) -> set[str]:
    true = {c["type"] for c in status.get("conditions", ()) if c["status"] == "True"}
    return true & {"Succeeded", "Failed"}


class _Write:
    """Counts one write, and crashes before or after its effect when it is the chosen one."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def _is_chosen(self) -> bool:
        return self._cluster.writes == self._cluster.crash_at

    def __enter__(self) -> None:
        self._cluster.writes += 1
        if self._is_chosen() and not self._cluster.crash_after_effect:
            raise Crash

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._is_chosen():
            raise Crash


ROUNDS = 40
"""More reconciles than any story needs to come to rest."""


class KeySet:
    """Stands in for the work queue."""

    def __init__(self) -> None:
        self.keys: set[JobKey] = set()

    open = True

    def add(self, key: JobKey) -> None:
        self.keys.add(key)

    add_soon = add


async def resync(cluster: Any, caches: Caches, queue: Any, namespaces: tuple[str, ...]) -> None:
    """Lists nodes, pods and jobs into the caches, as the service does."""
    informers = Informers(cluster, caches, queue, namespaces)
    await informers.nodes.relist()
    for pods, jobs in zip(informers.pods, informers.jobs, strict=True):
        await pods.relist()
        await jobs.relist()


def workloads(cluster: Any, caches: Caches) -> Informer[str, WorkloadView]:
    return Informer(KIND, cluster=cluster, cache=caches.workloads, changed=lambda *_: None, namespace="ns")


class World:
    """A cluster and the operator's process of the moment."""

    def __init__(
        self,
        spec: dict[str, object] | None = None,
        *,
        pools: tuple[Pool, ...] = (),
        defaults: JobDefaults = NO_DEFAULTS,
        queue: str = "",
    ) -> None:
        """queue: the job's Kueue queue; then the cluster has Kueue."""
        self.kueue = "" if queue else OFF
        self.pools = {pool.name: pool for pool in pools}
        self.defaults = defaults
        self.cluster = FakeCluster()
        for node in ("node-a", "node-b", "node-c"):
            self.cluster.add_node(node)
        self.cluster.add_job(raw_spec(**(spec or {})), labels={QUEUE_LABEL: queue} if queue else {})
        self.workers = int(str((spec or {}).get("workers", 1)))
        self.begun_after = 0
        """Number of writes until the first attempt ran."""
        self.runtime_answers = True
        """Whether trainers that run answer the poll of their progress."""
        self.saved: dict[int, int] = {}
        """By attempt: the step that its trainer reports as saved."""
        self.ahead = 0.0
        """Seconds by which the operator's clock is ahead of the API server's."""
        self._start()

    @property
    def now(self) -> datetime:
        """By the operator's clock."""
        return self.cluster.now + timedelta(seconds=self.ahead)

    def _start(self) -> None:
        self.caches = Caches()
        self.memory = Memory()
        self.sources = Sources(
            cluster=self.cluster,
            caches=self.caches,
            memory=self.memory,
            default_pool=POOL,
            pools=self.pools,
            defaults=self.defaults,
            kueue=lambda: self.kueue,
        )
        self.reconciler = Reconciler(sources=self.sources, now=lambda: self.now)

    async def look(self) -> object:
        """One reconcile on fresh caches."""
        await resync(self.cluster, self.caches, KeySet(), ())
        if not self.kueue:
            await workloads(self.cluster, self.caches).relist()
        self._poll()
        return await self.reconciler(KEY)

    def _poll(self) -> None:
        """What the poller would have heard by now from trainers that run."""
        asked = self.runtime_answers and KEY.name in self.cluster.jobs
        for pod in self.caches.pods.of(KEY) if asked else ():
            if pod.rank == 0 and pod.running_since and pod.attempt == self.status.attempt:
                step = self.saved.get(pod.attempt)
                progress = Progress(state="Training", attempt=pod.attempt, step=step or 0, durableStep=step)
                self.memory.of(KEY).sample = Sample(progress=progress, at=self.now)

    async def settle(self) -> None:
        """Reconciles, restarting the operator where it crashes, until nothing more is written."""
        for _ in range(ROUNDS):
            before = self.cluster.writes
            try:
                again = await self.look()
            except Crash:
                self._start()
                continue
            self._check()
            if self.cluster.writes == before and again != AT_ONCE:
                return
        raise AssertionError(f"still writing after {ROUNDS} reconciles")

    async def begin(self) -> None:
        """The first attempt runs, each rank on a node of its own."""
        await self.settle()
        for rank in range(self.workers):
            self.cluster.bind(self.pod(1, rank), "node-" + "abc"[rank])
        await self.settle()
        self.begun_after = self.cluster.writes

    def refuse(self, method: str, error: Exception, *names: str) -> list[str]:
        """The API server refuses these calls: about these names or kinds, or all. Returns who was named."""
        real, asked = getattr(self.cluster, method), []

        async def call(*args: Any, **more: Any) -> Any:
            about = [str(a if isinstance(a, str) else a["metadata"].get("name")) for a in args]
            asked.append(about[-1])
            if not names or set(names) & {part.rpartition("/")[2] for part in about}:
                raise error
            return await real(*args, **more)

        setattr(self.cluster, method, call)
        return asked

    def see_pod(self, raw: dict[str, Any]) -> None:
        """A watch event."""
        pod = pod_view(raw)
        assert pod is not None
        self.caches.pods.put(pod)

    def _check(self) -> None:
        alive = self.cluster.attempts_alive()
        ranks = {n: [rank_of(name) for name in names] for n, names in alive.items()}
        assert all(len(set(r)) == len(r) for r in ranks.values()), f"two live pods of one rank: {alive}"
        assert self.workers == 1 or len(alive) <= 1, f"two attempts of a gang at once: {alive}"
        cached, raw = self.caches.jobs.get(KEY), self.cluster.jobs.get(KEY.name)
        if cached and raw and str(cached.resource_version) == raw["metadata"]["resourceVersion"]:
            assert cached == parse_job(raw), "the cache takes a status from its write"

    def pass_time(self, seconds: float) -> None:
        self.cluster.now += timedelta(seconds=seconds)

    async def after(self, seconds: float) -> None:
        self.pass_time(seconds)
        await self.settle()

    async def ends(self, name: str, code: int, message: str = "") -> None:
        self.cluster.end(name, code, message)
        await self.settle()

    async def binds(self, name: str, node: str) -> None:
        self.cluster.bind(name, node)
        await self.settle()

    async def noticed(self, node: str, seconds: float) -> None:
        self.cluster.give_notice(node, seconds)
        await self.settle()

    async def annotates(self, name: str, value: str) -> None:
        job = self.cluster.jobs[KEY.name]
        job["metadata"].setdefault("annotations", {})[name] = value
        self.cluster._bump(job)
        await self.settle()

    def pod(self, attempt: int, rank: int = 0) -> str:
        return pod_name(KEY.name, KEY.uid, attempt, rank)

    @property
    def books(self) -> Bookkeeping:
        return self.memory.of(KEY).books or NO_BOOKS

    @property
    def status(self) -> Status:
        return parse_job(self.cluster.jobs[KEY.name]).status


def rank_of(name: str) -> str:
    return name.rpartition("-")[2]


async def begun(spec: dict[str, object] | None = None, **more: Any) -> World:
    """A world whose first attempt runs."""
    world = World(spec, **more)
    await world.begin()
    return world
