"""Builds an Observed from caches and memory; queries the API server where they may be stale, and stores there
what it has read."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from spottrain_operator.api import kueue as kueues
from spottrain_operator.api.bookkeeping import Bookkeeping, books_of_config_map
from spottrain_operator.api.job_defaults import NO_DEFAULTS, JobDefaults, applied, of_config_map
from spottrain_operator.api.kueue import Admission, Assigned, WorkloadView
from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import Limits, NodeView, Observed, PodEvents, PodView
from spottrain_operator.api.prices import NO_PRICES, PriceList
from spottrain_operator.api.training_job import AppliedDefaults, Job, JobKey
from spottrain_operator.api.validation import with_defaults
from spottrain_operator.api.views import (
    cleanup_ended,
    cleanup_trouble,
    node_view,
    pod_events,
    pod_view,
)
from spottrain_operator.control.actions import UNDECIDED, refusal
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.errors import ApiError, ApiFailure, InvalidSpec
from spottrain_operator.io.cluster import PAGE, Cluster
from spottrain_operator.io.logs import about
from spottrain_operator.names import CLAIMS, DEFAULTS_CONFIG_MAP, JOB_UID_LABEL, Condition
from spottrain_operator.policies import (
    accounting,
    capacity,
    claims,
    handover,
    ledger,
    lifecycle,
    placement,
    starting,
)
from spottrain_operator.policies.pod_end import trainer_ended
from spottrain_operator.rendering import trainer_pod

logger = logging.getLogger(__name__)

NEVER: Final = datetime.min.replace(tzinfo=UTC)
FLAVOR_INTERVAL: Final = timedelta(seconds=20)
"""Between two reads of the same ResourceFlavor."""
EVENTS_AT_ONCE: Final = 8
"""Maximum number of pods of a job whose Events are read in one reconcile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """What observations are made from."""

    cluster: Cluster
    caches: Caches
    memory: Memory
    default_pool: Pool
    pools: Mapping[str, Pool] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    prices: Callable[[], PriceList] = lambda: NO_PRICES
    defaults: JobDefaults = NO_DEFAULTS
    kueue: Callable[[], str] = lambda: kueues.OFF
    """Returns why Kueue cannot be asked; "" where it can."""
    sync_image: str = ""


async def observe(job: Job, given: Sources, now: datetime) -> Observed:
    caches, cluster, memory, known = given.caches, given.cluster, given.memory, given.memory.of(job.key)
    memory.began = memory.began or now
    job, known.applied = await _with_defaults(job, given)
    pods = caches.pods.of(job.key)
    if _seems_lost(job, pods):
        pods = await list_pods(job.key, caches, cluster)
    current = [p for p in pods if p.attempt == job.status.attempt]
    predecessors = await _deleted_jobs_pods(job, caches, cluster)
    books = known.books or await _books(job, cluster, now)
    nodes = await _nodes(job, (*pods, *predecessors), books, caches, cluster)
    deletes = job.deleting and job.holds_checkpoints  # its cleanup pod is not watched: it has another role
    cleanup = await cluster.get("pods", job.cleanup_name, job.key.namespace) if deletes else None
    o = Observed(
        now=now,
        job=job,
        pods=pods,
        predecessors=predecessors,
        nodes=nodes,
        default_pool=given.default_pool,
        pools=given.pools,
        applied=known.applied,
        books=books,
        admitted=memory.admitted(job),
        sample=known.sample,
        silence=known.silence,
        watched_since=memory.began,
        annotated_at=memory.see_annotations(job.key, current, now),
        cleaning=cleanup is not None,
        cleanup=cleanup_ended(cleanup) if cleanup is not None else None,
        cleanup_refused=known.cleanup_refused,
        cleanup_trouble=cleanup_trouble(cleanup) if cleanup is not None else known.cleanup_rejected,
        refusal=known.refusal,
        zoned=caches.nodes.zoned,
        has_gangs=memory.has_gangs and not known.ungrouped,
        admission=await _admission(job, pods, given, now),
        karpenter=caches.nodes.karpenter,
        found=caches.nodes.found | memory.node_pools,
        limits=given.limits.spread(memory.write_interval),
        prices=given.prices(),
        sync_image=given.sync_image,
    )
    known.alone_since = None if handover.saving(o, job.status) else known.alone_since or now
    o = replace(o, alone_since=known.alone_since)
    o = await _dry_run(o, cluster, memory)
    o = replace(o, heard=await _events(o, cluster, memory))
    o = replace(o, others=caches.pods.others_on(ledger.shared_nodes(o), job.key))
    o = replace(o, claims=await _claims(o, cluster))
    spec, asked = job.spec, job.status.asking
    made = spec is not None and len(current) == spec.workers and o.admitted
    if made and (asked is None or len(handover.pods_of(o, asked)) == asked.workers):
        o = replace(o, refusal=None)  # all objects exist that a rejected POST may have been for
    known.refusal = o.refusal
    return o


# --- the job --------------------------------------------------------------------------------------------
async def _with_defaults(job: Job, given: Sources) -> tuple[Job, AppliedDefaults | None]:
    """Fills in the defaults of a job that was not accepted yet; a job is invalid where they cannot be used.

    Between its dry run and its acceptance they are not read again.
    """
    if not job.takes_defaults or job.spec is None:
        return job, None
    known = given.memory.of(job.key).applied if given.memory.admitted(job) else None
    try:
        if known is None:
            raw = await given.cluster.get("configmaps", DEFAULTS_CONFIG_MAP, job.key.namespace)
            known = applied(job, of_config_map(raw, job.key.namespace, given.pools), given.defaults)
        return replace(job, spec=with_defaults(job.spec, known)), known
    except InvalidSpec as error:
        return replace(job, spec=None, invalid=str(error)), AppliedDefaults()
    except ApiError as error:
        if error.kind is not ApiFailure.FORBIDDEN:
            raise
        words = f"ConfigMap {DEFAULTS_CONFIG_MAP} of namespace {job.key.namespace} cannot be read: {error}"
        return replace(job, spec=None, invalid=words), AppliedDefaults()


async def _dry_run(o: Observed, cluster: Cluster, memory: Memory) -> Observed:
    """Asks the API server whether it accepts the job's pod. What it accepted lately it is not asked again."""
    known = memory.of(o.job.key)
    known.undecided = None
    if o.admitted or o.rejected or o.job.spec is None or o.job.deleting or o.job.status.terminal:
        return o
    try:
        if capacity.problem(o) or lifecycle.suspended(o) is not None:
            return o
        pool = capacity.choose(o, o.job.status)
        # Jobs of one template differ in the place of their checkpoints, which is a variable's value.
        alike = replace(o.job.spec, checkpoint=replace(o.job.spec.checkpoint, uri=""))
        digest = hashlib.sha256(repr((o.job.key.namespace, alike, pool)).encode()).hexdigest()
        known_good = memory.accepts(digest, o.now)
        trial = {} if known_good else trainer_pod.trial(o.job, pool, sync_image=o.sync_image)
    except Exception as error:  # for example a template that the schema should have refused
        return replace(o, job=replace(o.job, spec=None, invalid=not_processed(o.job.key, error)))
    if not known_good:
        try:
            await cluster.create("pods", trial, dry_run=True)
        except ApiError as error:
            if error.kind in UNDECIDED:
                known.undecided = error
                return o
            no = refusal(error, o.job.generation, o.now)
            if not no.accepted:  # an exceeded quota says nothing about the template
                memory.reject(o.job.key, no)
                return replace(o, refusal=no)
            o = replace(o, refusal=None)
    memory.accept(o.job, digest, o.now)
    return replace(o, admitted=True)


def not_processed(key: JobKey, error: Exception) -> str:
    """Logs an unexpected error that is being handled; returns the sentence for the job's status."""
    logger.exception("%s: planning failed", key, extra=about(key))
    return f"the operator cannot process this job ({type(error).__name__}: {error}); its log has more"


async def _books(job: Job, cluster: Cluster, now: datetime) -> Bookkeeping:
    """Reads the bookkeeping of a job that this process has not seen yet; rebuilds it where there is none."""
    if not job.status.attempt:
        return Bookkeeping()
    raw = await cluster.get("configmaps", job.books_name, job.key.namespace)
    if raw is None:
        return accounting.rebuilt(job.status, now)
    try:
        return books_of_config_map(raw)
    except InvalidSpec as error:
        words = "%s: ConfigMap %s is rebuilt: %s"
        logger.warning(words, job.key, job.books_name, error, extra=about(job.key))
        return accounting.rebuilt(job.status, now)


# --- pods -----------------------------------------------------------------------------------------------
async def list_pods(key: JobKey, caches: Caches, cluster: Cluster) -> tuple[PodView, ...]:
    """Lists a job's pods into the cache, which may know newer ones from a watch event by then."""
    before = caches.pods.of(key)
    raws = await cluster.list("pods", key.namespace, labels=f"{JOB_UID_LABEL}={key.uid}")
    live = {pod.uid: pod for raw in raws if (pod := pod_view(raw)) is not None and pod.job == key}
    for pod in live.values():
        caches.pods.put(pod)
    for pod in before:
        if pod.uid not in live:
            caches.pods.drop(pod)
    return caches.pods.of(key)


def _seems_lost(job: Job, pods: Iterable[PodView]) -> bool:
    """Returns whether the cache lacks a pod that a rank had; the API server must confirm that."""
    record = job.status.current
    if record is None or record.cause or job.status.terminal:
        return False
    there = {p.rank for p in pods if p.attempt == job.status.attempt}
    return record.complete and not there.issuperset(range(max(record.workers, 1)))


async def _deleted_jobs_pods(job: Job, caches: Caches, cluster: Cluster) -> tuple[PodView, ...]:
    """Lists the pods of deleted jobs of this name, because a stale cache entry would block the job."""
    if job.status.attempt:
        return ()
    others = caches.pods.other_lives(job.key)
    listed = await asyncio.gather(*(list_pods(key, caches, cluster) for key in others))
    return tuple(pod for pods in listed for pod in pods)


async def _events(o: Observed, cluster: Cluster, memory: Memory) -> dict[str, PodEvents]:
    """Returns by pod UID the Events of pods that do not start. Where a read fails, the last result is kept.

    The least recently read pods come first, and only some per reconcile: a gang may have a thousand.
    """
    live, known = {p.uid for p in o.pods if p.ended is None}, memory.of(o.job.key)
    known.events = {uid: read for uid, read in known.events.items() if uid in live}
    heard = {uid: events for uid, (_, events) in known.events.items()}
    last = {uid: at for uid, (at, _) in known.events.items()}
    wanted = sorted(starting.pods_to_read(replace(o, heard=heard)), key=lambda p: last.get(p.uid, NEVER))
    for pod in wanted[:EVENTS_AT_ONCE]:
        if last.get(pod.uid, NEVER) > o.now - starting.READ_INTERVAL:
            continue
        try:
            about_pod = f"involvedObject.uid={pod.uid}"
            raws = await cluster.list("events", pod.namespace, fields=about_pod, limit=PAGE)
        except ApiError as error:
            if not memory.events_failed:
                words = "%s: Events of pod %s cannot be read: %s"
                logger.warning(words, pod.job, pod.name, error, extra=about(pod.job))
            memory.events_failed = True
            break
        memory.events_failed = False
        heard[pod.uid] = pod_events(raws)
        known.events[pod.uid] = o.now, heard[pod.uid]
    return heard


# --- nodes and claims -----------------------------------------------------------------------------------
async def _nodes(
    job: Job, pods: tuple[PodView, ...], books: Bookkeeping, caches: Caches, cluster: Cluster
) -> dict[str, NodeView]:
    """Returns the nodes of `Observed.nodes`, by name.

    A node counts as gone only if the API server has confirmed it. It is asked each time for the node of a pod
    that may run, because one of that name may be new; for the others once.
    """
    named = {p.node for p in pods if p.node} | ledger.open_nodes(books.ledger)
    named |= placement.known_nodes(job.status, books)
    in_use = {p.node for p in pods if not trainer_ended(p)}
    lacking = (name for name in named if caches.nodes.get(name) is None)
    asked = [name for name in lacking if name in in_use or not caches.nodes.is_removed(name)]
    for name, raw in zip(asked, await asyncio.gather(*(cluster.get("nodes", n) for n in asked)), strict=True):
        if raw is not None:
            caches.nodes.put(node_view(raw))
        elif caches.nodes.get(name) is None:  # else it has come meanwhile
            caches.nodes.remove(name)
    avoided = {name for pod in pods if placement.is_kept_off(pod) for name in pod.avoids}
    known = {name: node for name in named if (node := caches.nodes.get(name)) is not None}
    return {**caches.nodes.noticed(), **caches.nodes.with_hostnames(avoided), **known}


async def _claims(o: Observed, cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """Reads the claims that a decision needs. A failure must not block notices and replacements."""
    found: dict[str, tuple[str, ...]] = {}
    asks = o.job.status.asking is None and handover.wanted(o) is not None
    for name in claims.wanted(o) or (claims.every(o) if asks else ()):
        try:
            if (raw := await cluster.get(CLAIMS, name, o.job.key.namespace)) is not None:
                found[name] = tuple(raw.get("spec", {}).get("accessModes") or ())
        except ApiError as error:
            found[name] = ()
            words = "%s: PersistentVolumeClaim %s cannot be read, so one node has it: %s"
            logger.warning(words, o.job.key, name, error, extra=about(o.job.key))
    return found


# --- the admission by a queue ---------------------------------------------------------------------------
async def _admission(job: Job, pods: Sequence[PodView], given: Sources, now: datetime) -> Admission | None:
    """Returns what Kueue says of a job that names a queue, or that still has a Workload.

    A failure is a result: it must not block notices and deletions.
    """
    found, missing, cluster = given.caches.workloads.of(job.key), given.kueue(), given.cluster
    if not job.queue and found is None:
        return None
    if missing or job.spec is None:  # it may still end, and give its quota back
        return Admission(missing=missing, workload=found)
    try:
        if found is None and (pods or job.status.is_true(Condition.ADMITTED)):
            found = await _workload(job, cluster)
        seen = Admission(workload=found)
        if found is None:
            return await _with_priority(seen, job, cluster)
    except ApiError as error:
        return Admission(missing=f"what Kueue says cannot be read: {error}", workload=found)
    if job.status.terminal or not found.admitted:
        return seen
    try:
        flavors = {name: await _flavor(name, given, now) for name in found.flavors}
        return replace(seen, flavors=flavors)
    except ApiError as error:  # the job may still end, and give its quota back
        return replace(seen, unread=f"an assigned ResourceFlavor cannot be read: {error}")


async def _workload(job: Job, cluster: Cluster) -> WorkloadView | None:
    """Reads the Workload: the cache may be behind, and without it the pods would be stopped."""
    raw = await cluster.get(kueues.WORKLOADS, job.workload_name, job.key.namespace)
    view = kueues.workload_view(raw) if raw is not None else None
    return view if view is not None and view.job == job.key else None


async def _flavor(name: str, given: Sources, now: datetime) -> Assigned | None:
    """Reads a ResourceFlavor, unless it was read lately."""
    at, flavor = given.memory.flavors.get(name, (NEVER, None))
    if now - at >= FLAVOR_INTERVAL:
        raw = await given.cluster.get(kueues.FLAVORS, name)
        flavor = kueues.of_flavor(raw) if raw is not None else None
        given.memory.flavors[name] = now, flavor
    return flavor


async def _with_priority(seen: Admission, job: Job, cluster: Cluster) -> Admission:
    """Adds the priority of the class that the job names, for the Workload that is to be created."""
    assert job.spec is not None
    kind, name = kueues.class_named(job.queue_priority, job.spec)
    if not name:
        return seen
    plural = kueues.POD_CLASSES if kind == "PriorityClass" else kueues.QUEUE_CLASSES
    raw = await cluster.get(plural, name)
    if raw is None:
        return replace(seen, unknown_class=f"{kind} {name}")
    return replace(seen, priority=int(raw.get("value") or 0))
