"""What a cloud answered, merged with what was written before, and written as a price list. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Final

from spottrain_operator.api.prices import ALWAYS, VALID_FOR, Kind, Rate
from spottrain_operator.api.wire import rfc3339

from spottrain_prices.web import Failed

LARGEST: Final = 900 * 1024
"""Bytes; a ConfigMap holds 1 MiB."""
FOREVER: Final = datetime.max.replace(tzinfo=UTC)

Change = tuple[datetime, Decimal | None]
"""When a price came into force, and dollars per hour; None: it is not usable."""
Rates = Mapping[Kind, Sequence[Rate]]


@dataclass
class Fetched:
    """Collects the answers of one run.

    Args:
        now: When the cloud was asked.
    """

    now: datetime
    rates: dict[Kind, Rate] = field(default_factory=dict)
    """Those in force now."""
    errors: list[str] = field(default_factory=list)
    """Why prices are missing that were asked for: the run has failed, though it may have found others."""
    notes: list[str] = field(default_factory=list)

    def add(self, kinds: Iterable[Kind], entries: Sequence[Change], what: str) -> bool:
        """Adds the price of a thing that a cloud may list several times. Where entries differ, it has none.

        Args:
            kinds: What the price is for.
            entries: Those that are in force.
            what: The thing, in words.

        Returns:
            Whether the cloud lists it at all.
        """
        usable = [(since, usd) for since, usd in entries if usd is not None]
        amounts = sorted({usd for _, usd in usable})
        if not entries:
            self.notes.append(f"there is no {what}: it stays unknown")
        if len(usable) < len(entries):
            self.notes.append(f"an entry for the {what} is refused: it must be above 0")
        if len(amounts) > 1:
            listed = ", ".join(f"${usd}" for usd in amounts)
            self.notes.append(f"the {what} is refused, so it is unknown: there are several ({listed})")
        if len(amounts) == 1:
            since, usd = max(usable)
            self.rates |= dict.fromkeys(kinds, Rate(usd_per_hour=usd, since=since, checked=self.now))
        return bool(entries)

    @contextmanager
    def part(self, failed: str = "") -> Iterator[None]:
        """Records a Failed, once for each sentence, which begins with `failed`; the run goes on."""
        try:
            yield
        except Failed as error:
            if f"{failed}{error}" not in self.errors:
                self.errors.append(f"{failed}{error}")


def dollars(value: object) -> Decimal | None:
    """Returns dollars per hour; None unless it is a number above 0."""
    try:
        usd = Decimal(str(value))
    except InvalidOperation:
        return None
    return usd if usd.is_finite() and usd > 0 else None


# --- with what was written before -------------------------------------------------------------------------
def merged(old: Rates, fetched: Mapping[Kind, Rate], *, since: datetime) -> dict[Kind, list[Rate]]:
    """Returns the rates of both: a history, as long as this job has run.

    What was not fetched stays as it is, and becomes unknown by its `checked`. Rates that ended before `since`
    are dropped.
    """
    result: dict[Kind, list[Rate]] = {}
    for kind in sorted({*old, *fetched}):
        new = [fetched[kind]] if kind in fetched else []
        before = [rate for rate in old.get(kind, ()) if not new or rate.since < new[0].since]
        if current := [rate for rate, end in _with_ends([*before, *new]) if end >= since]:
            result[kind] = current
    return result


def as_text(rates: Rates, *, largest: int = LARGEST) -> tuple[str, int]:
    """Returns the price list, and how many rates were left out because it would be too large.

    Those that ended first are left out, so that the time before the others is unknown.
    """
    ended = [(end, _entry(kind, rate)) for kind in rates for rate, end in _with_ends(rates[kind])]
    newest_first = sorted(range(len(ended)), key=lambda number: (ended[number][0], number), reverse=True)
    size, kept = len("[]"), set[int]()
    for number in newest_first:
        size += len(ended[number][1].encode()) + len(",\n")
        if size > largest:
            break
        kept.add(number)
    text = ",\n".join(ended[number][1] for number in sorted(kept))
    return f"[{text}]", len(ended) - len(kept)


def _with_ends(history: Sequence[Rate]) -> Iterator[tuple[Rate, datetime]]:
    """Yields each rate of one kind with the time when the next one began, or when it becomes unknown.

    No rate ends before the one that it replaced: whoever drops what ended first never leaves an older rate
    in force.
    """
    for number, rate in enumerate(history, start=1):
        known = FOREVER if rate.checked is None else max(rate.since, rate.checked + VALID_FOR)
        yield rate, history[number].since if number < len(history) else known


def _entry(kind: Kind, rate: Rate) -> str:
    instance_type, capacity_type, zone = kind
    entry = {
        "instanceType": instance_type,
        "capacityType": capacity_type,
        "zone": zone,
        "usdPerHour": f"{rate.usd_per_hour.normalize():f}",
        "since": rfc3339(rate.since) if rate.since != ALWAYS else "",
        "checked": rfc3339(rate.checked) if rate.checked is not None else "",
    }
    return json.dumps({name: text for name, text in entry.items() if text}, separators=(",", ":"))
