"""Executes a Plan: the actions before the status, the status once, the actions after it, events last.

Actions are independent, so a failure does not stop the others. What happened to each is a value, and so is
their summary. Correctness requires this order:

- If a pod has ended in the meantime, its end is evaluated before the status is written (`PodEnded`).
- The status precedes `Plan.after`: it records an attempt's number before its pod exists, and a pod's outcome
  before the pod is released.
- Objects that pods need (a Service, a group) precede the pods.
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
from spottrain_operator.api.observed import Event
from spottrain_operator.api.training_job import Job, Status
from spottrain_operator.api.validation import identity, parse_job
from spottrain_operator.api.wire import merge_patch, rfc3339
from spottrain_operator.control.actions import (
    Action,
    Annotate,
    Changed,
    Context,
    Create,
    Delete,
    Done,
    Hold,
    Plan,
    PodEnded,
    Provide,
    Rejected,
    Result,
)
from spottrain_operator.errors import ApiError, ApiFailure, Incomplete
from spottrain_operator.io.cluster import CREATIONS, Cluster
from spottrain_operator.io.logs import about

logger = logging.getLogger(__name__)

UNDECLARED = "unknown field"
"""In the API server's message when an object has a field that its definition lacks."""
OLD_DEFINITION = (
    "the cluster's TrainingJob definition is older than this operator: apply its crds/trainingjobs.yaml"
)
CHANGED_AT_A_TIME: Final = 32
"""Maximum number of other actions of one job: more than the client sends at once."""
MAX_NAMED = 3
"""Maximum number of failures in one message."""
AT_ONCE: Final = timedelta(0)
SOON: Final = timedelta(milliseconds=100)
"""For what has changed: its event may be on its way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The request did not succeed; it is tried again with a growing delay."""

    what: str
    error: ApiError


# --- one plan -----------------------------------------------------------------------------------------
async def apply(job: Job, plan: Plan, context: Context) -> timedelta | None:
    """Executes a plan; after a failure everything that does not depend on it is done all the same.

    Returns:
        The delay until the next plan if no event comes before.

    Raises:
        Incomplete: Some actions failed.
    """
    early = await _run_all(plan.before, job, context)
    if any(isinstance(r, PodEnded) for r in early):  # the status was planned without its end
        return _outcome(early, plan)
    if any(isinstance(a, Hold) for a in plan.before):
        job = _as_held(job, context)
    written = await _write(job, plan, context)
    if not isinstance(written, Done):
        return _outcome([*early, written], plan)
    late = await _run_all(plan.after, job, context)
    if plan.status is not None or not any(isinstance(r, Failed) for r in early):
        await _create_events(job, plan.events, context)
    outcome = _outcome([*early, *late], plan)
    if plan.books is not None:
        context.memory.of(job.key).books = plan.books
    return outcome


def _outcome(results: Sequence[Result | Failed], plan: Plan) -> timedelta | None:
    """Returns the delay until the next plan. Raises Incomplete where actions have failed."""
    changed = [r for r in results if isinstance(r, Changed | PodEnded)]
    again = any(isinstance(r, Rejected) or r == Done(again=True) for r in results)
    failed = [r for r in results if isinstance(r, Failed)]
    for each in changed:
        logger.info("%s", each.why)
    if not failed:
        return SOON if changed else AT_ONCE if again else plan.recheck_after
    words = "; ".join(f"could not {f.what}: {f.error}" for f in failed[:MAX_NAMED])
    more = f" (and {len(failed) - MAX_NAMED} more)" if len(failed) > MAX_NAMED else ""
    raise Incomplete(
        words + more,
        again=SOON if again or changed else plan.recheck_after,
        unreachable=all(f.error.kind is ApiFailure.UNREACHABLE for f in failed),
    )


# --- the actions --------------------------------------------------------------------------------------
async def _run_all(actions: tuple[Action, ...], job: Job, context: Context) -> list[Result | Failed]:
    """Runs all actions, even if some are rejected or slow. Pods are created last, and only if the objects
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
        results += await _at_once(creates, job, context, most=CREATIONS)
    return results


async def _at_once(
    actions: Sequence[Action], job: Job, context: Context, most: int = CHANGED_AT_A_TIME
) -> list[Result | Failed]:
    """Runs actions concurrently, at most so many at a time."""
    waiting = iter(enumerate(actions))
    results: dict[int, Result | Failed] = {}

    async def work() -> None:
        for number, action in waiting:
            results[number] = await _run(action, job, context)

    workers = [work() for _ in range(min(most, len(actions)))]
    ends = await asyncio.gather(*workers, return_exceptions=True)
    if unexpected := [end for end in ends if end is not None]:
        raise unexpected[0]  # once the others have ended
    return [results[number] for number in sorted(results)]


async def _run(action: Action, job: Job, context: Context) -> Result | Failed:
    try:
        try:
            return await action.run(job, context)
        except ApiError as error:
            if not error.stale:
                raise
            return await action.stale(error, job, context)
    except ApiError as error:
        return Failed(what=str(action), error=error)


# --- the status ---------------------------------------------------------------------------------------
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
        written = await patch_status(job, status, context.cluster)
    except ApiError as error:
        if not error.stale:
            raise
        await context.caches.read_job(key, context.cluster)
        return Changed(why=f"{key} has changed: {error}")
    context.caches.jobs.put(written)
    for measurement in plan.measurements:
        measurement.record()
    words = about(key, attempt=status.attempt, reason=str(plan.reason))
    logger.info("%s: %s: %s", key, plan.reason, plan.message, extra=words)
    return Done()


async def patch_status(job: Job, status: Status, cluster: Cluster) -> Job:
    """Writes what has changed of the status; returns the job as the API server has it afterwards.

    The rest stays as it is, also fields that a newer operator has written. The write needs the version of
    `job`, so nothing else has changed. The answer is parsed only where its status is not as planned, for
    example because another controller has a condition there, or where it changes how the spec is read.
    """
    key, planned = job.key, status.to_json()
    # The status that the API server has: of version 0.3 with the names that go; zeros are written once.
    stored = job.old_status or (job.status.to_json() if job.status.phase else {})
    change = {"status": merge_patch(stored, planned)}
    raw = await cluster.patch(
        names.PLURAL,
        key.name,
        key.namespace,
        change,
        uid=key.uid,
        version=job.resource_version,
        subresource="status",
    )
    if raw.get("status") != planned or status.defaults != job.status.defaults:
        return parse_job(raw)
    return replace(job, status=status, old_status=None, resource_version=identity(raw)[1])


async def _confirm(job: Job, context: Context) -> Done | Changed:
    live = await context.caches.read_job(job.key, context.cluster)
    if live is None or live.deleting or live.status.attempt != job.status.attempt or live.status.terminal:
        return Changed(why=f"{job.key} has changed")
    return Done()


# --- events -------------------------------------------------------------------------------------------
async def _create_events(job: Job, events: tuple[Event, ...], context: Context) -> None:
    for event in events:
        try:
            await context.cluster.create("events", _event(job, event))
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
