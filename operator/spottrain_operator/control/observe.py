"""Builds an Observed from the caches; queries the API server where they may be stale."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import (
    ClaimView,
    Limits,
    NodeView,
    Observed,
    PodEvents,
    PodView,
)
from spottrain_operator.api.training_job import Job, JobKey
from spottrain_operator.api.views import claim_view, cleanup_ended, node_view, pod_events, pod_view
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.errors import ApiError
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.io.logs import about
from spottrain_operator.names import JOB_UID_LABEL, cleanup_name
from spottrain_operator.policies import avoid, claims, pins, starting
from spottrain_operator.policies.avoid import may_be_in_vain

logger = logging.getLogger(__name__)
EVENTS_AT_ONCE = 8
"""Maximum number of pods of a job whose Events are read in one reconcile."""


async def find_job(key: JobKey, caches: Caches, cluster: Cluster) -> Job | None:
    """Returns the job from the cache, else from the API server: a pod's event may precede its job's."""
    return caches.jobs.get(key) or await fetch_job(key, caches, cluster)


async def fetch_job(key: JobKey, caches: Caches, cluster: Cluster) -> Job | None:
    raw = await cluster.get_job(key.namespace, key.name) if key.name else None
    job = Job.parse(raw) if raw is not None else None
    if job is None or job.key != key:
        caches.jobs.drop(key)
        return None
    caches.jobs.put(job)
    return caches.jobs.get(key)


async def live_pods(key: JobKey, caches: Caches, cluster: Cluster) -> tuple[PodView, ...]:
    raws = await cluster.list_pods(key.namespace, f"{JOB_UID_LABEL}={key.uid}")
    caches.pods.replace(key, [v for raw in raws if (v := pod_view(raw)) is not None and v.job == key])
    return caches.pods.of(key)


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
) -> Observed:
    memory.began = memory.began or now
    every = caches.pods.of(job.key)
    if _seems_lost(job, every):
        every = await live_pods(job.key, caches, cluster)
    pods = tuple(p for p in every if not p.stray)
    current = [p for p in pods if p.attempt == job.status.attempt]
    predecessors = await _predecessors(job, caches, cluster)
    cleanup = await _cleanup(job, cluster)
    observed = Observed(
        now=now,
        job=job,
        pods=pods,
        strays=tuple(p for p in every if p.stray),
        predecessors=predecessors,
        nodes=await _nodes(job, (*pods, *predecessors), caches, cluster),
        default_pool=default_pool,
        pools=pools,
        admitted=memory.admitted(job),
        sample=memory.samples.get(job.key),
        silence=memory.silences.get(job.key),
        watched_since=memory.began,
        told=memory.told(job.key, current, now),
        cleaning=cleanup is not None,
        cleanup=cleanup_ended(cleanup) if cleanup is not None else None,
        cleanup_refused=memory.cleanup_refused.get(job.key.uid, ""),
        zoned=caches.nodes.zoned(),
        gang_api=None if job.key in memory.ungrouped else memory.gang_api,
        karpenter=caches.nodes.karpenter(),
        found=caches.nodes.found | memory.node_pools,
        limits=limits,
    )
    observed = replace(observed, heard=await _heard(observed, cluster, memory))
    found = {name: await _claim(job.key, name, cluster, memory) for name in claims.wanted(observed)}
    return _remembered(replace(observed, claims=found), current, memory)


async def _heard(o: Observed, cluster: Cluster, memory: Memory) -> dict[str, PodEvents]:
    """Reads the Events of pods that do not start. Where that fails, the last result is kept.

    The least recently read pods come first, and only some per reconcile: a gang may have a thousand.
    """
    key, alive = o.job.key, {p.uid: p.ended is not None for p in o.pods}
    known = {
        uid: found
        for uid, found in memory.heard.get(key, {}).items()
        if uid in alive and found[2] == alive[uid]  # Events read before the pod's end do not explain the end
    }
    o = replace(o, heard={uid: events for uid, (_, events, _) in known.items()})
    never = (datetime.min.replace(tzinfo=UTC), None)
    wanted = sorted(starting.asks(o), key=lambda p: known.get(p.uid, never)[0])
    for pod in wanted[:EVENTS_AT_ONCE]:
        if known.get(pod.uid, never)[0] > o.now - starting.QUIET:
            continue
        try:
            raws = await cluster.pod_events(pod.namespace, pod.uid)
        except ApiError as error:
            if not memory.deaf:
                logger.warning(
                    "%s: Events of pod %s cannot be read: %s", key, pod.name, error, extra=about(key)
                )
            memory.deaf = True
            break
        memory.deaf = False
        known[pod.uid] = (o.now, pod_events(raws, pod.trainer), alive[pod.uid])
    memory.heard.pop(key, None)
    if known:
        memory.heard[key] = known
    return {uid: events for uid, (_, events, _) in known.items()}


async def _claim(key: JobKey, name: str, cluster: Cluster, memory: Memory) -> ClaimView | None:
    """Reads a claim. A failure is logged, because it must not block notices, deletions and replacements."""
    told = memory.unread.setdefault(key, set())
    try:
        raw = await cluster.get_claim(key.namespace, name)
    except ApiError as error:
        if name not in told:
            words = "%s: PersistentVolumeClaim %s cannot be read: %s"
            logger.warning(words, key, name, error, extra=about(key))
        told.add(name)
        return ClaimView(name=name, unread=str(error) or f"status {error.status}")
    told.discard(name)
    return claim_view(raw) if raw is not None else None


def _remembered(o: Observed, current: Sequence[PodView], memory: Memory) -> Observed:
    """Adds this process's memory, after dropping what pods and claims have made obsolete."""
    key, spec = o.job.key, o.job.spec
    if spec is not None and len(current) == spec.workers and o.admitted and claims.to_make(o) is None:
        memory.refusals.pop(key, None)  # all objects that a rejected POST was to create exist
    volume_wait = memory.volume_wait(key, claims.wait_for_volume(o), o.now)
    return replace(o, refusal=memory.refusals.get(key), volume_wait=volume_wait)


def _seems_lost(job: Job, pods: tuple[PodView, ...]) -> bool:
    """Returns whether the cache lacks a pod that a rank had; the API server must confirm that."""
    record = job.status.record(job.status.attempt)
    if record is None or record.cause or job.status.terminal:
        return False
    there = {p.rank for p in pods if p.attempt == job.status.attempt and not p.stray}
    return any(r.rank not in there for r in record.ranks)


async def _cleanup(job: Job, cluster: Cluster) -> dict[str, Any] | None:
    """Reads the cleanup pod, which is not watched because it has another role label."""
    if not (job.deleting and job.holds_checkpoints):
        return None
    return await cluster.get_pod(job.key.namespace, cleanup_name(job.key.name, job.key.uid))


async def _predecessors(job: Job, caches: Caches, cluster: Cluster) -> tuple[PodView, ...]:
    """Lists the pods from the API server, because a stale cache entry would block the job."""
    if job.status.attempt:
        return ()
    lives = [await live_pods(key, caches, cluster) for key in caches.pods.other_lives(job.key)]
    return tuple(pod for pods in lives for pod in pods)


async def _nodes(
    job: Job, pods: tuple[PodView, ...], caches: Caches, cluster: Cluster
) -> dict[str, NodeView]:
    """Returns the pods' nodes, those they avoid or are pinned to, earlier nodes of ranks, all with a notice.

    A node counts as gone only if the API server confirms it.
    """
    avoided = {name for pod in pods if may_be_in_vain(pod) for name in pod.avoids}
    nodes = caches.nodes.noticed() | caches.nodes.with_hostnames(avoided)
    for name in {p.node for p in pods if p.node} | pins.nodes_of(job) | avoid.nodes_of(job.status):
        node = caches.nodes.get(name) or await _fetch_node(name, caches, cluster)
        if node is not None:
            nodes[name] = node
    return nodes


async def _fetch_node(name: str, caches: Caches, cluster: Cluster) -> NodeView | None:
    raw = await cluster.get_node(name)
    if raw is None:
        return None
    caches.nodes.put(node_view(raw))
    return caches.nodes.get(name)
