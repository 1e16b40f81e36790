"""What the nodes of a pool cost per hour, as far as it can be known before there is one. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal

from spottrain_operator.api.node_pools import Pool
from spottrain_operator.api.observed import Observed
from spottrain_operator.api.prices import PriceList
from spottrain_operator.api.training_job import AttemptRecord, Status
from spottrain_operator.names import INSTANCE_TYPE_LABEL, ZONE_LABEL


def instance_type(o: Observed, status: Status, pool: Pool) -> str:
    """Returns the type of the pool's nodes: by labels, else that of the job's last node; "" where unknown."""
    return _required(o, pool, INSTANCE_TYPE_LABEL) or next(
        (r.instance_type for r in _latest(status, pool) if r.instance_type), ""
    )


def hourly(o: Observed, status: Status, pool: Pool) -> Decimal | None:
    """Returns what a node of the pool costs per hour now; None where that is not known."""
    kind = instance_type(o, status, pool)
    before = (r.zone for r in _latest(status, pool) if r.pool == pool.name and r.zone)
    zone = _required(o, pool, ZONE_LABEL) or next(before, "")
    if zone:
        rate = o.prices.rate(kind, pool.type, zone, o.now)
        return rate.usd_per_hour if rate is not None else None
    return _cheapest_zone(o.prices, kind, pool.type, o.now)


def words(o: Observed, status: Status, pool: Pool) -> str:
    """Describes the nodes whose price was looked up."""
    kind = instance_type(o, status, pool) or "of an instance type that neither labels nor attempts tell"
    return f"{pool.type} nodes of pool {pool.name} ({kind})"


def _required(o: Observed, pool: Pool, label: str) -> str:
    """Returns the value that the pool or the template requires of a label; "" where any fits."""
    template = o.job.spec.template["spec"].get("nodeSelector") if o.job.spec is not None else None
    return pool.selector.get(label) or str((template or {}).get(label, ""))


def _latest(status: Status, pool: Pool) -> Iterator[AttemptRecord]:
    """Yields the attempts in this pool, newest first, and then the others."""
    newest = tuple(reversed(status.attempts))
    yield from (r for r in newest if r.pool == pool.name)
    yield from (r for r in newest if r.pool != pool.name)


def _cheapest_zone(prices: PriceList, kind: str, capacity_type: str, now: datetime) -> Decimal | None:
    """Returns the least rate of any zone: autoscalers prefer cheap ones."""
    zones = {zone for type_, capacity, zone in prices.rates if (type_, capacity) == (kind, capacity_type)}
    rates = (prices.rate(kind, capacity_type, zone, now) for zone in zones)
    return min((rate.usd_per_hour for rate in rates if rate is not None), default=None)
