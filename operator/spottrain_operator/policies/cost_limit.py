"""spec.capacity.maxCostUSD: when a job has cost so much, and what unknown prices mean for the limit. Pure.

The sums of status.cost are written each few minutes only, so the limit is checked with the sums as of now.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal

from spottrain_operator.api.bookkeeping import Bookkeeping, Ledger
from spottrain_operator.api.observed import Observed
from spottrain_operator.policies import ledger


def with_costs(o: Observed) -> Observed:
    """Brings the ledger of a job with a limit up to now."""
    if _limit(o) is None:
        return o
    return replace(o, books=replace(o.books, ledger=ledger.updated(o, o.job.status, due=True)))


def _limit(o: Observed) -> Decimal | None:
    ends = o.job.deleting or o.job.status.terminal
    return o.job.spec.capacity.max_cost_usd if o.job.spec is not None and not ends else None


def reached(o: Observed) -> bool:
    limit = _limit(o)
    return limit is not None and o.books.ledger.sums.spent >= limit


def due(o: Observed, books: Bookkeeping) -> datetime | None:
    """Returns when to check the limit again: when it will be reached at the present rate of spending.

    The rate may change without an event of the job (a new price list), so it is not later than the next
    write of the sums.
    """
    limit, costs = _limit(o), books.ledger
    if limit is None or costs.sums.spent >= limit or not ledger.open_nodes(costs):
        return None
    hourly = sum((rate for rate in _rates(o, costs) if rate is not None), Decimal(0))
    latest = o.limits.cost_interval.total_seconds()
    seconds = min(latest, math.ceil((limit - costs.sums.spent) * 3600 / hourly)) if hourly else latest
    return o.now.replace(microsecond=0) + timedelta(seconds=seconds)


def _rates(o: Observed, costs: Ledger) -> Iterator[Decimal | None]:
    """Yields what the job pays an hour for each of its nodes; None where the price is unknown."""
    for node in costs.nodes:
        if not node.closed:
            rate = o.prices.rate(node.instance_type, node.capacity_type, node.zone, o.now)
            yield rate.usd_per_hour * node.share if rate is not None else None


def doubt(o: Observed) -> str:
    """Returns that the limit is not guaranteed; "" where it is, or there is none."""
    limit, costs = _limit(o), o.books.ledger
    if limit is None or not (costs.sums.unknown_seconds or None in _rates(o, costs)):
        return ""
    return (
        f"capacity.maxCostUSD ({limit}) is not guaranteed: node-seconds without a known price do not count; "
        "add prices (docs/cost.md)"
    )
