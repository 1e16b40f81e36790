"""Azure's retail prices: spot and on-demand Linux machines, in US dollars. The service needs no credentials.

Its prices are those of a region, and the price list has zones: a price is written for `REGION-1` to
`REGION-3`, as AKS labels its nodes. A machine in no availability zone has another label there, so that the
prices of a single region are also written for all zones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from spottrain_operator.api.node_pools import CapacityType
from spottrain_operator.api.wire import optional_timestamp

from spottrain_prices.fetched import Change, Fetched, SourceFailed, dollars
from spottrain_prices.wanted import Wanted
from spottrain_prices.web import Unanswered, call

PATH: Final = "/api/retail/prices"
AT_ONCE: Final = 10
"""Instance types in one query, which is part of a URL."""
MOST_PAGES: Final = 100
"""Of one query; ten types of machines fill one or two."""
ZONES: Final = ("1", "2", "3")
OTHER_SYSTEMS: Final = ("Windows", "Win")
"""Last word in the name of a product with a Windows licence."""
PORTS: Final = {"http": 80, "https": 443}

Item = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One meter's price that is in force."""

    name: str
    capacity_type: CapacityType
    change: Change
    primary: bool
    """Whether it is the meter by which Azure bills; a region may repeat it under others."""


def fetch(found: Fetched, wanted: Wanted, *, endpoint: str) -> None:
    """Adds the prices of the wanted types to `found`, and what went wrong.

    Args:
        found: Collects rates, errors and notes.
        wanted: Instance types by region.
        endpoint: URL of the service, without a path.
    """
    for region, types in wanted.items():
        zones = tuple(f"{region}-{number}" for number in ZONES)
        if len(wanted) == 1:
            zones += ("",)
        for first in range(0, len(types), AT_ONCE):
            some = types[first : first + AT_ONCE]
            with found.source():
                offers = list(_offers(endpoint, region, some, found.now))
                for name in some:
                    _add(found, region, name, [offer for offer in offers if offer.name == name], zones)


def _add(found: Fetched, region: str, name: str, offers: list[Offer], zones: tuple[str, ...]) -> None:
    for capacity_type in (CapacityType.SPOT, CapacityType.ON_DEMAND):
        these = [offer for offer in offers if offer.capacity_type == capacity_type]
        primary = [offer for offer in these if offer.primary]
        kinds = [(name, capacity_type, zone) for zone in zones]
        prices = [offer.change for offer in primary or these]
        found.add_price(kinds, prices, f"{capacity_type} price of {name} in {region}")
    if not offers:
        found.errors.append(
            f"Azure has no price of {name} in {region}: check the name and its case, or leave it out"
        )


def _offers(endpoint: str, region: str, types: tuple[str, ...], now: datetime) -> Iterator[Offer]:
    """Yields the Linux offers that are in force. Raises SourceFailed."""
    for item in _items(endpoint, region, types):
        try:
            offer = _offer(item, region, now)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise SourceFailed(
                f"{endpoint}{PATH}: an entry is not what Azure's documentation says: "
                f"{type(error).__name__} {error}"
            ) from error
        if offer is not None:
            yield offer


def _offer(item: Item, region: str, now: datetime) -> Offer | None:
    expected = {
        "currencyCode": "USD",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "armRegionName": region,
    }
    if any(item[field] != value for field, value in expected.items()) or item.get("tierMinimumUnits"):
        return None
    meter = f"{item['skuName']} {item['meterName']}"
    if "Low Priority" in meter or item["productName"].split()[-1] in OTHER_SYSTEMS:
        return None
    since, until = (optional_timestamp(item.get(f"effective{end}Date")) for end in ("Start", "End"))
    if since is None or since > now or (until is not None and until <= now):
        return None
    return Offer(
        name=item["armSkuName"],
        capacity_type=CapacityType.SPOT if "Spot" in meter.split() else CapacityType.ON_DEMAND,
        change=(since, dollars(item["retailPrice"])),
        primary=bool(item.get("isPrimaryMeterRegion")),
    )


def _items(endpoint: str, region: str, types: tuple[str, ...]) -> Iterator[Item]:
    """Yields the entries of all pages. Raises SourceFailed."""
    names = " or ".join(f"armSkuName eq {_quoted(name)}" for name in types)
    query = (
        "serviceName eq 'Virtual Machines' and priceType eq 'Consumption' "
        f"and armRegionName eq {_quoted(region)} and ({names})"
    )
    link = f"{endpoint}{PATH}?{urlencode({'$filter': query}, safe='$', quote_via=quote)}"
    for _ in range(MOST_PAGES):
        page = _page(link)
        yield from page["Items"]
        link = page.get("NextPageLink") or ""
        if not link:
            return
        if _server(link) != _server(endpoint):
            raise SourceFailed(f"{endpoint}{PATH}: the next page is on another server: {link[:200]}")
    raise SourceFailed(f"{endpoint}{PATH}: the reply has more than {MOST_PAGES} pages")


def _page(link: str) -> dict[str, Any]:
    address = link.partition("?")[0]
    try:
        reply = call("GET", link, headers={"Accept": "application/json"})
        page = json.loads(reply.body, parse_float=Decimal) if reply.status == 200 else None
    except (Unanswered, ValueError, RecursionError) as error:
        raise SourceFailed(f"request to Azure failed: {error}") from error
    if page is None:
        raise SourceFailed(f"{address} replied {reply.status}: {reply.body[:200].decode(errors='replace')}")
    if not isinstance(page, dict) or not isinstance(page.get("Items"), list):
        raise SourceFailed(
            f"{address} replied without a list of Items: is this Azure's retail price service?"
        )
    return page


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _server(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)
