"""What the operator remembers of a job beyond its status, which shows sums of it.

It is kept in one ConfigMap per job. docs/cost.md says what becomes of the sums where that is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from spottrain.contract import TimeSplit

from spottrain_operator.api.wire import decode
from spottrain_operator.errors import InvalidSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAccount:
    """A node that has, or had, pods of the job, and how far it is accounted.

    It is kept until its time is over and its pods are gone, so that nothing is counted twice.
    """

    name: str
    created: datetime | None = None
    """None: the node was gone before it was seen."""
    instance_type: str = ""
    zone: str = ""
    capacity_type: str = ""
    share: Decimal = Decimal(1)
    """The job's share of the node, by its last attempt there."""
    start: datetime
    """Since when the job pays for it."""
    bound: datetime
    """When the job's first pod was bound to it."""
    ended: datetime | None = None
    """When the last of the job's pods there ended; None while one runs."""
    accounted: datetime
    """Up to when it is in the sums."""
    attempt: int = 0
    """The attempt that pays for it now: the one whose pod was bound there last."""
    closed: bool = False
    """Whether its time is over: no more is added while it is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSums:
    """US dollars and node-seconds, by the job's shares of its nodes."""

    use: Decimal = Decimal(0)
    boot: Decimal = Decimal(0)
    idle: Decimal = Decimal(0)
    use_seconds: Decimal = Decimal(0)
    boot_seconds: Decimal = Decimal(0)
    idle_seconds: Decimal = Decimal(0)
    """Node-seconds of the three, with or without a known price."""
    unknown_seconds: Decimal = Decimal(0)
    """Node-seconds whose price is not known; they are in none of the dollars."""
    on_demand_use: Decimal = Decimal(0)
    """`use` at the on-demand prices of the same instance types and zones."""
    on_demand_unknown_seconds: Decimal = Decimal(0)
    """Node-seconds of `use` whose on-demand price is not known; they are not in `on_demand_use`."""

    def __add__(self, more: CostSums) -> CostSums:
        return CostSums(**{f.name: getattr(self, f.name) + getattr(more, f.name) for f in fields(self)})

    @property
    def spent(self) -> Decimal:
        return self.use + self.boot + self.idle

    @property
    def paid_seconds(self) -> Decimal:
        return self.use_seconds + self.boot_seconds + self.idle_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptCosts:
    """What the nodes of an attempt have cost."""

    number: int
    sums: CostSums = CostSums()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What the nodes of a job have cost."""

    time: datetime | None = None
    """Up to when the sums are."""
    nodes: tuple[NodeAccount, ...] = ()
    attempts: tuple[AttemptCosts, ...] = ()
    """Those that the status still has."""
    earlier: CostSums = CostSums()
    """Of the others."""

    @property
    def sums(self) -> CostSums:
        return sum((attempt.sums for attempt in self.attempts), self.earlier)

    def of(self, number: int) -> CostSums:
        return next((a.sums for a in self.attempts if a.number == number), CostSums())


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptTime:
    """An attempt whose seconds are not in `Timesheet.closed` yet, and what is known of them."""

    number: int
    bound: datetime
    """Since when all of its pods have a node."""
    nodes: Decimal = Decimal(0)
    """Number of these nodes, by shares of their GPUs."""
    started: datetime | None = None
    """Start of rank 0's container."""
    stopped: datetime | None = None
    """End of rank 0's container."""
    ended: datetime | None = None
    """When all of its pods had ended."""
    reported: datetime | None = None
    """When rank 0 gave `split`."""
    split: TimeSplit | None = None
    final: bool = False
    """Whether `split` is that of the termination message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeParts:
    """Seconds, by where they went."""

    productive: Decimal = Decimal(0)
    startup: Decimal = Decimal(0)
    data_wait: Decimal = Decimal(0)
    checkpoint_stall: Decimal = Decimal(0)
    restore: Decimal = Decimal(0)
    rollback: Decimal = Decimal(0)
    waiting: Decimal = Decimal(0)
    other: Decimal = Decimal(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSums(TimeParts):
    """Sums over attempts, by where their time went."""

    productive_node_seconds: Decimal = Decimal(0)
    on_demand_ideal: Decimal = Decimal(0)
    """US dollars that a run without interruptions would have cost on demand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timesheet:
    """Where the time of a job went."""

    time: datetime | None = None
    """Up to when it is."""
    unallocated: Decimal = Decimal(0)
    """Seconds that the job wanted to train while no attempt of `closed` had all its nodes, by the clock."""
    covered_until: datetime | None = None
    """The latest end of those attempts."""
    counted: int = 0
    """Number of the latest attempt in `closed`."""
    closed: TimeSums = TimeSums()
    """Sums of the attempts that are over."""
    attempts: tuple[AttemptTime, ...] = ()
    """The others that have a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptNodes:
    """The nodes of an attempt's pods."""

    number: int
    names: tuple[str, ...] = ()
    """By rank; "" while a pod has no node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bookkeeping:
    ledger: Ledger = Ledger()
    times: Timesheet = Timesheet()
    nodes: tuple[AttemptNodes, ...] = ()
    """Of the latest attempts."""
    lost: datetime | None = None
    """Until then the sums are those of the status, from which it was rebuilt."""
    written: datetime | None = None
    """When it was last written to the ConfigMap, or opened."""

    def nodes_of(self, attempt: int) -> tuple[str, ...]:
        """Returns the names of an attempt's nodes by rank; "" for a rank that has, or had, none."""
        return next((each.names for each in self.nodes if each.number == attempt), ())


NO_BOOKS: Final = Bookkeeping()
DATA_KEY: Final = "bookkeeping.json"


def books_of_config_map(raw: Mapping[str, Any]) -> Bookkeeping:
    """Reads the bookkeeping. Raises InvalidSpec where somebody has changed it."""
    text = (raw.get("data") or {}).get(DATA_KEY, "")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidSpec(f"{DATA_KEY} is not JSON: {error}") from error
    return decode(Bookkeeping, found, DATA_KEY)
