"""Executes a Plan: the actions before the status, the status once, the actions after it, events last.

Actions are independent, so a failure does not stop the others. Failures are raised at the end, and the work
queue plans again. A rejected pod is remembered for the next plan. Correctness requires this order:

- If a pod has ended in the meantime, its end is evaluated before the status is written (`Unseen`).
- A DELETE that is `needed` precedes the status: the next attempt must not start while the old pod has not
  been told to end.
- The status precedes `Plan.after`: it records an attempt's number before its pod exists, and a pod's outcome
  before the pod is released.
- Objects that pods need (a Service, a group, a claim) precede the pods.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from spottrain_operator.api.native_gangs import API_GROUP
from spottrain_operator.api.observed import (
    Action,
    Annotate,
    Check,
    Create,
    Delete,
    DeleteJob,
    Event,
    Hold,
    Plan,
    PodView,
    Provide,
    Refusal,
    Release,
)
from spottrain_operator.api.template import admission_words
from spottrain_operator.api.training_job import Job, JobKey
from spottrain_operator.api.views import pod_view
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.observe import read_job
from spottrain_operator.errors import ApiError, Conflict, Incomplete
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.io.logs import about
from spottrain_operator.io.metrics import ATTEMPTS_ENDED, ATTEMPTS_STARTED
from spottrain_operator.names import (
    API_VERSION,
    CLAIMS,
    DEADLINE_ANNOTATION,
    FIELD_MANAGER,
    JOB_UID_LABEL,
    KIND,
    Reason,
)
from spottrain_operator.policies.gone import ended

logger = logging.getLogger(__name__)

RETRY_QUOTA = timedelta(seconds=20)
RETRY_REFUSED = timedelta(seconds=30)
"""Admission may soon accept what it rejects now (a missing service account, a webhook without response)."""
RETRY_INVALID = timedelta(minutes=5)
"""What is invalid in this cluster now may be valid once an administrator has changed it."""
NAMESPACE_TERMINATING = "NamespaceTerminating"
"""The API server's cause when it rejects new objects in a namespace that is being deleted."""
ANNOTATE_SECONDS = 1.0
MOST_NAMED = 3
"""Maximum number of failures in one message."""
SOON = timedelta(milliseconds=100)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hands:
    """The dependencies of `apply`."""

    cluster: Cluster
    caches: Caches
    memory: Memory
    now: datetime


class Unseen(Conflict):
    """A pod that was to be deleted has ended: its outcome must be evaluated first."""


@dataclass(slots=True)
class Outcome:
    """The combined result of several actions."""

    again: bool = False
    """Whether to reconcile again at once."""
    conflict: Conflict | None = None
    blocked: bool = False
    """Whether an action failed on which the status depends."""
    failed: list[tuple[str, ApiError]] = field(default_factory=list)
    """Each failed action with its error."""

    def take(self, action: Action, result: bool | BaseException) -> None:
        match result:
            case bool():
                self.again |= result
            case Unseen():
                self.again, self.conflict = True, self.conflict or result
            case Conflict():
                self.conflict = result
            case ApiError():
                self.blocked |= isinstance(action, Delete) and action.needed
                self.failed.append((_name_of(action), result))
            case _:
                raise result

    def raise_failures(self) -> None:
        if self.failed:
            words = "; ".join(f"could not {what}: {why}" for what, why in self.failed[:MOST_NAMED])
            more = f" (and {len(self.failed) - MOST_NAMED} more)" if len(self.failed) > MOST_NAMED else ""
            silence = all(why.status == 0 for _, why in self.failed)
            raise Incomplete(words + more, again=SOON if self.again else None, silence=silence)
        if self.conflict is not None and not isinstance(self.conflict, Unseen):
            raise self.conflict


async def apply(job: Job, plan: Plan, hands: Hands) -> bool:
    """Executes a plan; returns whether to reconcile again at once.

    Raises Incomplete with all failures, after everything that does not depend on them was done, and Conflict
    where the view was stale.
    """
    early = await _do_all(plan.before, job.key, hands)
    if isinstance(early.conflict, Unseen):  # the status was planned without its end
        raise early.conflict
    if early.blocked:
        early.raise_failures()
    try:
        if plan.status is not None:
            await _write_status(job, plan, hands)
        elif any(isinstance(a, Create) for a in plan.after):
            await _confirm(job, hands)
    except ApiError as error:
        early.failed.append(("read the job" if plan.status is None else "write the status", error))
        early.raise_failures()
    late = await _do_all(plan.after, job.key, hands)
    if plan.status is not None or not early.failed:
        await _tell(job, plan.events, hands)
    late.again |= early.again
    late.failed[:0] = early.failed
    late.conflict = late.conflict or early.conflict
    late.raise_failures()
    return late.again


async def _write_status(job: Job, plan: Plan, hands: Hands) -> None:
    assert plan.status is not None
    key = job.key
    try:
        raw = await hands.cluster.apply_status(
            key.namespace,
            key.name,
            uid=key.uid,
            resource_version=job.resource_version,
            status=plan.status.to_json(),
        )
    except ApiError as error:
        if error.status not in (404, 409):
            raise
        await _read_again(key, hands)
        raise Conflict(f"{key} has changed: {error}") from error
    hands.caches.jobs.put(Job.parse(raw))
    _count_endings(job, plan)
    words = about(key, attempt=plan.status.attempt, reason=str(plan.reason))
    logger.info("%s: %s: %s", key, plan.reason, plan.message, extra=words)


async def _read_again(key: JobKey, hands: Hands) -> Job | None:
    """Brings the cached job up to date."""
    job = await read_job(key, hands.cluster)
    if job is None:
        hands.caches.jobs.drop(key)
        return None
    hands.caches.jobs.put(job)
    return hands.caches.jobs.get(key)


def _count_endings(job: Job, plan: Plan) -> None:
    assert plan.status is not None
    known = {r.number for r in job.status.attempts if r.cause}
    for record in plan.status.attempts:
        if record.cause and record.number not in known:
            ATTEMPTS_ENDED.labels(record.cause).inc()


async def _confirm(job: Job, hands: Hands) -> None:
    """Raises Conflict if the job has changed. Needed where a pod is created without a status write."""
    live = await _read_again(job.key, hands)
    if live is None or live.deleting or live.status.attempt != job.status.attempt or live.status.terminal:
        raise Conflict(f"{job.key} has changed")


async def _do_all(actions: tuple[Action, ...], key: JobKey, hands: Hands) -> Outcome:
    """Executes all actions, even if some are rejected or slow. Pods are created last, and only if the objects
    that they need exist. They are created concurrently, so that an autoscaler sees the whole gang."""
    outcome = Outcome()
    creates = tuple(a for a in actions if isinstance(a, Create))
    provides = tuple(a for a in actions if isinstance(a, Provide))
    await _at_once(tuple(a for a in actions if not isinstance(a, Create | Provide)), key, hands, outcome)
    failures = len(outcome.failed)
    await _at_once(provides, key, hands, outcome)
    if creates and _lacking(actions, key, hands):
        outcome.again = True
    elif len(outcome.failed) == failures and outcome.conflict is None:
        await _at_once(creates, key, hands, outcome)
    return outcome


async def _at_once(actions: Sequence[Action], key: JobKey, hands: Hands, outcome: Outcome) -> None:
    results = await asyncio.gather(*(_do(a, key, hands) for a in actions), return_exceptions=True)
    for action, result in zip(actions, results, strict=True):
        outcome.take(action, result)


def _name_of(action: Action) -> str:
    match action:
        case Annotate(pod=pod):
            return f"annotate pod {pod.name}"
        case Delete(pod=pod):
            return f"delete pod {pod.name}"
        case Release(pod=pod):
            return f"take the finalizer off pod {pod.name}"
        case Hold():
            return "change the finalizers of the job"
        case DeleteJob():
            return "delete the job"
        case Check():
            return "dry-run a pod"
        case Create(manifest=manifest) | Provide(manifest=manifest):
            return f"make {manifest.get('kind', 'Pod')} {manifest['metadata']['name']}"


def _lacking(actions: tuple[Action, ...], key: JobKey, hands: Hands) -> bool:
    """Returns whether an object that the pods need was rejected in this reconcile, not in an earlier one."""
    provided = [a for a in actions if isinstance(a, Provide)]
    grouped = any(a.group.startswith(API_GROUP) for a in provided)
    no = hands.memory.refusals.get(key)
    refused = no is not None and no.at == hands.now
    return bool(provided) and (refused or (grouped and key in hands.memory.ungrouped))


async def _do(action: Action, key: JobKey, hands: Hands) -> bool:
    match action:
        case Check(manifest=manifest, generation=generation):
            return await _check(manifest, generation, key, hands)
        case Create(manifest=manifest, generation=generation):
            return await _create(manifest, generation, key, hands)
        case Provide():
            return await _provide(action, key, hands)
        case DeleteJob():
            return await _delete_job(key, hands)
        case Hold(on=on):
            return await _hold(key, on, hands)
        case _:
            return await _touch(action, hands)


async def _touch(action: Annotate | Delete | Release, hands: Hands) -> bool:
    """Changes an existing pod. A pod that is gone is removed from the cache: no event may come for it."""
    pod, cluster = action.pod, hands.cluster
    try:
        match action:
            case Annotate():
                return await _annotate(action, hands)
            case Delete():
                return await _delete(action, hands)
            case Release():
                await cluster.release_pod(pod.namespace, pod.name, uid=pod.uid)
    except ApiError as error:
        if error.status not in (404, 409):
            raise
        raw = await cluster.get_pod(pod.namespace, pod.name) if error.status == 409 else None
        which = about(pod.job, attempt=pod.attempt, rank=pod.rank)
        if raw is not None and raw["metadata"]["uid"] == pod.uid:
            raise Conflict(f"pod {pod.name} has changed: {error}") from error
        logger.info("%s: pod %s is gone already: %s", pod.job, pod.name, error, extra=which)
        hands.caches.pods.drop(pod)
        return True
    return False


async def _annotate(action: Annotate, hands: Hands) -> bool:
    """Annotates with a short timeout, because a DELETE follows and a webhook may take half a minute."""
    pod = action.pod
    try:
        async with asyncio.timeout(ANNOTATE_SECONDS):
            raw = await hands.cluster.annotate_pod(
                pod.namespace, pod.name, uid=pod.uid, annotations=action.words
            )
    except (ApiError, TimeoutError) as error:
        if DEADLINE_ANNOTATION in action.words:
            hands.memory.not_told(pod, hands.now)
        if isinstance(error, TimeoutError):
            raise ApiError(0, f"no answer within {ANNOTATE_SECONDS:.0f} s") from error
        raise
    _remember(raw, hands)
    return True  # its DELETE is due soon, even if the watch event is late


async def _delete(action: Delete, hands: Hands) -> bool:
    """Deletes a pod. Raises Unseen where it has ended since it was observed."""
    pod, cluster = action.pod, hands.cluster
    version = None if ended(pod) else pod.resource_version
    while True:
        try:
            await cluster.delete_pod(
                pod.namespace, pod.name, uid=pod.uid, grace=action.grace, resource_version=version
            )
            return False
        except ApiError as error:
            if error.status != 409 or version is None:
                raise
            raw = await cluster.get_pod(pod.namespace, pod.name)
            live = _remember(raw, hands) if raw is not None else None
            if live is None or live.uid != pod.uid or live.resource_version == version:
                raise  # the pod is gone, or the conflict has another cause
        if ended(live):
            raise Unseen(f"pod {pod.name} has ended meanwhile")
        version = live.resource_version


async def _provide(action: Provide, key: JobKey, hands: Hands) -> bool:
    """Creates an object. 409: it exists. 404: the cluster lacks the kind, and the scheduler reports it."""
    name = action.manifest["metadata"]["name"]
    try:
        await hands.cluster.create(action.kind, action.manifest, group=action.group)
    except ApiError as error:
        if action.kind == "pods" and error.status != 409:
            return _cleanup_refused(action, error, hands)
        if action.group.startswith(API_GROUP) and _no_groups(error):
            logger.warning("%s starts without a group of Kubernetes' own: %s", key, error, extra=about(key))
            hands.memory.ungrouped.add(key)
            return True
        if error.status in (400, 403, 422) or error.status >= 500:
            hands.memory.refusals[key] = _refusal(error, action.generation, hands.now, action.kind)
            return True
        if error.status == 409 and action.kind == CLAIMS:  # new since the last read, owner unknown
            raise Conflict(f"{key}: {error}") from error
        if error.status not in (404, 409):
            raise
        logger.info("%s %s: %s", action.kind, name, error)
    return False


def _no_groups(error: ApiError) -> bool:
    """Returns whether groups are forbidden or no longer served; pods with a missing group never start."""
    return error.status == 404 or (error.status == 403 and "exceeded quota" not in str(error))


def _cleanup_refused(action: Provide, error: ApiError, hands: Hands) -> bool:
    """Records a permanent rejection (the namespace is being deleted); a quota or a webhook is retried."""
    if error.status == 404 or NAMESPACE_TERMINATING in error.causes:
        hands.memory.cleanup_refused[action.manifest["metadata"]["labels"][JOB_UID_LABEL]] = str(error)
        return True
    logger.warning("the cleanup pod is refused, and tried again: %s", error)
    return False


async def _hold(key: JobKey, on: bool, hands: Hands) -> bool:
    try:
        raw = await hands.cluster.hold_job(key.namespace, key.name, uid=key.uid, on=on)
    except ApiError as error:
        if error.status not in (404, 409, 422):
            job = hands.caches.jobs.get(key)
            if on and job is not None and error.status not in (0, 429):  # it blocks all pods; report why
                hands.memory.refusals[key] = _refusal(error, job.generation, hands.now)
            raise
        await _read_again(key, hands)
        return True
    hands.caches.jobs.put(Job.parse(raw))
    return on


async def _delete_job(key: JobKey, hands: Hands) -> bool:
    try:
        await hands.cluster.delete_job(key.namespace, key.name, uid=key.uid)
    except ApiError as error:
        if error.status not in (404, 409):
            raise
    return False


# --- creating pods ------------------------------------------------------------------------------------
async def _check(manifest: dict[str, Any], generation: int, key: JobKey, hands: Hands) -> bool:
    meta = {k: v for k, v in manifest["metadata"].items() if k != "name"}
    trial = manifest | {"metadata": meta | {"generateName": f"{manifest['metadata']['name'][:50]}-"}}
    try:
        await hands.cluster.create_pod(trial, dry_run=True)
    except ApiError as error:
        hands.memory.refusals[key] = _refusal(error, generation, hands.now)
        # An exceeded quota says nothing about the template.
        if not hands.memory.refusals[key].accepted:
            return True
    hands.memory.admit(key, generation)
    return True


async def _create(manifest: dict[str, Any], generation: int, key: JobKey, hands: Hands) -> bool:
    try:
        raw = await hands.cluster.create_pod(manifest)
    except ApiError as error:
        if error.status != 409:
            hands.memory.refusals[key] = _refusal(error, generation, hands.now)
            return True
        return await _adopt(manifest, generation, key, hands)
    hands.memory.refusals.pop(key, None)
    ATTEMPTS_STARTED.inc()
    _remember(raw, hands)
    return False  # watch events trigger the next reconcile


async def _adopt(manifest: dict[str, Any], generation: int, key: JobKey, hands: Hands) -> bool:
    """Handles an existing pod of that name: ours from before a crash, or another owner's."""
    name = manifest["metadata"]["name"]
    raw = await hands.cluster.get_pod(key.namespace, name)
    if raw is None:
        raise Conflict(f"pod {name} came and went")
    pod = _remember(raw, hands)
    hands.memory.refusals.pop(key, None)
    if pod is None or pod.job != key or pod.stray:
        hands.memory.refusals[key] = Refusal(
            generation=generation,
            reason=Reason.POD_NAME_TAKEN,
            message=f"pod {name} exists and is not this job's; delete it",
            at=hands.now,
            retry=RETRY_REFUSED,
        )
    return True


def _remember(raw: dict[str, Any], hands: Hands) -> PodView | None:
    pod = pod_view(raw)
    if pod is not None:
        hands.caches.pods.put(pod)
    return pod


def _refusal(error: ApiError, generation: int, now: datetime, kind: str = "") -> Refusal:
    """Classifies a rejection. Raises the error where there was no response, or a retry is enough."""
    words = admission_words(str(error))
    if error.status in (0, 409, 429):
        raise error
    if error.status in (400, 422):
        path = "spec.dataCache" if kind == CLAIMS else "spec.template"
        reason, words = Reason.INVALID_TEMPLATE, f"{path}: {words}"
        return Refusal(generation=generation, reason=reason, message=words, at=now, retry=RETRY_INVALID)
    quota = error.status == 403 and "exceeded quota" in words
    reason, retry = (Reason.QUOTA_EXCEEDED, RETRY_QUOTA) if quota else (Reason.REFUSED, RETRY_REFUSED)
    return Refusal(generation=generation, reason=reason, message=words, at=now, retry=retry)


# --- events -------------------------------------------------------------------------------------------
async def _tell(job: Job, events: tuple[Event, ...], hands: Hands) -> None:
    for event in events:
        try:
            await hands.cluster.create_event(job.key.namespace, _event(job, event))
        except ApiError as error:
            lost = "%s: event %s is lost: %s"
            logger.warning(lost, job.key, event.reason, error, extra=about(job.key))


def _event(job: Job, event: Event) -> dict[str, Any]:
    key, now = job.key, rfc3339(datetime.now(UTC), timespec="seconds")
    involved = {"apiVersion": API_VERSION, "kind": KIND, "name": key.name, "uid": key.uid}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{key.name[:200]}.{uuid.uuid4().hex[:12]}", "namespace": key.namespace},
        "involvedObject": involved | {"namespace": key.namespace},
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": event.message[:1000],
        "source": {"component": FIELD_MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
