"""What a cloud answered: histories of rates, errors, and notes on what was left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal, InvalidOperation

from spottrain_operator.api.prices import VALID_FOR, Kind, Rate

Change = tuple[datetime, Decimal | None]
"""When a price came into force, and dollars per hour; None: it is not usable, so unknown."""


class SourceFailed(Exception):
    """One source of prices cannot be used; the text is a sentence that says which, why and what to do."""


@dataclass
class Fetched:
    """Collects the answers of one run.

    Args:
        now: When the cloud was asked.
    """

    now: datetime
    rates: dict[Kind, tuple[Rate, ...]] = field(default_factory=dict)
    """By kind: oldest first, complete from the first one on."""
    errors: list[str] = field(default_factory=list)
    """Why prices are missing that were asked for: the run has failed, though it may have found others."""
    notes: list[str] = field(default_factory=list)

    def add(self, kind: Kind, changes: Iterable[Change]) -> None:
        """Adds the price changes of one kind; it has been looked at now."""
        if rates := rates_of(changes, self.now):
            self.rates[kind] = rates

    def add_price(self, kinds: Iterable[Kind], prices: Iterable[Change], what: str) -> bool:
        """Adds the price of a thing that a cloud may list several times. Where entries differ, it has none.

        Args:
            kinds: What the price is for.
            prices: The entries that are in force.
            what: The thing, in words.

        Returns:
            Whether the cloud lists it at all.
        """
        entries = list(prices)
        amounts = {usd for _, usd in entries if usd is not None}
        if not entries:
            self.notes.append(f"there is no {what}: it stays unknown")
        if None in (usd for _, usd in entries):
            self.notes.append(f"an entry for the {what} is refused: it must be above 0")
        if len(amounts) > 1:
            listed = ", ".join(f"${usd}" for usd in sorted(amounts))
            self.notes.append(f"the {what} is refused, so it is unknown: there are several ({listed})")
        if len(amounts) == 1:
            newest = max(
                (change for change in entries if change[1] is not None), key=lambda change: change[0]
            )
            for kind in kinds:
                self.add(kind, [newest])
        return bool(entries)

    @contextmanager
    def source(self) -> Iterator[None]:
        """Records a SourceFailed, once for each sentence, and goes on."""
        try:
            yield
        except SourceFailed as error:
            if str(error) not in self.errors:
                self.errors.append(str(error))


def rates_of(changes: Iterable[Change], now: datetime) -> tuple[Rate, ...]:
    """Returns a history in which each rate ends where the next change begins, and the last one holds now."""
    ordered = _distinct(changes)
    rates = []
    for number, (since, usd) in enumerate(ordered):
        if usd is None:
            continue
        checked = now
        if number + 1 < len(ordered):
            until, following = ordered[number + 1]
            # A rate is valid for a while after `checked`; before an unknown one it must not be.
            checked = until if following is not None else until - VALID_FOR
        rates.append(Rate(usd_per_hour=usd, since=since, checked=checked))
    return tuple(rates)


def _distinct(changes: Iterable[Change]) -> list[Change]:
    """Sorts by time and removes what changes nothing; two prices for one time are none."""
    by_time: dict[datetime, Decimal | None] = {}
    for since, usd in changes:
        by_time[since] = usd if by_time.get(since, usd) == usd else None
    ordered: list[Change] = []
    for since, usd in sorted(by_time.items(), key=lambda change: change[0]):
        if not ordered or ordered[-1][1] != usd:
            ordered.append((since, usd))
    return ordered


def dollars(value: object) -> Decimal | None:
    """Returns dollars per hour; None unless it is a number above 0."""
    try:
        usd = Decimal(str(value))
    except InvalidOperation:
        return None
    return usd if usd.is_finite() and usd > 0 else None
