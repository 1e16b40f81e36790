"""The pods of an attempt as a whole: which exist, whether they are done or broken, and why. Pure.

A gang starts and stops as a whole. When one pod has ended, the others are stopped, and the cause is
determined once all have ended. A job of one worker is a gang of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from spottrain_operator.api.observed import Ending, Observed, PodView
from spottrain_operator.api.training_job import Status
from spottrain_operator.names import Cause, cause_of
from spottrain_operator.policies import interrupt, sync
from spottrain_operator.policies.cause import ending_of, without_our_deletion
from spottrain_operator.policies.pod_end import pod_ended

MOST_NAMED: Final = 3
"""Number of pods that a sentence names."""
EXTERNAL: Final = frozenset(
    {
        Cause.SPOT_NOTICE,
        Cause.NODE_LOST,
        Cause.NODE_SHUTDOWN,
        Cause.NODE_FAULT,
        Cause.DISRUPTED,
        Cause.POD_REJECTED,
    }
)
"""External causes: one on any pod explains the ends of all others."""
VISIBLE_AT_ONCE: Final = frozenset({Cause.SPOT_NOTICE, Cause.DISRUPTED})
"""Causes that are visible at once: if absent when a rank failed, they came later and do not explain it."""
BY_OPERATOR: Final = frozenset(
    {
        Cause.REPLACED,
        Cause.SCHEDULING_TIMEOUT,
        Cause.START_FAILED,
        Cause.SUSPENDED,
        Cause.STALLED,
        Cause.MOVED,
        Cause.INTERRUPT_REQUESTED,
        Cause.DEADLINE_EXCEEDED,
    }
)
"""Causes that the operator decides itself; they hold however the deleted pods end."""


def size(o: Observed) -> int:
    """Returns the number of pods of the current attempt, or of the next one where there is none yet."""
    return size_of(o, o.job.status)


def size_of(o: Observed, status: Status) -> int:
    record = status.current
    return record.workers if record is not None and record.workers else spec_size(o)


def spec_size(o: Observed) -> int:
    """Returns the number of pods of an attempt that starts now."""
    return o.job.spec.workers if o.job.spec is not None else 1


def team(o: Observed) -> tuple[PodView, ...]:
    """Returns the pods of the current attempt, by rank."""
    return tuple(sorted((p for p in o.pods if p.attempt == o.job.status.attempt), key=lambda p: p.rank))


def missing(o: Observed, status: Status) -> tuple[int, ...]:
    """Returns the ranks of this status' attempt without a pod."""
    there = {p.rank for p in o.pods if p.attempt == status.attempt}
    return tuple(rank for rank in range(size_of(o, status)) if rank not in there)


def vanished(o: Observed) -> tuple[int, ...]:
    """Returns the ranks whose pod is gone after all were there (observe.py has queried the API server)."""
    record = o.job.status.current
    return missing(o, o.job.status) if record is not None and record.complete else ()


def working(o: Observed) -> tuple[PodView, ...]:
    """Returns the pods of the current attempt that are not over, pending ones included, by rank."""
    return tuple(p for p in team(o) if not pod_ended(p, o))


def done(o: Observed) -> bool:
    """Returns whether every rank has succeeded. With our runtime rank 0's message decides (plan.py)."""
    pods = team(o)
    return len(pods) == size(o) and all(pod_ended(p, o) and ending_of(p, o).cause is Cause.DONE for p in pods)


def broken(o: Observed) -> bool:
    """Returns whether the attempt cannot continue: a rank has failed, or is being ended."""
    ours, pods = o.job.spec is None or o.job.spec.checkpoint.ours, team(o)
    failed = any(pod_ended(p, o) and ending_of(p, o).cause is not Cause.DONE for p in pods)
    # Ranks of our runtime stop together by themselves; those of others hang in a collective.
    ending = any(sync.refusal(p) is not None or (p.deleted is not None and not ours) for p in working(o))
    return bool(vanished(o)) or failed or ending


def in_one_zone(o: Observed) -> bool:
    """Returns whether the pods of an attempt must be in one zone."""
    return o.job.spec is not None and o.job.spec.capacity.same_zone and o.zoned


def preliminary_verdict(o: Observed) -> Ending:
    """Returns why the attempt breaks, as far as visible. A pod being ended explains its peers' ends."""
    ending = (p for p in team(o) if pod_ended(p, o) or p.deleted is not None or sync.refusal(p) is not None)
    return gravest([*_vanishings(o), *(_named(p, o) for p in ending)])


def verdict(o: Observed) -> Ending:
    """Returns why the attempt ended, once all pods have. Pods deleted to stop the rest are no evidence."""
    record = o.job.status.current
    if record is None or not record.stopping:
        return gravest([*_vanishings(o), *(_named(p, o) for p in team(o))])
    cause = cause_of(record.stopping)
    first = Ending(cause=cause, evidence=record.evidence, charged=bool(record.charged), reason=record.reason)
    unknown = not isinstance(cause, Cause)  # decided by a newer operator
    if cause is Cause.INTERRUPT_REQUESTED:
        return replace(first, evidence=interrupt.outcome(o, first.evidence))
    if cause in BY_OPERATOR or unknown:
        return first
    endings = [*_vanishings(o), *(_named(without_our_deletion(p, o), o) for p in team(o))]
    passed = {Cause.POD_DELETED, *(VISIBLE_AT_ONCE if first.charged else ())}
    return gravest([first, *(e for e in endings if e.cause not in passed)])


def gravest(endings: Iterable[Ending]) -> Ending:
    """Returns the ending that explains the others; among equals the first."""
    return min(endings, key=_order)


def _order(ending: Ending) -> int:
    if ending.cause is Cause.BAD_CONFIGURATION:
        return 0
    if ending.cause in EXTERNAL:
        return 1
    if ending.cause is Cause.POD_DELETED:
        return 2
    if ending.charged:
        return 3
    if ending.cause is Cause.STORE_UNREACHABLE:  # the other ranks only wait for the one without its store
        return 4
    return 6 if ending.cause is Cause.DONE else 5


def _named(pod: PodView, o: Observed) -> Ending:
    ending = ending_of(pod, o)
    return replace(ending, evidence=f"rank {pod.rank}: {ending.evidence}") if size(o) > 1 else ending


def _vanishings(o: Observed) -> list[Ending]:
    if not (ranks := vanished(o)):
        return []
    names = ", ".join(o.job.pod_name(o.job.status.attempt, rank) for rank in ranks[:MOST_NAMED])
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return [Ending(cause=Cause.POD_DELETED, evidence=f"the API server no longer has pod {names}{more}")]
