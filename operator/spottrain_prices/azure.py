"""Azure's retail prices: spot and on-demand Linux machines, in US dollars. The service needs no credentials.

Its prices are those of a region, and the price list has zones: a price is written for `REGION-1` to
`REGION-3`, as AKS labels its nodes. A machine in no availability zone has another label there, so that the
prices of a single region are also written for all zones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from spottrain_operator.api.node_pools import CapacityType
from spottrain_operator.api.wire import optional_timestamp

from spottrain_prices.rates import Change, Fetched, dollars
from spottrain_prices.web import Failed, call

PATH: Final = "/api/retail/prices"
AT_ONCE: Final = 10
"""Instance types in one query, which is part of a URL."""
MOST_PAGES: Final = 100
"""Of one query; ten types of machines fill one or two."""
ZONES: Final = ("1", "2", "3")
OTHER_SYSTEMS: Final = ("Windows", "Win")
"""Last word in the name of a product with a Windows licence."""
PORTS: Final = {"http": 80, "https": 443}


class Offer(NamedTuple):
    """One meter's price that is in force."""

    name: str
    capacity_type: CapacityType
    primary: bool
    """Whether it is the meter by which Azure bills; a region may repeat it under others."""
    change: Change


def fetch(found: Fetched, wanted: Mapping[str, tuple[str, ...]], *, endpoint: str) -> None:
    """Adds the prices of the wanted types to `found`, and what went wrong.

    Args:
        found: Collects rates, errors and notes.
        wanted: Instance types by region.
        endpoint: URL of the service, without a path.
    """
    for region, types in wanted.items():
        zones = [f"{region}-{number}" for number in ZONES] + ([""] if len(wanted) == 1 else [])
        for first in range(0, len(types), AT_ONCE):
            some = types[first : first + AT_ONCE]
            with found.part():
                offers = list(_offers(endpoint, region, some, found.now))
                for name in some:
                    _add(found, name, region, zones, [offer for offer in offers if offer.name == name])


def _add(found: Fetched, name: str, region: str, zones: list[str], offers: list[Offer]) -> None:
    if not offers:
        found.errors.append(
            f"Azure has no price of {name} in {region}: check the name and its case, or leave it out"
        )
    for kind in (CapacityType.SPOT, CapacityType.ON_DEMAND):
        these = [offer for offer in offers if offer.capacity_type is kind]
        these = [offer for offer in these if offer.primary] or these
        prices = [offer.change for offer in these]
        found.add([(name, kind, zone) for zone in zones], prices, f"{kind} price of {name} in {region}")


def _offers(endpoint: str, region: str, types: tuple[str, ...], now: datetime) -> Iterator[Offer]:
    """Yields the Linux offers that are in force. Raises Failed."""
    try:
        for item in _items(endpoint, region, types):
            if (offer := _offer(item, region, now)) is not None:
                yield offer
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"{type(error).__name__} {error}"
        raise Failed(f"{endpoint}{PATH}: an entry is not what Azure's documentation says: {what}") from error


def _offer(item: Mapping[str, Any], region: str, now: datetime) -> Offer | None:
    billed = item["currencyCode"], item["unitOfMeasure"], item["type"], item["armRegionName"]
    meter = f"{item['skuName']} {item['meterName']}"
    if billed != ("USD", "1 Hour", "Consumption", region) or item.get("tierMinimumUnits"):
        return None
    if "Low Priority" in meter or item["productName"].split()[-1] in OTHER_SYSTEMS:
        return None
    since, until = (optional_timestamp(item.get(f"effective{end}Date")) for end in ("Start", "End"))
    if since is None or since > now or (until is not None and until <= now):
        return None
    kind = CapacityType.SPOT if "Spot" in meter.split() else CapacityType.ON_DEMAND
    price = dollars(item["retailPrice"])
    return Offer(item["armSkuName"], kind, bool(item.get("isPrimaryMeterRegion")), (since, price))


def _items(endpoint: str, region: str, types: tuple[str, ...]) -> Iterator[Any]:
    """Yields the entries of all pages. Raises Failed."""
    names = " or ".join(f"armSkuName eq {_quoted(name)}" for name in types)
    query = (
        "serviceName eq 'Virtual Machines' and priceType eq 'Consumption' "
        f"and armRegionName eq {_quoted(region)} and ({names})"
    )
    link = f"{endpoint}{PATH}?{urlencode({'$filter': query}, safe='$', quote_via=quote)}"
    for _ in range(MOST_PAGES):
        try:
            page = call("GET", link)
        except Failed as error:
            raise Failed(f"request to Azure failed: {error}") from error
        if not isinstance(page, dict) or not isinstance(page.get("Items"), list):
            raise Failed(
                f"{endpoint}{PATH} replied without a list of Items: is this Azure's retail price service?"
            )
        yield from page["Items"]
        link = page.get("NextPageLink") or ""
        if not link:
            return
        if _server(link) != _server(endpoint):
            raise Failed(f"{endpoint}{PATH}: the next page is on another server: {link[:200]}")
    raise Failed(f"{endpoint}{PATH}: the reply has more than {MOST_PAGES} pages")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _server(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)
