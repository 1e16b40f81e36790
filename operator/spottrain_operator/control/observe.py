"""Builds an Observed from caches and memory, which it only reads; queries the API server where they may be
stale."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from spottrain_operator.api import kueue as kueues
from spottrain_operator.api.bookkeeping import Bookkeeping
from spottrain_operator.api.job_defaults import NO_DEFAULTS, JobDefaults, applied, of_config_map
from spottrain_operator.api.kueue import Admission, Assigned, Kueue, KueueApi, WorkloadView
from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import ClaimView, Limits, NodeView, Observed, PodView
from spottrain_operator.api.prices import NO_PRICES, PriceList
from spottrain_operator.api.stored_books import books_of_0_3, books_of_config_map
from spottrain_operator.api.training_job import AppliedDefaults, Job, JobKey
from spottrain_operator.api.validation import with_defaults
from spottrain_operator.api.views import (
    claim_view,
    cleanup_ended,
    cleanup_trouble,
    node_view,
    pod_events,
    pod_view,
)
from spottrain_operator.control.actions import UNDECIDED, refusal
from spottrain_operator.control.caches import Caches, Listed
from spottrain_operator.control.memory import DryRun, EventsRead, FlavorRead, Learned, Memory
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

NO_KUEUE: Final = Kueue()
NEVER: Final = datetime.min.replace(tzinfo=UTC)
FLAVOR_INTERVAL: Final = timedelta(seconds=20)
"""Between two reads of the same ResourceFlavor."""
EVENTS_AT_ONCE: Final = 8
"""Maximum number of pods of a job whose Events are read in one reconcile."""


async def list_pods(key: JobKey, caches: Caches, cluster: Cluster) -> Listed:
    """Lists a job's pods. A watch event that came meanwhile may be newer than the response."""
    before = caches.pods.of(key)
    raws = await cluster.list("pods", key.namespace, labels=f"{JOB_UID_LABEL}={key.uid}")
    live = {v.uid: v for raw in raws if (v := pod_view(raw)) is not None and v.job == key}
    gone = {pod.uid: pod for pod in before if pod.uid not in live}
    for pod in caches.pods.of(key):
        old = live.get(pod.uid)
        if pod.uid not in gone and (old is None or old.resource_version < pod.resource_version):
            live[pod.uid] = pod
    return Listed(pods=tuple(sorted(live.values(), key=lambda p: p.attempt)), gone=tuple(gone.values()))


async def observe(
    job: Job,
    *,
    caches: Caches,
    cluster: Cluster,
    memory: Memory,
    default_pool: Pool,
    pools: Mapping[str, Pool],
    limits: Limits,
    now: datetime,
    prices: PriceList = NO_PRICES,
    defaults: JobDefaults = NO_DEFAULTS,
    kueue: Kueue = NO_KUEUE,
    sync_image: str = "",
) -> tuple[Observed, Learned]:
    """Returns the observation, and what was learned beyond it. Changes neither the caches nor the memory."""
    job, filled_in = await _with_defaults(job, cluster, memory, defaults, pools)
    own = [await list_pods(job.key, caches, cluster)] if _seems_lost(job, caches.pods.of(job.key)) else []
    every = own[0].pods if own else caches.pods.of(job.key)
    pods = tuple(p for p in every if not p.stray)
    current = [p for p in pods if p.attempt == job.status.attempt]
    others = await _deleted_jobs_pods(job, caches, cluster)
    predecessors = tuple(pod for listed in others for pod in listed.pods)
    books = memory.books.get(job.key) or await _books(job, cluster, now)
    nodes, fetched, absent = await _nodes(job, (*pods, *predecessors), books, caches, cluster)
    found = caches.nodes.found | memory.node_pools
    for node in fetched:
        found |= node.found
    cleanup = await _cleanup(job, cluster)
    flavors = _Flavors(memory.flavors, cluster, now)
    observed = Observed(
        now=now,
        job=job,
        pods=pods,
        strays=tuple(p for p in every if p.stray),
        predecessors=predecessors,
        nodes=nodes,
        default_pool=default_pool,
        pools=pools,
        applied=filled_in,
        books=books,
        admitted=memory.admitted(job),
        sample=memory.samples.get(job.key),
        silence=memory.silences.get(job.key),
        watched_since=memory.began or now,
        annotated_at=memory.annotated_at(job.key, current, now),
        cleaning=cleanup is not None,
        cleanup=cleanup_ended(cleanup) if cleanup is not None else None,
        cleanup_refused=memory.cleanup_refused.get(job.key.uid, ""),
        cleanup_trouble=await _cleanup_trouble(cleanup, job, cluster, memory),
        refusal=memory.refusals.get(job.key),
        zoned=caches.nodes.zoned(fetched),
        has_gangs=memory.has_gangs and job.key not in memory.ungrouped,
        admission=await _admission(job, kueue, pods, caches, cluster, flavors),
        karpenter=caches.nodes.karpenter(fetched),
        found=found,
        limits=replace(limits, progress_interval=max(limits.progress_interval, memory.write_interval)),
        prices=prices,
        sync_image=sync_image,
    )
    observed, dry_run = await _dry_run(observed, cluster, memory)
    events, error = await _events(observed, memory.events.get(job.key, {}), cluster)
    observed = replace(observed, heard={uid: read.events for uid, read in events.items()})
    observed = replace(observed, others=caches.pods.others_on(ledger.shared_nodes(observed), job.key))
    wanted = claims.wanted(observed) or handover.claims_to_read(observed)
    read = dict(
        zip(wanted, await asyncio.gather(*(_claim(job.key, n, cluster) for n in wanted)), strict=True)
    )
    observed = _without_old_refusal(replace(observed, claims=read), current)
    lists = (*own, *others)
    learned = Learned(
        lists=lists,
        nodes=fetched,
        absent_nodes=absent,
        events=events,
        events_error=error,
        flavors=flavors.read,
        dry_run=dry_run,
    )
    return observed, learned


async def _dry_run(o: Observed, cluster: Cluster, memory: Memory) -> tuple[Observed, DryRun | None]:
    """Asks the API server whether it accepts the job's pod. What it accepted lately it is not asked again."""
    if o.admitted or o.rejected or o.job.spec is None or o.job.deleting or o.job.status.terminal:
        return o, None
    try:
        if capacity.problem(o) or lifecycle.suspended(o) is not None:
            return o, None
        pool = capacity.choose(o, o.job.status)
        trial = trainer_pod.trial(o.job, pool, sync_image=o.sync_image)
    except Exception as error:  # for example a template that the schema should have refused
        return replace(o, job=replace(o.job, spec=None, invalid=not_processed(o.job.key, error))), None
    # Jobs of one template differ in the place of their checkpoints, which is a variable's value.
    alike = replace(o.job.spec, checkpoint=replace(o.job.spec.checkpoint, uri=""))
    digest = hashlib.sha256(repr((o.job.key.namespace, alike, pool)).encode()).hexdigest()
    if memory.accepts(digest, o.now):
        return replace(o, admitted=True), DryRun(accepted=digest)
    try:
        await cluster.create("pods", trial, dry_run=True)
    except ApiError as error:
        if error.kind in UNDECIDED:
            return o, DryRun(error=error)
        no = refusal(error, o.job.generation, o.now)
        if not no.accepted:  # an exceeded quota says nothing about the template
            return replace(o, refusal=no), None
    return replace(o, admitted=True, refusal=None), DryRun(accepted=digest)


def not_processed(key: JobKey, error: Exception) -> str:
    """Logs an unexpected error that is being handled; returns the sentence for the job's status."""
    logger.exception("%s: planning failed", key, extra=about(key))
    return f"the operator cannot process this job ({type(error).__name__}: {error}); its log has more"


async def _with_defaults(
    job: Job, cluster: Cluster, memory: Memory, chart: JobDefaults, pools: Mapping[str, Pool]
) -> tuple[Job, AppliedDefaults | None]:
    """Fills in the defaults of a job that was not accepted yet; a job is invalid where they cannot be used.

    Between its dry run and its acceptance they are not read again.
    """
    if not job.takes_defaults or job.spec is None:
        return job, None
    known = memory.applied.get(job.key) if memory.admitted(job) else None
    try:
        if known is None:
            raw = await _config_map(job.key, cluster)
            known = applied(job, of_config_map(raw, job.key.namespace, pools), chart)
        return replace(job, spec=with_defaults(job.spec, known)), known
    except InvalidSpec as error:
        return replace(job, spec=None, invalid=str(error)), AppliedDefaults()


async def _config_map(key: JobKey, cluster: Cluster) -> dict[str, Any] | None:
    """Reads the namespace's defaults. Raises InvalidSpec where the operator may not."""
    try:
        return await cluster.get("configmaps", DEFAULTS_CONFIG_MAP, key.namespace)
    except ApiError as error:
        if error.kind is not ApiFailure.FORBIDDEN:
            raise
        raise InvalidSpec(
            f"ConfigMap {DEFAULTS_CONFIG_MAP} of namespace {key.namespace} cannot be read: {error}"
        ) from error


async def _books(job: Job, cluster: Cluster, now: datetime) -> Bookkeeping:
    """Reads the bookkeeping of a job that this process has not seen yet; rebuilds it where there is none."""
    if not job.status.attempt:
        return Bookkeeping()
    raw = await cluster.get("configmaps", job.books_name, job.key.namespace)
    if raw is None and job.old_status is not None and (books := books_of_0_3(job.old_status)) is not None:
        return replace(books, written=NEVER)
    if raw is None:
        return accounting.rebuilt(job.status, now)
    try:
        return books_of_config_map(raw)
    except InvalidSpec as error:
        words = "%s: ConfigMap %s is rebuilt: %s"
        logger.warning(words, job.key, job.books_name, error, extra=about(job.key))
        return accounting.rebuilt(job.status, now)


async def _events(
    o: Observed, before: Mapping[str, EventsRead], cluster: Cluster
) -> tuple[dict[str, EventsRead], str | None]:
    """Reads the Events of pods that do not start. Where that fails, the last result is kept.

    The least recently read pods come first, and only some per reconcile: a gang may have a thousand.

    Returns:
        The Events by pod UID, and the error (see `Learned.events_error`).
    """
    starting_pods = {p.uid for p in o.pods if p.ended is None}
    known = {uid: read for uid, read in before.items() if uid in starting_pods}
    o = replace(o, heard={uid: read.events for uid, read in known.items()})
    last = {uid: read.at for uid, read in known.items()}
    wanted = sorted(starting.pods_to_read(o), key=lambda p: last.get(p.uid, NEVER))
    error = None
    for pod in wanted[:EVENTS_AT_ONCE]:
        if last.get(pod.uid, NEVER) > o.now - starting.READ_INTERVAL:
            continue
        try:
            raws = await _events_of(pod.namespace, pod.uid, cluster)
        except ApiError as failure:
            return known, f"Events of pod {pod.name} cannot be read: {failure}"
        error = ""
        known[pod.uid] = EventsRead(at=o.now, events=pod_events(raws))
    return known, error


async def _claim(key: JobKey, name: str, cluster: Cluster) -> ClaimView | None:
    """Reads a claim. A failure is a result: it must not block notices, deletions and replacements."""
    try:
        raw = await cluster.get(CLAIMS, name, key.namespace)
    except ApiError as error:
        return ClaimView(name=name, unread=str(error) or f"status {error.status}")
    return claim_view(raw) if raw is not None else None


# --- the admission by a queue ---------------------------------------------------------------------------
async def _admission(
    job: Job, kueue: Kueue, pods: Sequence[PodView], caches: Caches, cluster: Cluster, flavor: _Flavors
) -> Admission | None:
    """Returns what Kueue says of a job that names a queue, or that still has a Workload.

    A failure is a result: it must not block notices and deletions.
    """
    found = caches.workloads.of(job.key)
    if not job.queue and found is None:
        return None
    if kueue.api is None:
        return Admission(missing=kueue.missing, workload=found)
    if job.spec is None:  # it may still end, and give its quota back
        return Admission(api=kueue.api, missing="", workload=found)
    try:
        if found is None and (pods or job.status.is_true(Condition.ADMITTED)):
            found = await _workload(job, kueue.api, cluster)
        seen = Admission(api=kueue.api, missing="", workload=found)
        if found is None:
            return await _with_priority(seen, job, kueue.api, cluster)
    except ApiError as error:
        return Admission(missing=f"what Kueue says cannot be read: {error}", workload=found)
    return await _with_flavors(seen, found, kueue.api, flavor) if not job.status.terminal else seen


async def _with_flavors(seen: Admission, found: WorkloadView, api: KueueApi, flavor: _Flavors) -> Admission:
    """Adds the assigned flavors. Where they cannot be read, the job may still end and give its quota back."""
    names = found.flavors if found.admitted else ()
    try:
        return replace(seen, flavors={name: await flavor(name, api) for name in names})
    except ApiError as error:
        return replace(seen, unread=f"an assigned ResourceFlavor cannot be read: {error}")


async def _workload(job: Job, api: KueueApi, cluster: Cluster) -> WorkloadView | None:
    """Reads the Workload: the cache may be behind, and without it the pods would be stopped."""
    raw = await cluster.get(api.kind(kueues.WORKLOADS), job.workload_name, job.key.namespace)
    view = kueues.workload_view(raw) if raw is not None else None
    return view if view is not None and view.job == job.key else None


class _Flavors:
    """Reads ResourceFlavors; what was read lately is not read again."""

    def __init__(self, known: Mapping[str, FlavorRead], cluster: Cluster, now: datetime) -> None:
        self.read: dict[str, FlavorRead] = {}
        self._known, self._cluster, self._now = known, cluster, now

    async def __call__(self, name: str, api: KueueApi) -> Assigned | None:
        known = self._known.get(name)
        if known is not None and self._now - known.at < FLAVOR_INTERVAL:
            return known.flavor
        raw = await self._cluster.get(api.kind(kueues.FLAVORS), name)
        self.read[name] = FlavorRead(at=self._now, flavor=kueues.of_flavor(raw) if raw is not None else None)
        return self.read[name].flavor


async def _with_priority(seen: Admission, job: Job, api: KueueApi, cluster: Cluster) -> Admission:
    """Adds the priority of the class that the job names, for the Workload that is to be created."""
    assert job.spec is not None
    kind, name = kueues.class_named(job.queue_priority, job.spec)
    if not name:
        return seen
    plural = kueues.POD_CLASSES if kind == "PriorityClass" else api.kind(kueues.QUEUE_CLASSES)
    raw = await cluster.get(plural, name)
    if raw is None:
        return replace(seen, unknown_class=f"{kind} {name}")
    return replace(seen, priority=int(raw.get("value") or 0))


def _without_old_refusal(o: Observed, current: Sequence[PodView]) -> Observed:
    """Drops the rejection of a POST once all objects that it may have been for are made."""
    spec, asked = o.job.spec, o.job.status.asking
    made = spec is not None and len(current) == spec.workers and o.admitted
    all_asked = asked is None or len(handover.pods_of(o, asked)) == asked.workers
    return replace(o, refusal=None) if made and all_asked else o


def _seems_lost(job: Job, pods: tuple[PodView, ...]) -> bool:
    """Returns whether the cache lacks a pod that a rank had; the API server must confirm that."""
    record = job.status.current
    if record is None or record.cause or job.status.terminal:
        return False
    there = {p.rank for p in pods if p.attempt == job.status.attempt and not p.stray}
    return record.complete and not there.issuperset(range(max(record.workers, 1)))


async def _cleanup(job: Job, cluster: Cluster) -> dict[str, Any] | None:
    """Reads the cleanup pod, which is not watched because it has another role label."""
    if not (job.deleting and job.holds_checkpoints):
        return None
    return await cluster.get("pods", job.cleanup_name, job.key.namespace)


async def _cleanup_trouble(cleanup: dict[str, Any] | None, job: Job, cluster: Cluster, memory: Memory) -> str:
    """Returns why the checkpoints cannot be deleted now. Its Events are read while the pod has not begun."""
    if cleanup is None:
        return memory.cleanup_rejected.get(job.key.uid, "")
    pending = cleanup.get("status", {}).get("phase", "Pending") == "Pending"
    try:
        events = await _events_of(job.key.namespace, cleanup["metadata"]["uid"], cluster) if pending else []
    except ApiError:  # it must not block the deletion
        events = []
    return cleanup_trouble(cleanup, events)


async def _events_of(namespace: str, uid: str, cluster: Cluster) -> list[dict[str, Any]]:
    """Returns the Events about one pod."""
    return await cluster.list("events", namespace, fields=f"involvedObject.uid={uid}", limit=PAGE)


async def _deleted_jobs_pods(job: Job, caches: Caches, cluster: Cluster) -> list[Listed]:
    """Lists the pods of deleted jobs of this name, because a stale cache entry would block the job."""
    if job.status.attempt:
        return []
    return await asyncio.gather(*(list_pods(k, caches, cluster) for k in caches.pods.other_lives(job.key)))


async def _nodes(
    job: Job, pods: tuple[PodView, ...], books: Bookkeeping, caches: Caches, cluster: Cluster
) -> tuple[dict[str, NodeView], tuple[NodeView, ...], tuple[str, ...]]:
    """Returns the nodes of `Observed.nodes`, by name.

    A node counts as gone only if the API server has confirmed it. It is asked each time for the node of a pod
    that may run, because one of that name may be new; for the others once.

    The other results: nodes that the cache did not have, and names of nodes that do not exist.
    """
    avoided = {name for pod in pods if placement.is_kept_off(pod) for name in pod.avoids}
    nodes = {**caches.nodes.noticed(), **caches.nodes.with_hostnames(avoided)}
    named = {p.node for p in pods if p.node} | ledger.open_nodes(books.ledger)
    named |= placement.known_nodes(job.status, books) | placement.faulty_nodes(job.status)
    in_use = {p.node for p in pods if not trainer_ended(p)}
    lacking = {name for name in named if caches.nodes.get(name) is None}
    asked = sorted(name for name in lacking if name in in_use or not caches.nodes.is_removed(name))
    raws = await asyncio.gather(*(cluster.get("nodes", name) for name in asked))
    fetched = tuple(node_view(raw) for raw in raws if raw is not None)
    known = (caches.nodes.get(name) for name in named)
    nodes |= {node.name: node for node in (*fetched, *known) if node is not None}
    return nodes, fetched, tuple(sorted(set(asked) - nodes.keys()))
