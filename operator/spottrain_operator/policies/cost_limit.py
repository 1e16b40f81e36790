"""spec.capacity.maxCostUSD: when a job has cost so much, and what unknown prices mean for the limit. Pure.

The sums of status.cost are written each few minutes only, so the limit is checked with the sums as of now.
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from spottrain_operator.api.bookkeeping import Bookkeeping
from spottrain_operator.api.observed import Observed, Spending
from spottrain_operator.names import Condition, Reason
from spottrain_operator.policies import ledger
from spottrain_operator.policies.runtime import Verdict

AHEAD: Final = timedelta(minutes=1)
"""Over this time the rate of spending is computed."""


def with_spending(o: Observed) -> Observed:
    """Fills `spending` for a job with a limit."""
    if _limit(o) is None or o.spending is not None:
        return o
    at = o.now.replace(microsecond=0)
    sums, later = (found.sums for found in ledger.ledgers_at(o, at, at + AHEAD))
    found = Spending(
        spent=sums.spent,
        per_second=(later.spent - sums.spent) / int(AHEAD.total_seconds()),
        at=at,
        known=not later.unknown_seconds,
        priced=later.unknown_seconds == sums.unknown_seconds,
    )
    return replace(o, spending=found)


def _limit(o: Observed) -> Decimal | None:
    ends = o.job.deleting or o.job.status.terminal
    return o.job.spec.capacity.max_cost_usd if o.job.spec is not None and not ends else None


def reached(o: Observed) -> bool:
    limit = _limit(o)
    return limit is not None and o.spending is not None and o.spending.spent >= limit


def due(o: Observed, books: Bookkeeping) -> datetime | None:
    """Returns when to check the limit again: when it will be reached at the present rate of spending.

    The rate may change without an event of the job (a new price list), so it is not later than the next
    write of the sums.
    """
    limit, spending = _limit(o), o.spending
    if limit is None or spending is None or spending.spent >= limit or not ledger.open_nodes(books.ledger):
        return None
    latest = o.now + o.limits.cost_interval
    if not spending.per_second:
        return latest
    seconds = (limit - spending.spent) / spending.per_second
    if seconds > o.limits.cost_interval.total_seconds():
        return latest
    return spending.at + timedelta(seconds=math.ceil(seconds))


def unknown(o: Observed) -> bool:
    """Returns whether a second had no known price, so that the limit cannot be guaranteed."""
    return _limit(o) is not None and o.spending is not None and not o.spending.known


def unpriced(o: Observed) -> bool:
    """Returns whether the price of a node that the job has now is unknown."""
    return _limit(o) is not None and o.spending is not None and not o.spending.priced


def verdict(o: Observed, stays_on_spot: str) -> Verdict | None:
    """Returns the condition CostLimited: whether the limit can be guaranteed.

    Args:
        o: The observation.
        stays_on_spot: Why the job must not use on-demand; "" where it may.
    """
    limit, known = _limit(o), o.job.status.condition(Condition.COST_LIMITED)
    if limit is None:
        if o.job.spec is None or known is None or o.job.spec.capacity.max_cost_usd is not None:
            return None
        return False, Reason.NO_MAX_COST, "capacity.maxCostUSD is not set"
    words = f"the job saves and stops when it has cost {limit:f} US dollars (capacity.maxCostUSD)"
    if unknown(o):
        words = (
            f"capacity.maxCostUSD ({limit:f}) cannot be guaranteed, because node-seconds without a "
            "known price are not counted (status.cost.unknownSeconds)"
        )
    if unpriced(o):
        words += "; add the prices of the job's nodes to the operator's price list"
    if stays_on_spot:
        words += f". The job does not use on-demand, because {stays_on_spot}"
    known_prices = not unknown(o) and not stays_on_spot
    return not unknown(o), Reason.PRICES_KNOWN if known_prices else Reason.PRICE_UNKNOWN, words
