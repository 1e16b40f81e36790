"""EC2's prices now: spot by its price history, on-demand by the price list. The one module that knows boto3.

Three read-only calls, and the IAM actions that they need, are in `ACTIONS`. Zones are named as in the
account that asks, which is how the nodes of that account name them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
)
from spottrain_operator.api.node_pools import CapacityType
from spottrain_operator.api.wire import optional_timestamp

from spottrain_prices.rates import Change, Fetched, dollars
from spottrain_prices.web import Failed

ACTIONS: Final = {
    "DescribeAvailabilityZones": "ec2:DescribeAvailabilityZones",
    "DescribeSpotPriceHistory": "ec2:DescribeSpotPriceHistory",
    "GetProducts": "pricing:GetProducts",
}
"""IAM actions by API call: what the role of the price CronJob must allow."""
LINUX: Final = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
REFUSED: Final = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"})
CREDENTIALS: Final = frozenset(
    {"AuthFailure", "ExpiredToken", "InvalidClientTokenId", "OptInRequired", "UnrecognizedClientException"}
)
CONFIG: Final = Config(
    connect_timeout=10, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 3}
)

Clients = Callable[[str, str], Any]
"""Returns boto3's client of a service in a region."""


def connect() -> Clients:
    """Returns clients with the credentials of the environment, one for each service and region."""
    session = boto3.Session()
    return cache(lambda service, region: session.client(service, region_name=region, config=CONFIG))


def fetch(
    found: Fetched,
    wanted: Mapping[str, tuple[str, ...]],
    clients: Clients,
    *,
    pricing_region: str,
) -> None:
    """Adds the spot and on-demand prices of the wanted types to `found`, and what went wrong.

    Args:
        found: Collects rates, errors and notes.
        wanted: Instance types by region.
        clients: Of EC2 and of AWS's price list.
        pricing_region: Where AWS's price list is asked for.
    """
    for region, types in wanted.items():
        missing: list[str] = []
        with found.part(), _calls(region):
            for name in types:
                with _of_type(found, name, region):
                    missing += _spot(found, clients("ec2", region), name, region)
        with found.part(), _calls(region):
            # Those that have the region's on-demand prices: local zones have their own.
            own = [{"Name": "zone-type", "Values": ["availability-zone"]}]
            reply = clients("ec2", region).describe_availability_zones(Filters=own)
            zones = tuple(zone["ZoneName"] for zone in reply["AvailabilityZones"])
            with _calls(pricing_region):
                for name in types:
                    with _of_type(found, name, region):
                        missing += _on_demand(found, clients("pricing", pricing_region), name, region, zones)
        found.errors.extend(
            f"AWS has no price of {name} in {region}: check the name, or leave it out"
            for name in types
            if missing.count(name) == 2
        )


def _spot(found: Fetched, ec2: Any, name: str, region: str) -> list[str]:
    """Returns the type where it has no spot price."""
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=[name], ProductDescriptions=list(LINUX), StartTime=found.now
    )
    entries: dict[str, list[Change]] = {}
    for row in (row for page in pages for row in page["SpotPriceHistory"]):
        entries.setdefault(row["AvailabilityZone"], []).append((row["Timestamp"], dollars(row["SpotPrice"])))
    for zone, changes in entries.items():
        newest = max(since for since, _ in changes)
        in_force = [change for change in changes if change[0] == newest]
        found.add([(name, CapacityType.SPOT, zone)], in_force, f"spot price of {name} in {zone}")
    if entries:
        return []
    found.notes.append(f"there is no spot price of {name} in {region}: it stays unknown")
    return [name]


def _on_demand(found: Fetched, pricing: Any, name: str, region: str, zones: Iterable[str]) -> list[str]:
    """Returns the type where it has no on-demand price."""
    pages = pricing.get_paginator("get_products").paginate(
        ServiceCode="AmazonEC2", Filters=_filters(region, name)
    )
    products = [json.loads(text) for page in pages for text in page["PriceList"]]
    prices = list(_in_force(products, found.now))
    kinds = [(name, CapacityType.ON_DEMAND, zone) for zone in zones]
    listed = found.add(kinds, prices, f"on-demand price of {name} in {region}")
    return [] if listed else [name]


def _filters(region: str, instance_type: str) -> list[dict[str, str]]:
    """Returns what leaves one product: Linux without licences, paid by the hour, on no host of one's own."""
    fields = {
        "regionCode": region,
        "instanceType": instance_type,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
        "tenancy": "Dedicated" if ".metal" in instance_type else "Shared",
    }
    return [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in fields.items()]


def _in_force(products: Iterable[Mapping[str, Any]], now: datetime) -> Iterator[Change]:
    for product in products:
        for term in product["terms"]["OnDemand"].values():
            since = optional_timestamp(term["effectiveDate"])
            for dimension in term["priceDimensions"].values():
                if dimension["unit"] == "Hrs" and since is not None and since <= now:
                    yield since, dollars(dimension["pricePerUnit"].get("USD"))


# --- errors -------------------------------------------------------------------------------------------
@contextmanager
def _of_type(found: Fetched, instance_type: str, region: str) -> Iterator[None]:
    """Records a reply about this type that cannot be used, and goes on with the next type."""
    try:
        yield
    except ClientError as error:
        if not error.response["Error"]["Code"].startswith("InvalidParameter"):
            raise
        found.errors.append(f"AWS refuses {instance_type} in {region}: {error}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        found.errors.append(
            f"AWS's reply about {instance_type} in {region} is not what its documentation says: "
            f"{type(error).__name__} {error}"
        )


@contextmanager
def _calls(region: str) -> Iterator[None]:
    """Raises Failed for what is wrong with a whole service in a region."""
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError) as error:
        raise Failed(
            f"no AWS credentials ({error}): give the ServiceAccount a role "
            "(priceJob.serviceAccount.annotations), or set priceJob.env"
        ) from error
    except ClientError as error:
        raise Failed(_sentence(error, region)) from error
    except BotoCoreError as error:
        raise Failed(
            f"request to AWS failed in {region}: {str(error).rstrip('.')}. "
            "Check the region's name, and whether pods may connect to AWS"
        ) from error


def _sentence(error: ClientError, region: str) -> str:
    code, call = error.response["Error"]["Code"], error.operation_name
    if code in REFUSED:
        needs = f"must allow {ACTIONS[call]}" if call in ACTIONS else "must trust this ServiceAccount"
        return f"AWS refused {call} in {region} ({code}): the role {needs}"
    hint = ""
    if code in CREDENTIALS:
        hint = ": check the credentials, and whether the account has enabled this region"
    return f"AWS, in {region}: {error}{hint}"
