"""Derives the consequences of a decision: status and conditions, pods to delete or create, the next recheck.

Pure; derived from the new status alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spottrain_operator.api import kueue, native_gangs
from spottrain_operator.api.bookkeeping import Bookkeeping
from spottrain_operator.api.observed import Notice, Observed, PodView
from spottrain_operator.api.training_job import AppliedDefaults, Status
from spottrain_operator.control.actions import (
    Action,
    Annotate,
    Create,
    Delete,
    Discard,
    Hold,
    Provide,
    Release,
    Tell,
)
from spottrain_operator.names import SAVE_ADVISED_ANNOTATION, Condition
from spottrain_operator.policies import (
    accounting,
    admission,
    capacity,
    cheapest,
    cleanup,
    cost_limit,
    gang,
    handover,
    hang,
    interrupt,
    ledger,
    lifecycle,
    placement,
    runtime,
    starting,
)
from spottrain_operator.policies.cause import notice_of
from spottrain_operator.policies.pod_end import (
    any_container_runs,
    node_lost,
    pod_ended,
    saving_predecessor,
    trainer_ended,
)
from spottrain_operator.rendering import objects, trainer_pod
from spottrain_operator.status.changes import (
    progress_due,
    with_back_fill,
    with_display,
    with_pods,
    with_progress,
    with_silent_trainer,
    with_vanished,
)
from spottrain_operator.status.conditions import with_conditions, with_deletion

URGENT: Final = timedelta(seconds=10)
"""If the deadline is nearer than this, SIGTERM does not wait for the deadline file."""
AT_ONCE: Final = timedelta(seconds=1)
RECHECK: Final = timedelta(seconds=10)
"""Interval of looking again at what no event tells the job: a deleted job's pod, a pod that ends."""
SLOW_RECHECK: Final = timedelta(seconds=30)
"""The same where it rarely changes: classes and flavors of a queue, nodes that a pending pod avoids."""
DEFAULTS_RECHECK: Final = timedelta(minutes=5)
"""Interval of reading a namespace's defaults again, for a job that they may mend."""


# --- the status -----------------------------------------------------------------------------------------
def settled(o: Observed, status: Status) -> tuple[Status, Bookkeeping]:
    """Returns the status with all facts from pods and progress, and the bookkeeping."""
    status = handover.withdrawn(o, status)
    if o.job.deleting:
        return with_deletion(with_pods(status, o), o), o.books
    status = interrupt.answered(o, replace(status, gate_until=handover.gate(o, status)))
    return accounting.settled(o, with_display(_with_progress(o, status), o))


def _with_progress(o: Observed, status: Status) -> Status:
    quiet = _with_facts(o, with_silent_trainer(status, o))
    sample, record = o.sample, status.current
    if sample is None or status.terminal or sample.progress.attempt != status.attempt:
        return quiet
    if record is None or record.cause:  # it was heard before the attempt ended
        return quiet
    if quiet == o.job.status and not progress_due(status, sample, o.limits.progress_interval):
        return quiet
    return _with_facts(o, with_progress(status, o, sample))


def _with_facts(o: Observed, status: Status) -> Status:
    status = starting.with_start_error(with_back_fill(with_vanished(with_pods(status, o), o)), o)
    status = with_conditions(status, o, note="; ".join(trainer_pod.notes(o, status).values()))
    if lifecycle.may_change(o.job.status) or lifecycle.may_change(status):
        status = replace(status, template_hash=o.job.template_hash or status.template_hash)
    if status.defaults is None and o.applied is not None and status.is_true(Condition.ACCEPTED):
        return replace(status, defaults=o.applied if o.applied != AppliedDefaults() else None)
    return status


# --- pods to delete -------------------------------------------------------------------------------------
def stale_first(o: Observed) -> Iterator[Action]:
    """First action of every reconcile: deletes the pods of earlier attempts."""
    for pod in o.pods:
        if pod.attempt < o.job.status.attempt and pod.deleted is None:
            yield removal(o, pod)


def hold_first(o: Observed) -> Iterator[Action]:
    """Sets our finalizer on the job, before the first attempt and when deletionPolicy has changed."""
    settled = o.job.deleting or o.job.status.terminal or o.job.spec is None
    if not settled and not o.rejected and o.job.holds_checkpoints != cleanup.wanted(o):
        yield Hold(on=cleanup.wanted(o))


SYNC_STOP: Final = 120
"""Seconds that a pod with checkpoint.mode Sync has at most when the operator stops it. Its own grace period
is for the last upload after a normal end; a script may ignore SIGTERM, and a restore go on, for all of it."""


def removal(o: Observed, pod: PodView) -> Delete:
    """Returns a deletion with the pod's own grace period; forced where no kubelet can end the pod."""
    if node_lost(pod, o) and not trainer_ended(pod):
        return Delete(pod=pod, grace=0)
    hurried = pod.sync is not None and pod.uploading is None
    return Delete(pod=pod, grace=min(pod.grace, SYNC_STOP) if hurried else None)


def after(o: Observed, status: Status, before: tuple[Action, ...]) -> Iterator[Action]:
    """Yields the actions that come after the status is written: pods to delete, release and create."""
    going = {a.pod.uid for a in before if isinstance(a, Delete)}
    for pod in o.pods:
        yield from _remove(o, status, pod, pod.uid in going)
    yield from _ask_queue(o, status)
    if o.job.deleting:
        yield from _delete_checkpoints(o)
    elif not (status.terminal or o.job.spec is None or capacity.problem(o)):
        yield from _create_missing(o, status)
        if status.asking is not None and not o.rejected:  # a request for spot, beside an attempt on demand
            yield from _start(o, handover.ahead(o, status, status.asking))


def _delete_checkpoints(o: Observed) -> Iterator[Action]:
    """Creates the pod that deletes a deleted job's checkpoints, once no trainer is left."""
    wanted = o.job.holds_checkpoints and cleanup.wanted(o) and cleanup.trainers_ended(o)
    if wanted and not (o.cleaning or cleanup.gives_up(o) or cleanup.never_ran(o)):
        pool = capacity.pool_of(o, o.job.status)
        yield Provide(kind="pods", manifest=objects.cleanup(o.job, pool, sync_image=o.sync_image))


def _remove(o: Observed, status: Status, pod: PodView, going: bool) -> Iterator[Action]:
    """Deletes a pod that is no longer needed, and releases it once its outcome is recorded."""
    record = status.record(pod.attempt)
    attempt_ended = record is not None and bool(record.cause)
    stale = pod.attempt < status.attempt or (
        attempt_ended and (not status.terminal or pod.attempt > status.attempt)
    )
    # A pod with a notice is annotated first (plan.py): its time is shorter than its grace period.
    stopping = record is not None and bool(record.stopping)
    stopped = stopping and not pod_ended(pod, o) and notice_of(pod, o) is None
    # A finished job's pod stays for its logs, unless one of its containers still occupies the node.
    leaving = o.job.deleting and o.job.holds_checkpoints  # else the garbage collector deletes it with the job
    unwanted = stale or stopped or leaving or (status.terminal and any_container_runs(pod))
    stuck = pod.deleted is not None and bool(node_lost(pod, o)) and not trainer_ended(pod)
    if unwanted and not going and (pod.deleted is None or stuck):
        yield removal(o, pod)
    outcome_written = stale or status.terminal
    if pod.holds_outcome and (o.job.deleting or (outcome_written and pod_ended(pod, o))):
        yield Release(pod=pod)


# --- pods to create -------------------------------------------------------------------------------------
def _create_missing(o: Observed, status: Status) -> Iterator[Action]:
    assert o.job.spec is not None
    record = status.current
    ended = record is None or record.cause or record.stopping
    if ended or not o.admitted or lifecycle.halted(o) is not None:
        return
    if cleanup.wanted(o) and not o.job.holds_checkpoints:  # a job deleted now would leave its checkpoints
        return
    lacking = len(gang.missing(o, status))
    begun = lacking < gang.size_of(o, status)  # a start that has begun is always completed
    lacks = lacking and (begun or status.next_start is None or status.next_start <= o.now)
    due = lacks and not (status.attempt == o.job.status.attempt and gang.broken(o))
    if not due or o.rejected or lifecycle.changed(o):
        return
    unknown = any(p.deleted is None for p in handover.saving(o, status))  # how long the earlier ones may save
    if unknown or admission.problem(o, capacity.pool_of(o, status)):
        return
    yield from _start(o, status)


def _start(o: Observed, status: Status) -> Iterator[Action]:
    """Creates the missing pods, and the Service and groups that they need."""
    assert o.job.spec is not None
    if o.job.spec.workers > 1:
        yield Provide(kind="services", manifest=objects.service(o.job), generation=o.job.generation)
    # An attempt that began without a group goes on so: all of its pods are in it, or none is.
    begun = all(p.grouped for p in o.pods if p.attempt == status.attempt)
    grouped = o.has_gangs and begun and native_gangs.fits(o.job.spec)
    if grouped:
        group, generation = objects.gang(o.job, status, zoned=o.zoned), o.job.generation
        kind = f"{native_gangs.API_VERSION}/{native_gangs.POD_GROUPS}"
        yield Provide(kind=kind, manifest=group, generation=generation)
    pool, assigned = capacity.pool_of(o, status), admission.assigned(o)
    for place in placement.placements(o, status, pool, grouped):
        here = replace(place, assigned=assigned)
        manifest = trainer_pod.pod(o.job, status, pool, here, sync_image=o.sync_image)
        yield Create(manifest=manifest, generation=o.job.generation, attempt=status.attempt)


def _ask_queue(o: Observed, status: Status) -> Iterator[Action]:
    """Asks the job's Kueue queue by a Workload, and tells Kueue what becomes of it."""
    pool, record = None, status.current
    if o.job.spec is not None and not capacity.problem(o):  # of the pods that are created next
        begun = record is not None and not record.cause
        pool = capacity.pool_of(o, status) if begun else capacity.choose(o, status)
    step = admission.step(o, status, pool, suspended=lifecycle.suspended(o) is not None)
    seen = o.admission
    if step is None or seen is None:
        return
    if step == "create":
        if pool is not None and not o.rejected:
            manifest = objects.workload(o.job, status, pool, seen.priority, sync_image=o.sync_image)
            yield Provide(kind=kueue.WORKLOADS, manifest=manifest, generation=o.job.generation)
        return
    assert seen.workload is not None
    yield Discard(workload=seen.workload) if step == "discard" else Tell(workload=seen.workload, words=step)


# --- annotations of pods --------------------------------------------------------------------------------
def delete_at(o: Observed, pod: PodView, notice: Notice) -> datetime:
    """Returns when to delete: once the pod's file has the annotation, or at once if urgent."""
    urgent = notice.deadline - o.now < URGENT
    return o.now if urgent else o.annotated_at.get(pod.uid, o.now) + o.limits.annotation_lead


def advice(o: Observed) -> Iterator[Action]:
    """Yields annotations that pass a node's advice to save on to its pods."""
    for pod in gang.working(o):
        node = o.nodes.get(pod.node)
        if node is not None and node.save_advised and node.save_advised != pod.save_advised:
            yield Annotate(pod=pod, words={SAVE_ADVISED_ANNOTATION: node.save_advised})


# --- the next recheck -----------------------------------------------------------------------------------
def recheck_after(
    o: Observed, status: Status, books: Bookkeeping, actions: tuple[Action, ...] = ()
) -> timedelta | None:
    """Returns the delay after which time alone changes the decision; None for never.

    The decision is about the job as this plan leaves it: its own write of the status is no news to it.
    """
    o = replace(o, job=replace(o.job, status=status))
    later = [t - o.now for t in _times(o, books) if t is not None and t > o.now]
    if any(isinstance(a, Create) for a in actions):
        # The watch event of a pod that is cached from its POST is ignored, and a pod that no scheduler
        # handles has no other event.
        later.append(AT_ONCE)
    return min(later) + timedelta(milliseconds=50) if later else None


def _times(o: Observed, books: Bookkeeping) -> Iterator[datetime | None]:
    status = o.job.status
    yield from (o.now + interval for interval in _rechecks(o, books))
    if status.terminal and (end := lifecycle.ends_of_life(o, status)) is not None:
        yield max(end, o.now + AT_ONCE)
    if not status.terminal:
        yield status.next_start
        yield lifecycle.deadline(o, status)
        yield cost_limit.due(o, books)
        yield hang.due(o)
        yield starting.due(o)
        yield starting.next_read(o)
        yield handover.due(o)
        if not capacity.problem(o):
            yield capacity.due_pending(o)
            yield cheapest.due(o)
        if o.refusal is not None:
            yield o.refusal.at + o.refusal.retry
        yield from runtime.times(status, o)
    for pod in gang.team(o):
        if pod.deleted is None and (notice := notice_of(pod, o)) is not None:
            # After that time, recheck until the deletion is seen.
            yield max(delete_at(o, pod, notice), o.now + AT_ONCE)
    yield from (p.deleted + o.limits.dead_slack for p in o.pods if p.deleted is not None and p.node)


def _rechecks(o: Observed, books: Bookkeeping) -> Iterator[timedelta]:
    """Yields how soon to look again at what no event tells the job."""
    team, status = gang.team(o), o.job.status
    if o.job.deleting and o.job.holds_checkpoints:
        yield RECHECK  # at the pod that deletes them
    if not status.attempt and saving_predecessor(o):
        yield RECHECK
    if any(p.deleted is not None and p.rank == 0 and not pod_ended(p, o) for p in team):
        yield RECHECK  # at what its trainer answers
    if ledger.idle_nodes(books.ledger) or any(map(placement.is_kept_off, team)):
        yield SLOW_RECHECK
    if _queue_lacks(o):
        yield SLOW_RECHECK
    refused = o.job.spec is None or capacity.problem(o)
    if not status.terminal and o.applied is not None and refused:
        yield DEFAULTS_RECHECK


def _queue_lacks(o: Observed) -> bool:
    """Returns whether the job waits for something of its queue beside its Workload."""
    seen = o.admission
    if seen is None:
        return False
    if o.job.status.terminal:  # until Kueue knows, the quota is held
        return seen.workload is not None and not seen.workload.finished
    lacks = seen.missing or seen.unread or seen.unknown_class or None in seen.flavors.values()
    return bool(o.job.queue and lacks)
