"""Executes a Plan: the actions before the status, the status once, the actions after it, events last.

Actions are independent, so a failure does not stop the others. What happened to each is a value (`Result`),
and so is their summary. A rejected pod is remembered for the next plan. Correctness requires this order:

- If a pod has ended in the meantime, its end is evaluated before the status is written (`PodEnded`).
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
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from spottrain_operator import names
from spottrain_operator.api import kueue
from spottrain_operator.api.native_gangs import API_VERSION
from spottrain_operator.api.observed import (
    Action,
    Annotate,
    Check,
    Create,
    Delete,
    DeleteJob,
    Discard,
    Event,
    Hold,
    Plan,
    PodView,
    Provide,
    Refusal,
    Release,
    Tell,
    WriteBooks,
)
from spottrain_operator.api.template import admission_words
from spottrain_operator.api.training_job import Job, JobKey, Status
from spottrain_operator.api.unknown_fields import with_unknown
from spottrain_operator.api.validation import identity, parse_job
from spottrain_operator.api.views import pod_view
from spottrain_operator.api.wire import rfc3339
from spottrain_operator.control.caches import Caches
from spottrain_operator.control.memory import Memory
from spottrain_operator.control.observe import read_job
from spottrain_operator.errors import ApiError, ApiFailure
from spottrain_operator.io import metrics
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.io.logs import about
from spottrain_operator.io.metrics import ATTEMPTS_STARTED
from spottrain_operator.names import Reason
from spottrain_operator.policies.pod_end import trainer_ended

logger = logging.getLogger(__name__)

RETRY_QUOTA = timedelta(seconds=20)
RETRY_REFUSED = timedelta(seconds=30)
"""Admission may soon accept what it rejects now (a missing service account, a webhook without response)."""
RETRY_INVALID = timedelta(minutes=5)
"""What is invalid in this cluster now may be valid once an administrator has changed it."""
UNDECLARED = "field not declared in schema"
"""In the API server's message when an object has a field that its definition lacks."""
OLD_DEFINITION = (
    "the cluster's TrainingJob definition is older than this operator: apply its crds/trainingjobs.yaml"
)
NAMESPACE_TERMINATING = "NamespaceTerminating"
"""The API server's cause when it rejects new objects in a namespace that is being deleted."""
CREATED_AT_A_TIME: Final = 8
"""Maximum number of pods of one job: half of the client's creations, so that those of other jobs do not wait
behind a gang of a thousand."""
CHANGED_AT_A_TIME: Final = 32
"""Maximum number of other actions of one job: more than the client sends at once."""
MAX_NAMED = 3
"""Maximum number of failures in one message."""
TEMPLATE: Final = "spec.template"
"""The field of the job that pods come from."""
REJECTIONS: Final = frozenset(
    {
        ApiFailure.BAD_REQUEST,
        ApiFailure.FORBIDDEN,
        ApiFailure.QUOTA_EXCEEDED,
        ApiFailure.INVALID,
        ApiFailure.SERVER_ERROR,
    }
)
"""Of an object that pods need: the job waits, and its status says why."""
UNDECIDED: Final = frozenset({ApiFailure.UNREACHABLE, ApiFailure.TOO_MANY_REQUESTS})
"""The API server has neither accepted nor rejected the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The dependencies of `apply`."""

    cluster: Cluster
    caches: Caches
    memory: Memory
    now: datetime


# --- results ------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Carried out, or not needed any more."""

    again: bool = False
    """Whether to plan again at once; otherwise watch events lead to the next plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """The API server rejected an object of ours; the next plan reports it and decides when to retry."""

    refusal: Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """An object, or what the cluster serves, is not as observed: read again, plan again."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PodEnded:
    """The pod that was to be deleted has ended: its end must be evaluated before the status is written."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The request did not succeed; it is tried again with a growing delay."""

    what: str
    error: ApiError
    blocks: bool = False
    """Whether the status depends on it."""


Result = Done | Rejected | Changed | PodEnded | Failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """Some actions failed. What does not depend on them was carried out."""

    failed: tuple[Failed, ...]
    again: bool
    """Whether another action asks for a plan at once."""

    @property
    def unreachable(self) -> bool:
        return all(f.error.kind is ApiFailure.UNREACHABLE for f in self.failed)

    def __str__(self) -> str:
        words = "; ".join(f"could not {f.what}: {f.error}" for f in self.failed[:MAX_NAMED])
        more = len(self.failed) - MAX_NAMED
        return f"{words} (and {more} more)" if more > 0 else words


def _summary(results: Sequence[Result]) -> Done | Changed | Unfinished:
    failed = tuple(r for r in results if isinstance(r, Failed))
    again = any(isinstance(r, Rejected | PodEnded) or r == Done(again=True) for r in results)
    if failed:
        return Unfinished(failed=failed, again=again)
    return next((r for r in results if isinstance(r, Changed)), Done(again=again))


# --- one plan -----------------------------------------------------------------------------------------
async def apply(job: Job, plan: Plan, context: Context) -> Done | Changed | Unfinished:
    """Executes a plan; after a failure everything that does not depend on it is done all the same."""
    early = await _do_all(plan.before, job, context)
    ended = next((r for r in early if isinstance(r, PodEnded)), None)
    if ended is not None:  # the status was planned without its end
        return Changed(why=ended.why)
    if any(isinstance(r, Failed) and r.blocks for r in early):
        return _summary(early)
    if any(isinstance(a, Hold) for a in plan.before):
        job = _as_held(job, context)
    written = await _write(job, plan, context)
    if isinstance(written, Changed):
        return written
    if isinstance(written, Failed):
        return _summary([*early, written])
    late = await _do_all(plan.after, job, context)
    if plan.status is not None or not any(isinstance(r, Failed) for r in early):
        await _create_events(job, plan.events, context)
    return _summary([*early, *late])


def _as_held(job: Job, context: Context) -> Job:
    """Returns the job in the version that our change of its finalizers has made, if nothing else changed."""
    live = context.caches.jobs.get(job.key)
    same = live is not None and (live.generation, live.status, live.deleted) == (
        job.generation,
        job.status,
        job.deleted,
    )
    return live if live is not None and same else job


async def _write(job: Job, plan: Plan, context: Context) -> Done | Changed | Failed:
    """Writes the status; where a pod is created without that, confirms that the job has not changed."""
    try:
        if plan.status is not None:
            return await _write_status(job, plan.status, plan, context)
        if any(isinstance(a, Create) for a in plan.after):
            return await _confirm(job, context)
    except ApiError as error:
        what = "read the job" if plan.status is None else "write the status"
        return Failed(what=f"{what} ({OLD_DEFINITION})" if UNDECLARED in str(error) else what, error=error)
    return Done()


async def _write_status(job: Job, status: Status, plan: Plan, context: Context) -> Done | Changed:
    key = job.key
    try:
        written = await _apply_status(job, status, context)
    except ApiError as error:
        if not error.stale:
            raise
        await _read_again(key, context)
        return Changed(why=f"{key} has changed: {error}")
    context.caches.jobs.put(written)
    for measurement in plan.measurements:
        metrics.record(measurement)
    words = about(key, attempt=status.attempt, reason=str(plan.reason))
    logger.info("%s: %s: %s", key, plan.reason, plan.message, extra=words)
    return Done()


async def _apply_status(job: Job, status: Status, context: Context) -> Job:
    """Writes the status with the fields of a newer operator, unless they are no longer served."""

    async def write(body: dict[str, Any]) -> Job:
        key, version = job.key, job.resource_version
        raw = await context.cluster.apply_status(
            key.namespace, key.name, uid=key.uid, resource_version=version, status=body
        )
        return _with_status(job, status, body, raw)

    body = status.to_json()
    try:
        return await write(with_unknown(body, job.unknown))
    except ApiError as error:
        if not job.unknown or UNDECLARED not in str(error):
            raise
        logger.info("%s: fields of a newer operator are dropped: %s", job.key, error, extra=about(job.key))
        return await write(body)


def _with_status(job: Job, status: Status, sent: dict[str, Any], raw: dict[str, Any]) -> Job:
    """Returns the job as the API server has it after a status write.

    The write needed the version of `job`, so nothing else has changed. It is parsed only where the status is
    not as it was sent, for example because another controller has a condition there, or where the status
    changes how the spec is read, or may hold fields of a newer operator.
    """
    if raw.get("status") != sent or job.unknown or status.defaults != job.status.defaults:
        return parse_job(raw)
    return replace(job, status=status, resource_version=identity(raw)[1])


async def _read_again(key: JobKey, context: Context) -> Job | None:
    """Brings the cached job up to date."""
    job = await read_job(key, context.cluster)
    if job is None:
        context.caches.jobs.delete(key)
        return None
    context.caches.jobs.put(job)
    return context.caches.jobs.get(key)


async def _confirm(job: Job, context: Context) -> Done | Changed:
    live = await _read_again(job.key, context)
    if live is None or live.deleting or live.status.attempt != job.status.attempt or live.status.terminal:
        return Changed(why=f"{job.key} has changed")
    return Done()


# --- several actions ----------------------------------------------------------------------------------
async def _do_all(actions: tuple[Action, ...], job: Job, context: Context) -> list[Result]:
    """Executes all actions, even if some are rejected or slow. Pods are created last, and only if the objects
    that they need exist. Several are created at a time, so that an autoscaler sees the whole gang."""
    creates = [a for a in actions if isinstance(a, Create)]
    provides = [a for a in actions if isinstance(a, Provide)]
    going = {a.pod.uid for a in actions if isinstance(a, Delete)}
    notes = [a for a in actions if isinstance(a, Annotate) and a.pod.uid in going]
    others = [a for a in actions if not isinstance(a, Create | Provide) and a not in notes]
    results = await _at_once(others, job, context)
    # After its DELETE, whose precondition is the pod's version: it is urgent and must not conflict.
    results += await _at_once(notes, job, context)
    provided = await _at_once(provides, job, context)
    results += provided
    lacking = any(isinstance(r, Rejected | Failed) for r in provided)
    if not lacking and not any(isinstance(r, Changed | PodEnded) for r in results):
        results += await _at_once(creates, job, context, most=CREATED_AT_A_TIME)
    return results


async def _at_once(
    actions: Sequence[Action], job: Job, context: Context, most: int = CHANGED_AT_A_TIME
) -> list[Result]:
    """Executes actions concurrently, at most so many at a time."""
    waiting = iter(enumerate(actions))
    results: dict[int, Result] = {}

    async def work() -> None:
        for number, action in waiting:
            results[number] = await _do(action, job, context)

    workers = [work() for _ in range(min(most, len(actions)))]
    ends = await asyncio.gather(*workers, return_exceptions=True)
    if unexpected := [end for end in ends if end is not None]:
        raise unexpected[0]  # once the others have ended
    return [results[number] for number in sorted(results)]


async def _do(action: Action, job: Job, context: Context) -> Result:
    try:
        result = await _request(action, job, context)
    except ApiError as error:
        blocks = isinstance(action, Delete) and action.needed
        return Failed(what=_description(action), error=error, blocks=blocks)
    if isinstance(result, Rejected):
        context.memory.refusals[job.key] = result.refusal
    return result


def _description(action: Action) -> str:
    match action:
        case Annotate(pod=pod):
            return f"annotate pod {pod.name}"
        case Delete(pod=pod):
            return f"delete pod {pod.name}"
        case Release(pod=pod):
            return f"remove the finalizer of pod {pod.name}"
        case Hold():
            return "change the finalizers of the job"
        case DeleteJob():
            return "delete the job"
        case Check():
            return "dry-run a pod"
        case Tell(workload=workload):
            return f"write the status of Workload {workload.name}"
        case Discard(workload=workload):
            return f"delete Workload {workload.name}"
        case Create(manifest=manifest) | Provide(manifest=manifest) | WriteBooks(manifest=manifest):
            return f"create {manifest.get('kind', 'Pod')} {manifest['metadata']['name']}"


async def _request(action: Action, job: Job, context: Context) -> Result:
    match action:
        case Check(manifest=manifest, generation=generation):
            return await _check(manifest, generation, job.key, context)
        case Create(manifest=manifest, generation=generation):
            return await _create(manifest, generation, job.key, context)
        case Provide():
            return await _provide(action, job.key, context)
        case DeleteJob():
            return await _delete_job(job.key, context)
        case WriteBooks(manifest=manifest):
            await context.cluster.write_config_map(manifest)
            return Done()
        case Hold(on=on):
            return await _hold(job, on, context)
        case Tell() | Discard():
            return await _change_workload(action, context)
        case _:
            return await _change_pod(action, context)


# --- existing objects ---------------------------------------------------------------------------------
async def _change_pod(action: Annotate | Delete | Release, context: Context) -> Done | Changed | PodEnded:
    """Changes an existing pod. A pod that is gone is removed from the cache: no event may come for it."""
    pod, cluster = action.pod, context.cluster
    try:
        match action:
            case Annotate():
                return await _annotate(action, context)
            case Delete():
                return await _delete(action, context)
            case Release():
                await cluster.release_pod(pod.namespace, pod.name, uid=pod.uid)
                return Done()
    except ApiError as error:
        if not error.stale:
            raise
        found = error.kind is ApiFailure.CONFLICT
        raw = await cluster.get_pod(pod.namespace, pod.name) if found else None
        if raw is not None and raw["metadata"]["uid"] == pod.uid:
            return Changed(why=f"pod {pod.name} has changed: {error}")
        which = about(pod.job, attempt=pod.attempt, rank=pod.rank)
        logger.info("%s: pod %s is already gone: %s", pod.job, pod.name, error, extra=which)
        context.caches.pods.drop(pod)
        return Done(again=True)


async def _annotate(action: Annotate, context: Context) -> Done:
    """Annotates a pod. In a storm of notices it waits for its turn, while its DELETE can wait for it."""
    pod = action.pod
    left = (action.until - context.now).total_seconds() if action.until is not None else None
    try:
        async with asyncio.timeout(left):
            raw = await context.cluster.annotate_pod(
                pod.namespace, pod.name, uid=pod.uid, annotations=action.words
            )
    except (ApiError, TimeoutError) as error:
        if names.DEADLINE_ANNOTATION in action.words:
            context.memory.could_not_annotate(pod, context.now)
        if isinstance(error, TimeoutError):
            raise ApiError(0, "no response before the pod must be deleted") from error
        raise
    _remember(raw, context)
    return Done(again=True)  # its DELETE is due soon, even if the watch event is late


async def _delete(action: Delete, context: Context) -> Done | PodEnded:
    pod, cluster = action.pod, context.cluster
    version = None if trainer_ended(pod) else pod.resource_version
    while True:
        try:
            await cluster.delete_pod(
                pod.namespace, pod.name, uid=pod.uid, grace=action.grace, resource_version=version
            )
            return Done()
        except ApiError as error:
            if error.kind is not ApiFailure.CONFLICT or version is None:
                raise
            raw = await cluster.get_pod(pod.namespace, pod.name)
            live = _remember(raw, context) if raw is not None else None
            if live is None or live.uid != pod.uid or live.resource_version == version:
                raise  # the pod is gone, or the conflict has another cause
        if trainer_ended(live):
            return PodEnded(why=f"pod {pod.name} has ended meanwhile")
        version = live.resource_version


async def _hold(job: Job, on: bool, context: Context) -> Done:
    key = job.key
    try:
        raw = await context.cluster.hold_job(key.namespace, key.name, uid=key.uid, on=on)
    except ApiError as error:
        if error.stale or error.kind is ApiFailure.INVALID:
            await _read_again(key, context)
            return Done(again=True)
        if on and error.kind not in UNDECIDED:  # it blocks all pods; report why
            context.memory.refusals[key] = _refusal(error, job.generation, context.now)
        raise
    context.caches.jobs.put(parse_job(raw))
    return Done(again=on)


async def _delete_job(key: JobKey, context: Context) -> Done:
    try:
        await context.cluster.delete_job(key.namespace, key.name, uid=key.uid)
    except ApiError as error:
        if not error.stale:
            raise
    return Done()


async def _change_workload(action: Tell | Discard, context: Context) -> Done | Changed:
    """Changes the job's Workload; its next event leads to the next plan."""
    found, cluster = action.workload, context.cluster
    kind = action.api.kind(kueue.WORKLOADS)
    try:
        if isinstance(action, Discard):
            await cluster.delete_custom(kind, found.namespace, found.name, uid=found.uid)
            return Done()
        raw = await cluster.get_custom(kind, found.name, found.namespace)
        if raw is None or raw["metadata"]["uid"] != found.uid:
            return Changed(why=f"Workload {found.name} is another one by now")
        if action.release and int(raw["metadata"]["resourceVersion"]) != found.resource_version:
            return Changed(why=f"Workload {found.name} has changed: it may have been admitted since")
        patch = kueue.status_patch(raw, action.words, context.now, release=action.release)
        await cluster.patch_custom_status(kind, found.namespace, found.name, patch)
    except ApiError as error:
        if not error.stale:
            raise
        return Changed(why=f"Workload {found.name} has changed: {error}")
    return Done()


# --- new objects --------------------------------------------------------------------------------------
async def _provide(action: Provide, key: JobKey, context: Context) -> Done | Rejected | Changed:
    """Creates an object, unless it exists. A missing kind is no failure: the scheduler reports it."""
    name = action.manifest["metadata"]["name"]
    try:
        await context.cluster.create(action.kind, action.manifest, group=action.group)
    except ApiError as error:
        exists = error.kind is ApiFailure.CONFLICT
        if action.kind == "pods" and not exists:
            return _cleanup_refused(action, error, context)
        # Also where groups are no longer served: pods with a missing group never start.
        if action.group == API_VERSION and error.kind in (ApiFailure.NOT_FOUND, ApiFailure.FORBIDDEN):
            logger.warning("%s starts without a pod group: %s", key, error, extra=about(key))
            context.memory.ungrouped.add(key)
            return Changed(why=f"{key}: the next plan does without groups")
        if error.kind in REJECTIONS:
            return Rejected(refusal=_refusal(error, action.generation, context.now, _field(action)))
        if not error.stale:
            raise
        logger.info("%s %s: %s", action.kind, name, error)
    if action.group.startswith(kueue.API_GROUP):  # no pod follows for a long time, so that none shows it
        return Done(again=context.memory.refusals.pop(key, None) is not None)
    return Done()


def _cleanup_refused(action: Provide, error: ApiError, context: Context) -> Done:
    """Records a rejection: for good (the namespace is being deleted), or until the next try."""
    uid = action.manifest["metadata"]["labels"][names.JOB_UID_LABEL]
    if error.kind is ApiFailure.NOT_FOUND or NAMESPACE_TERMINATING in error.causes:
        context.memory.cleanup_refused[uid] = str(error)
        return Done(again=True)
    words = f"the API server rejects the cleanup pod: {admission_words(str(error))}"
    known = context.memory.cleanup_rejected.get(uid)
    context.memory.cleanup_rejected[uid] = words
    return Done(again=words != known)


async def _check(manifest: dict[str, Any], generation: int, key: JobKey, context: Context) -> Done | Rejected:
    meta = {k: v for k, v in manifest["metadata"].items() if k != "name"}
    trial = manifest | {"metadata": meta | {"generateName": f"{manifest['metadata']['name'][:50]}-"}}
    try:
        await context.cluster.create_pod(trial, dry_run=True)
    except ApiError as error:
        refusal = _refusal(error, generation, context.now)
        if not refusal.accepted:  # an exceeded quota says nothing about the template
            return Rejected(refusal=refusal)
    context.memory.admit(key, generation)
    return Done(again=True)


async def _create(
    manifest: dict[str, Any], generation: int, key: JobKey, context: Context
) -> Done | Rejected | Changed:
    try:
        raw = await context.cluster.create_pod(manifest)
    except ApiError as error:
        if error.kind is not ApiFailure.CONFLICT:
            return Rejected(refusal=_refusal(error, generation, context.now))
        return await _adopt(manifest, generation, key, context)
    context.memory.refusals.pop(key, None)
    ATTEMPTS_STARTED.inc()
    _remember(raw, context)
    return Done()


async def _adopt(
    manifest: dict[str, Any], generation: int, key: JobKey, context: Context
) -> Done | Rejected | Changed:
    """Handles an existing pod of that name: ours from before a crash, or another owner's."""
    name = manifest["metadata"]["name"]
    raw = await context.cluster.get_pod(key.namespace, name)
    if raw is None:
        return Changed(why=f"pod {name} was created and deleted meanwhile")
    pod = _remember(raw, context)
    if pod is not None and pod.job == key and not pod.stray:
        context.memory.refusals.pop(key, None)
        return Done(again=True)
    refusal = Refusal(
        generation=generation,
        reason=Reason.POD_NAME_TAKEN,
        message=f"pod {name} exists and is not this job's; delete it",
        at=context.now,
        retry=RETRY_REFUSED,
    )
    return Rejected(refusal=refusal)


def _remember(raw: dict[str, Any], context: Context) -> PodView | None:
    pod = pod_view(raw)
    if pod is not None:
        context.caches.pods.put(pod)
    return pod


def _field(action: Provide) -> str:
    """Returns the field of the job that an object comes from."""
    if action.group.startswith(kueue.API_GROUP):
        return f"the Workload for {names.QUEUE_LABEL}"
    return TEMPLATE


def _refusal(error: ApiError, generation: int, now: datetime, field: str = TEMPLATE) -> Refusal:
    """Classifies a rejection. Raises the error where there was no response, or a retry is enough."""
    words = admission_words(str(error))
    match error.kind:
        case ApiFailure.UNREACHABLE | ApiFailure.CONFLICT | ApiFailure.TOO_MANY_REQUESTS:
            raise error
        case ApiFailure.BAD_REQUEST | ApiFailure.INVALID:
            reason, words, retry = Reason.INVALID_TEMPLATE, f"{field}: {words}", RETRY_INVALID
        case ApiFailure.QUOTA_EXCEEDED:
            reason, retry = Reason.QUOTA_EXCEEDED, RETRY_QUOTA
        case _:
            reason, retry = Reason.REFUSED, RETRY_REFUSED
    return Refusal(generation=generation, reason=reason, message=words, at=now, retry=retry)


# --- events -------------------------------------------------------------------------------------------
async def _create_events(job: Job, events: tuple[Event, ...], context: Context) -> None:
    for event in events:
        try:
            await context.cluster.create_event(job.key.namespace, _event(job, event))
        except ApiError as error:
            lost = "%s: event %s is lost: %s"
            logger.warning(lost, job.key, event.reason, error, extra=about(job.key))


def _event(job: Job, event: Event) -> dict[str, Any]:
    key, now = job.key, rfc3339(datetime.now(UTC), timespec="seconds")
    involved = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": key.name, "uid": key.uid}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{key.name[:200]}.{uuid.uuid4().hex[:12]}", "namespace": key.namespace},
        "involvedObject": involved | {"namespace": key.namespace},
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": event.message[:1000],
        "source": {"component": names.FIELD_MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
