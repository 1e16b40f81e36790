"""The admission of a job by its Kueue queue: why no pod may run, and what becomes of its Workload. Pure.

A job with a queue has one Workload while it wants to run. It has pods only while that is admitted. After an
eviction the attempt is ended as by a suspension, and the quota is given back once its pods have ended. While
the job is suspended it has none, so that it holds no quota and asks again with what its spec says by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from spottrain_operator.api import kueue
from spottrain_operator.api.kueue import Admission, Assigned, Told, WorkloadView
from spottrain_operator.api.node_pools import ChosenPool
from spottrain_operator.api.observed import Observed
from spottrain_operator.api.training_job import Status
from spottrain_operator.names import Condition
from spottrain_operator.policies import gang
from spottrain_operator.policies.pod_end import any_container_runs, node_lost, pod_ended

UNSEEN: Final = Admission(missing=kueue.OFF)


Step = Literal["create", "discard"] | tuple[Told, ...]
"""What to do with the Workload: create or delete it, or write these conditions to its status."""


# --- why no pod may run ---------------------------------------------------------------------------------
def waiting(o: Observed) -> str:
    """Returns why the job's queue lets no pod run now; "" where it does, or the job names none."""
    queue, seen = o.job.queue, o.admission or UNSEEN
    if not queue:
        return ""
    asks, found = f"waiting for the Kueue queue {queue} to admit the job", seen.workload
    if o.job.spec is None:  # what runs goes on, unless the queue asks for its quota
        evicted = found is not None and found.evicted and occupied(o)
        return _said(o, found, asks) if found is not None and evicted else ""
    if seen.missing:
        return "" if occupied(o) else f"{asks}: {seen.missing}"
    if found is None or found.going or found.finished:
        todo = f"{seen.unknown_class}, named by the job, does not exist" if seen.unknown_class else ""
        return f"{asks}: {todo or 'its Workload is being created'}"
    return _said(o, found, asks)


def _said(o: Observed, found: WorkloadView, asks: str) -> str:
    message = f": {found.message}" if found.message else ""
    if found.evicted and (found.reserved or occupied(o)):
        return f"Kueue has evicted the job from the queue {found.queue} ({found.evicted}){message}"
    if not found.active:
        return f"{asks}: spec.active of its Workload {found.name} is false; set it to true{message}"
    if found.evicted:
        return f"{asks} again, after its eviction ({found.evicted}){message}"
    if not found.admitted:
        return asks + (
            message or ": Kueue has reported no reason; check that a LocalQueue of this name exists"
        )
    changed = "" if occupied(o) else unfit(o, found)
    return f"{asks}: it asks again, because {changed}" if changed else ""


def occupied(o: Observed) -> bool:
    """Returns whether a pod of the job may still use the quota."""
    return any(any_container_runs(p) and not node_lost(p, o) for p in o.pods)


def unfit(o: Observed, found: WorkloadView) -> str:
    """Returns why the Workload is not what the job would ask for now; "" where it is."""
    assert o.job.spec is not None
    if found.made_for != kueue.digest(o.job.spec):
        return "the job was changed"
    asked = (o.job.queue, kueue.class_named(o.job.queue_priority, o.job.spec)[1])
    if not found.reserved and asked != (found.queue, found.priority_class):
        return "its queue or its priority class was changed"
    return ""


# --- what the pods get ----------------------------------------------------------------------------------
def assigned(o: Observed) -> Assigned:
    """Returns what the admission adds to the pods."""
    seen = o.admission or UNSEEN
    if seen.workload is None or not o.job.queue:
        return kueue.NOTHING
    total = kueue.NOTHING
    for flavor in seen.flavors.values():
        total |= flavor or kueue.NOTHING
    return total | seen.workload.updates


def problem(o: Observed, pool: ChosenPool) -> str:
    """Returns why no pod can be created in this pool with what was assigned; "" where one can."""
    seen = o.admission or UNSEEN
    if o.job.queue and seen.missing:
        return seen.missing
    if not o.job.queue or seen.workload is None or not seen.workload.admitted:
        return ""
    if seen.unread:
        return seen.unread
    if lacking := [name for name, flavor in seen.flavors.items() if flavor is None]:
        return f"ResourceFlavor {lacking[0]}, which the queue {o.job.queue} has assigned, does not exist"
    if seen.workload.by_topology:
        return (
            f"the queue {o.job.queue} has assigned nodes by topology, which the operator does not support: "
            "use a ResourceFlavor without topologyName"
        )
    return conflict(o, pool)


def conflict(o: Observed, pool: ChosenPool) -> str:
    """Returns why the assigned flavors are not for this pool's nodes; another admission may be."""
    given = assigned(o).node_selector
    selector = [{"key": k, "operator": "In", "values": [value]} for k, value in pool.selector.items()]
    broken = [rule for rule in (*selector, *pool.exclusions) if not _allows(rule, given)]
    if not any(_allows(rule, given) for rule in pool.rules):  # these are alternatives
        broken += pool.rules
    if not broken:
        return ""
    key, operator, values = broken[0]["key"], broken[0]["operator"], ", ".join(broken[0]["values"])
    return (
        f"the flavor that the queue {o.job.queue} has assigned is for nodes with {key}={given[key]}, and "
        f"pool {pool.name} for those with {key} {operator} {values}"
    )


def _allows(rule: Mapping[str, Any], given: Mapping[str, str]) -> bool:
    """Returns whether nodes with these labels may fit an expression of node affinity."""
    value = given.get(rule["key"])
    return value is None or (value in rule["values"]) is (rule["operator"] == "In")


# --- the Workload ---------------------------------------------------------------------------------------
def step(o: Observed, status: Status, pool: ChosenPool | None, *, suspended: bool) -> Step | None:
    """Returns what to do with the Workload.

    Args:
        o: The observation.
        status: The planned one.
        pool: Of the next pods; None while no attempt is possible.
        suspended: Whether the job is to have no pods, not because of its queue.
    """
    seen = o.admission or UNSEEN
    found = seen.workload
    if seen.missing or (found is not None and found.going):
        return None
    if found is None:
        wants = o.job.queue and o.admitted and pool is not None
        ends = status.terminal or suspended or o.job.deleting
        return "create" if wants and not (ends or seen.unknown_class or occupied(o)) else None
    if o.job.deleting:  # else the garbage collector comes first; a finalizer may keep the job for a while
        return None if occupied(o) else "discard"
    if status.terminal:
        return None if found.finished or occupied(o) else (_finished(status),)
    if not o.job.queue:
        return "discard"
    if o.job.spec is None:
        return None
    if not occupied(o):
        # It asks, or is admitted, for other nodes than those of the next pods.
        asks = not found.reserved and found.active  # an administrator's spec.active: false must last
        elsewhere = pool is not None and (conflict(o, pool) or (asks and found.pool != kueue.nodes_of(pool)))
        if suspended or found.finished or unfit(o, found) or elsewhere:
            return "discard"
        if found.evicted and found.reserved:
            return _released(o, found)
    # Kueue evicts what does not start in time, where it is configured to.
    changed = found.admitted and not found.evicted and all_run(o) is not bool(found.ready)
    return (_ready(all_run(o), found),) if changed else None


def all_run(o: Observed) -> bool:
    team = gang.team(o)
    return len(team) == gang.size(o) and all(p.running_since and not pod_ended(p, o) for p in team)


def _released(o: Observed, found: WorkloadView) -> tuple[Told, ...]:
    again = found.evicted in kueue.REQUEUED_AT_ONCE
    released = (
        Told(kueue.REQUEUED, again, found.evicted, found.message),
        Told(kueue.QUOTA_RESERVED, False, "Pending", found.message),
        Told(kueue.ADMITTED, False, "NoReservation", "The workload has no reservation"),
    )
    # Also where it is not True: with the reason WaitForRecovery Kueue would count from before this eviction.
    return released if found.ready is None else (*released, _ready(all_run(o), found))


def _finished(status: Status) -> Told:
    won = status.is_true(Condition.SUCCEEDED)
    end = status.condition(Condition.SUCCEEDED if won else Condition.FAILED)
    message = end.message if end is not None else ""
    return Told(kueue.FINISHED, True, "Succeeded" if won else "Failed", message)


def _ready(runs: bool, found: WorkloadView) -> Told:
    before = found.ready is not None
    if runs:
        reason = "Recovered" if before else "Started"
        return Told(kueue.PODS_READY, True, reason, "All pods reached readiness and the workload is running")
    if before and found.admitted and not found.evicted:
        return Told(
            kueue.PODS_READY, False, "WaitForRecovery", "A pod has ended, the next attempt is to come"
        )
    return Told(kueue.PODS_READY, False, "WaitForStart", "Not all pods are ready or succeeded")
