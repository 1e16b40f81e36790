"""Azure's retail prices against a stub of the service, over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from spottrain_operator.api.prices import Kind, PriceList
from spottrain_prices import azure
from spottrain_prices.rates import Fetched

from tests.support.pricestub import PriceStub, meter

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
A100 = "Standard_NC24ads_A100_v4"
T4 = "Standard_NC4as_T4_v3"


def fetch(stub: PriceStub, *types: str, regions: tuple[str, ...] = ("eastus",)) -> Fetched:
    found = Fetched(NOON)
    azure.fetch(found, {region: types for region in regions}, endpoint=stub.url)
    return found


def price(found: Fetched, kind: Kind, at: datetime = NOON) -> Decimal | None:
    rate = PriceList(rates={each: (rate,) for each, rate in found.rates.items()}).rate(*kind, at)
    return rate.usd_per_hour if rate else None


def offers(name: str, on_demand: float, spot: float, **changes: str) -> list[dict[str, object]]:
    """What the service has of one type: Linux and Windows, on-demand, spot and low priority."""
    linux = meter(name, on_demand, **changes)
    words, product = linux["meterName"], linux["productName"]
    result = [linux]
    for suffix, usd in (("Spot", spot), ("Low Priority", spot / 2)):
        named = {"skuName": f"{words} {suffix}", "meterName": f"{words} {suffix}"}
        result.append(linux | named | {"retailPrice": usd})
    for windows in ("Windows", "Win"):
        result += [
            item | {"productName": f"{product} {windows}", "retailPrice": item["retailPrice"] * 2}
            for item in result[:3]
        ]
    result.append(linux | {"type": "DevTestConsumption", "retailPrice": 1.0})
    result.append(linux | {"type": "Reservation", "retailPrice": 20000.0, "reservationTerm": "1 Year"})
    return result


def test_linux_prices_on_demand_and_spot_are_found_among_the_others(stub: PriceStub) -> None:
    stub.azure = offers(A100, 3.673, 0.734568)
    found = fetch(stub, A100)
    assert price(found, (A100, "OnDemand", "eastus-1")) == Decimal("3.673")
    assert price(found, (A100, "Spot", "eastus-3")) == Decimal("0.734568")
    assert not found.errors and not found.notes


def test_the_service_is_asked_for_these_machines_in_this_region(stub: PriceStub) -> None:
    stub.azure = offers(A100, 3.673, 0.7)
    fetch(stub, A100, T4)
    (asked,) = stub.asked
    assert asked["Action"] == "/api/retail/prices"
    assert asked["$filter"] == (
        "serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armRegionName eq 'eastus' "
        f"and (armSkuName eq '{A100}' or armSkuName eq '{T4}')"
    )


def test_many_types_are_several_queries_and_a_reply_may_have_pages(stub: PriceStub) -> None:
    types = tuple(f"Standard_NC{number}" for number in range(23))
    stub.azure = [item for name in types for item in offers(name, 3.0, 1.0)]
    stub.page = 7
    found = fetch(stub, *types)
    assert {name for name, _, _ in found.rates} == set(types) and not found.errors
    assert len({request["$filter"] for request in stub.asked}) == 3 and len(stub.asked) > 3


def test_the_price_of_the_only_region_counts_for_machines_in_no_zone(stub: PriceStub) -> None:
    stub.azure = offers(A100, 3.673, 0.7)
    assert price(fetch(stub, A100), (A100, "Spot", "0")) == Decimal("0.7")


def test_of_two_regions_each_has_its_own_price(stub: PriceStub) -> None:
    stub.azure = offers(A100, 3.673, 0.7) + offers(A100, 4.0, 1.5, armRegionName="westeurope")
    found = fetch(stub, A100, regions=("eastus", "westeurope"))
    assert price(found, (A100, "Spot", "eastus-2")) == Decimal("0.7")
    assert price(found, (A100, "Spot", "westeurope-2")) == Decimal("1.5")
    assert price(found, (A100, "Spot", "0")) is None


def test_a_price_is_in_force_between_its_dates_and_known_for_a_day(stub: PriceStub) -> None:
    stub.azure = [
        meter(T4, 0.5, effectiveStartDate="2026-01-01T00:00:00Z", effectiveEndDate="2026-11-01T00:00:00Z"),
        meter(T4, 0.6, effectiveStartDate="2026-11-01T00:00:00Z"),
        meter(T4, 0.7, effectiveStartDate="2026-12-01T00:00:00Z"),
    ]
    found, kind = fetch(stub, T4), (T4, "OnDemand", "eastus-1")
    assert price(found, kind) == price(found, kind, NOON + timedelta(days=1)) == Decimal("0.6")
    assert price(found, kind, NOON + timedelta(days=1, seconds=1)) is None
    assert price(found, kind, datetime(2026, 10, 1, tzinfo=UTC)) is None


def test_of_meters_that_differ_the_primary_one_counts(stub: PriceStub) -> None:
    stub.azure = [meter(T4, 0.6), meter(T4, 0.5, isPrimaryMeterRegion=False)]
    assert price(fetch(stub, T4), (T4, "OnDemand", "eastus-1")) == Decimal("0.6")


@pytest.mark.parametrize("items", [[meter(T4, 0.0)], [meter(T4, -1.0)], [meter(T4, 0.6), meter(T4, 0.5)]])
def test_a_price_that_is_zero_or_not_one_is_refused(stub: PriceStub, items: list[dict[str, object]]) -> None:
    stub.azure = items
    found = fetch(stub, T4)
    assert not found.rates
    assert any(f"the OnDemand price of {T4} in eastus is refused" in note for note in found.notes)


def test_a_type_without_any_price_is_an_error_and_one_without_spot_is_not(stub: PriceStub) -> None:
    stub.azure = [meter(T4, 0.6)]
    found = fetch(stub, T4, "Standard_nc6")
    assert found.errors == [
        "Azure has no price of Standard_nc6 in eastus: check the name and its case, or leave it out"
    ]
    assert f"there is no Spot price of {T4} in eastus: it stays unknown" in found.notes
    assert price(found, (T4, "OnDemand", "eastus-1")) == Decimal("0.6")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((503, b"busy"), "replied 503: busy"),
        ((302, b""), "replied 302"),
        ((200, b"<html>"), "request to Azure failed: "),
        ((200, b"{}"), "replied without a list of Items"),
        ((200, b'{"Items": [{"currencyCode": "USD"}]}'), "an entry is not what Azure's documentation says"),
        ((200, b'{"Items": [5]}'), "an entry is not what Azure's documentation says"),
    ],
)
def test_a_reply_that_is_not_a_price_list_is_a_sentence(
    stub: PriceStub, reply: tuple[int, bytes], said: str
) -> None:
    stub.azure_reply = reply
    found = fetch(stub, T4)
    assert len(found.errors) == 1 and said in found.errors[0] and not found.rates


def test_the_next_page_is_never_asked_of_another_server(stub: PriceStub) -> None:
    stub.azure, stub.page = offers(T4, 0.6, 0.2), 1
    stub.next_server = "http://169.254.169.254"
    (error,) = fetch(stub, T4).errors
    assert "the next page is on another server: http://169.254.169.254/" in error and len(stub.asked) == 1


def test_a_service_that_does_not_answer_is_named() -> None:
    found = Fetched(NOON)
    azure.fetch(found, {"eastus": (T4,)}, endpoint="http://127.0.0.1:9")
    (error,) = found.errors
    assert error.startswith("request to Azure failed: GET http://127.0.0.1:9/api/retail/prices")
