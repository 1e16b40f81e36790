"""What a job saved against on-demand nodes, and what it paid after its best evaluation. Pure.

    saving = 1 - spent / onDemandIdeal

`onDemandIdeal` is what a run without interruptions would have cost on demand, on the same nodes: the
productive time and the waits for data, which such a run has too. Start-ups, saves, restores, lost steps and
the boot and idle times of nodes are never credited.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

from spottrain_operator.api.observed import Observed
from spottrain_operator.api.training_job import CostStatus, Status
from spottrain_operator.policies.goodput import percent, total
from spottrain_operator.policies.ledger import UNKNOWN
from spottrain_operator.policies.termination import termination_message_of


def with_saving(status: Status, o: Observed) -> Status:
    """Adds to status.cost what follows from it and from status.goodput, when either was summed."""
    summed = (status.cost, status.goodput) != (o.job.status.cost, o.job.status.goodput)
    if status.cost is None or status.goodput is None or not summed:
        return status
    ideal = total(status.goodput, status, status.goodput.time or o.now).on_demand_ideal
    cost = replace(status.cost, on_demand_ideal=ideal, saving=_saving(status.cost, ideal))
    return replace(status, cost=_after_best(cost, _best_step(o)))


def _saving(cost: CostStatus, ideal: Decimal) -> str:
    """Returns the saving in percent; it is negative where the job was dearer than on-demand nodes."""
    if cost.unknown_seconds or cost.on_demand_unknown_seconds or not ideal:
        return UNKNOWN
    return percent(ideal - cost.spent, ideal)


def _best_step(o: Observed) -> int | None:
    """Returns the latest best step that a trainer has reported."""
    words = [word for pod in o.pods if pod.rank == 0 and (word := termination_message_of(pod)) is not None]
    steps = [word.bestStep for word in words] + ([o.sample.progress.bestStep] if o.sample else [])
    return max((step for step in steps if step is not None), default=None)


def _after_best(cost: CostStatus, step: int | None) -> CostStatus:
    """Counts what was paid since the best step was first reported, refunds not taken off.

    An attempt that resumes from a checkpoint before it reports an older step, until it comes to it again.
    """
    paid = cost.use_seconds + cost.boot_seconds + cost.idle_seconds
    if step is not None and step > (-1 if cost.best_step is None else cost.best_step):
        cost = replace(cost, best_step=step, best_seconds=paid)
    return cost if cost.best_step is None else replace(cost, after_best_seconds=paid - cost.best_seconds)
