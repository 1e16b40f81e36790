"""EC2's prices: against moto, and against a stub where moto has no history, no price list and no refusals."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import boto3
import pytest
from moto import mock_aws
from spottrain_operator.api.prices import Kind, PriceList
from spottrain_prices import aws
from spottrain_prices.rates import Fetched

from tests.support.pricestub import PriceStub, product

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
P4D = "p4d.24xlarge"
A, B = "us-east-1a", "us-east-1b"
COST_PAGE = Path(__file__).resolve().parents[3] / "docs" / "cost.md"


def fetch(
    *types: str, region: str = "us-east-1", wanted: dict[str, tuple[str, ...]] | None = None
) -> Fetched:
    found = Fetched(NOON)
    aws.fetch(found, wanted or {region: types}, aws.connect(), pricing_region="us-east-1")
    return found


def price(found: Fetched, kind: Kind, at: datetime = NOON) -> Decimal | None:
    """What the operator makes of the answer."""
    rate = PriceList(rates={each: (rate,) for each, rate in found.rates.items()}).rate(*kind, at)
    return rate.usd_per_hour if rate else None


def with_p4d(stub: PriceStub) -> None:
    stub.zones = {A: "availability-zone", B: "availability-zone", "us-east-1-bos-1a": "local-zone"}
    stub.products = {P4D: [product("21.9576420000")]}
    stub.spot = [(P4D, A, "8.190000", "2026-11-20T00:00:00.000Z")]


# --- what is found --------------------------------------------------------------------------------------
def test_the_newest_spot_price_of_each_zone_counts_over_several_pages(stub: PriceStub) -> None:
    with_p4d(stub)
    stub.page = 2
    stub.spot = [
        (P4D, A, "9.000000", "2026-11-23T11:00:00.000Z"),
        (P4D, B, "5.000000", "2026-11-23T10:30:00.000Z"),
        (P4D, A, "8.000000", "2026-11-23T10:00:00.000Z"),
        (P4D, A, "9.000000", "2026-11-23T11:00:00.000Z"),
        (P4D, A, "7.000000", "2026-11-13T10:00:00.000Z"),
    ]
    found = fetch(P4D)
    assert [price(found, (P4D, "Spot", A), NOON - n * HOUR) for n in (0, 1, 2)] == [9, 9, None]
    assert price(found, (P4D, "Spot", B)) == 5 and price(found, (P4D, "Spot", B), NOON - 2 * HOUR) is None
    assert not found.errors and len([r for r in stub.asked if "NextToken" in r]) == 2


def test_spot_prices_are_asked_for_linux_as_they_are_now(stub: PriceStub) -> None:
    with_p4d(stub)
    fetch(P4D)
    (asked,) = [r for r in stub.asked if r["Action"] == "DescribeSpotPriceHistory"]
    assert asked["StartTime"].startswith("2026-11-23T12:00:00")
    assert {asked["ProductDescription.1"], asked["ProductDescription.2"]} == set(aws.LINUX)


def test_a_price_is_known_until_a_day_after_it_was_asked_for(stub: PriceStub) -> None:
    with_p4d(stub)
    found = fetch(P4D)
    for kind in ((P4D, "Spot", A), (P4D, "OnDemand", A)):
        assert price(found, kind, NOON + 24 * HOUR) is not None
        assert price(found, kind, NOON + 25 * HOUR) is None


def test_the_on_demand_price_is_that_of_the_region_s_own_zones(stub: PriceStub) -> None:
    with_p4d(stub)
    found = fetch(P4D)
    assert price(found, (P4D, "OnDemand", A)) == price(found, (P4D, "OnDemand", B)) == Decimal("21.957642")
    assert price(found, (P4D, "OnDemand", "us-east-1-bos-1a")) is None, "a local zone has prices of its own"
    assert price(found, (P4D, "OnDemand", "")) is None
    assert price(found, (P4D, "OnDemand", A), datetime(2026, 10, 31, tzinfo=UTC)) is None, "before its date"


def test_the_price_list_is_asked_for_linux_machines_paid_by_the_hour(stub: PriceStub) -> None:
    with_p4d(stub)
    fetch(P4D, "g4dn.metal")
    asked = [r for r in stub.asked if r["Action"] == "GetProducts"]
    fields = [{f["Field"]: f["Value"] for f in r["Filters"]} for r in asked]
    assert {each["instanceType"] for each in fields} == {P4D, "g4dn.metal"}
    for each in fields:
        metal = each["instanceType"] == "g4dn.metal"
        assert each["tenancy"] == ("Dedicated" if metal else "Shared")
        assert (each["operatingSystem"], each["preInstalledSw"], each["capacitystatus"]) == (
            "Linux",
            "NA",
            "Used",
        )
        assert (each["regionCode"], each["marketoption"]) == ("us-east-1", "OnDemand")


def test_moto_s_ec2_is_understood(monkeypatch: pytest.MonkeyPatch, stub: PriceStub) -> None:
    """moto checks the requests and has EC2's zones and offers; its one price is $0.00001, of 2006."""
    stub.products = {P4D: [product("21.957642")]}
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", stub.url)
    with mock_aws():
        found = fetch(P4D)
        zones = boto3.client("ec2", "us-east-1").describe_availability_zones()["AvailabilityZones"]
    offered = {zone for name, capacity, zone in found.rates if (name, capacity) == (P4D, "Spot")}
    assert offered and offered <= {z["ZoneName"] for z in zones}
    assert {price(found, (P4D, "Spot", zone)) for zone in offered} == {Decimal("0.00001")}
    assert {zone for _, capacity, zone in found.rates if capacity == "OnDemand"} == {
        z["ZoneName"] for z in zones
    }
    assert not found.errors and stub.calls() == {"GetProducts"}, "the rest was moto's"


def test_the_page_on_cost_names_the_actions_that_are_called_and_no_other(stub: PriceStub) -> None:
    with_p4d(stub)
    fetch(P4D)
    policy = re.search(r'"Action": \[([^\]]*)\]', COST_PAGE.read_text())
    assert policy is not None
    named = set(re.findall(r'"([^"]+)"', policy[1]))
    assert named == {aws.ACTIONS[call] for call in stub.calls()} == set(aws.ACTIONS.values())


# --- nothing unknown is free ----------------------------------------------------------------------------
@pytest.mark.parametrize("bad", ["0", "0.000000", "-1", "NaN", ""])
def test_a_spot_price_of_zero_is_refused_and_named(stub: PriceStub, bad: str) -> None:
    with_p4d(stub)
    stub.spot = [(P4D, A, bad, "2026-11-23T11:00:00.000Z"), (P4D, A, "7", "2026-11-23T07:00:00.000Z")]
    found = fetch(P4D)
    assert price(found, (P4D, "Spot", A)) is None
    assert found.notes == [f"an entry for the spot price of {P4D} in {A} is refused: it must be above 0"]


@pytest.mark.parametrize(
    ("products", "said"),
    [
        ([product("0.0000000000")], "an entry for the {} is refused: it must be above 0"),
        ([product("21.9", currency="CNY")], "an entry for the {} is refused: it must be above 0"),
        (
            [product("21.9"), product("27.4", effective="2026-01-01T00:00:00Z")],
            "the {} is refused, so it is unknown: there are several ($21.9, $27.4)",
        ),
    ],
)
def test_an_on_demand_price_that_is_zero_or_not_one_is_refused(
    stub: PriceStub, products: list[dict[str, object]], said: str
) -> None:
    with_p4d(stub)
    stub.products = {P4D: products}
    found = fetch(P4D)
    assert not [kind for kind in found.rates if kind[1] == "OnDemand"]
    assert found.notes == [said.format(f"on-demand price of {P4D} in us-east-1")]


def test_an_entry_of_zero_beside_the_price_is_refused_alone(stub: PriceStub) -> None:
    with_p4d(stub)
    stub.products = {P4D: [product("0.0000000000"), product("21.957642"), product("21.957642")]}
    found = fetch(P4D)
    assert price(found, (P4D, "OnDemand", A)) == Decimal("21.957642")
    assert found.notes == [
        f"an entry for the on-demand price of {P4D} in us-east-1 is refused: it must be above 0"
    ]


def test_a_price_of_next_month_is_not_in_force(stub: PriceStub) -> None:
    with_p4d(stub)
    stub.products = {P4D: [product("19.9", effective="2026-12-01T00:00:00Z")]}
    assert not [kind for kind in fetch(P4D).rates if kind[1] == "OnDemand"]


# --- errors ---------------------------------------------------------------------------------------------
def test_a_type_without_any_price_is_an_error_and_one_without_spot_is_not(stub: PriceStub) -> None:
    with_p4d(stub)
    stub.products["p5en.48xlarge"] = [product("63.296")]
    found = fetch(P4D, "p5en.48xlarge", "p4d.24xlrage")
    assert found.errors == ["AWS has no price of p4d.24xlrage in us-east-1: check the name, or leave it out"]
    assert "there is no spot price of p5en.48xlarge in us-east-1: it stays unknown" in found.notes
    assert price(found, (P4D, "Spot", A)) and price(found, ("p5en.48xlarge", "OnDemand", A))


@pytest.mark.parametrize("call", aws.ACTIONS)
def test_a_refusal_names_the_missing_permission_and_the_rest_is_found(stub: PriceStub, call: str) -> None:
    with_p4d(stub)
    code = "AccessDeniedException" if call == "GetProducts" else "UnauthorizedOperation"
    stub.refuse = {call: (400 if call == "GetProducts" else 403, code)}
    found = fetch(P4D, "g5.xlarge")
    assert found.errors == [
        f"AWS refused {call} in us-east-1 ({code}): the role must allow {aws.ACTIONS[call]}"
    ]
    left = {capacity for _, capacity, _ in found.rates}
    assert left == ({"OnDemand"} if call == "DescribeSpotPriceHistory" else {"Spot"})


def test_one_type_that_aws_refuses_leaves_the_others(stub: PriceStub) -> None:
    with_p4d(stub)
    stub.refuse = {"DescribeSpotPriceHistory": (400, "InvalidParameterValue")}
    found = fetch(P4D, "g5.xlarge")
    assert len(found.errors) == 2 and all("AWS refuses" in error for error in found.errors)
    assert price(found, (P4D, "OnDemand", A)) is not None


def test_a_region_that_is_not_enabled_leaves_the_others(stub: PriceStub) -> None:
    with_p4d(stub)
    stub.refuse = {"DescribeAvailabilityZones": (401, "AuthFailure")}
    found = fetch(wanted={"us-east-1": (P4D,), "me-south-1": (P4D,)})
    assert len(found.errors) == 2 and "whether the account has enabled this region" in found.errors[0]
    assert price(found, (P4D, "Spot", A)) is not None


def test_without_credentials_a_sentence_says_where_to_put_them(
    stub: PriceStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    (error,) = fetch(P4D).errors
    assert error.startswith("no AWS credentials (") and "priceJob.serviceAccount.annotations" in error
    assert not stub.asked


def test_an_unreachable_region_is_named(monkeypatch: pytest.MonkeyPatch, stub: PriceStub) -> None:
    with_p4d(stub)
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", "http://127.0.0.1:9")
    (error,) = fetch(P4D, region="us-east-9").errors
    assert error.startswith("request to AWS failed in us-east-9: ") and "Check the region's name" in error


def test_a_product_that_is_not_as_documented_is_an_error_of_its_type(stub: PriceStub) -> None:
    with_p4d(stub)
    stub.products = {P4D: [{"product": {}}]}
    (error,) = fetch(P4D).errors
    assert error.startswith(f"AWS's reply about {P4D} in us-east-1 is not what its documentation says")
