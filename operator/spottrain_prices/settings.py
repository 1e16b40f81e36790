"""The price CronJob's settings, from environment variables that the chart sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final

from spottrain_operator.names import Platform

PROVIDERS: Final = (Platform.AWS, Platform.AZURE)
PRICING_REGIONS: Final = ("us-east-1", "eu-central-1", "ap-south-1")
"""Where AWS serves its price list; each has the prices of all regions."""
AZURE_ENDPOINT: Final = "https://prices.azure.com"
LONGEST_HISTORY: Final = 90
"""Days; EC2 keeps no more."""


class PricesEnv(StrEnum):
    """Names of the environment variables."""

    PROVIDER = "SPOTTRAIN_PRICES_PROVIDER"
    REGIONS = "SPOTTRAIN_PRICES_REGIONS"
    INSTANCE_TYPES = "SPOTTRAIN_PRICES_INSTANCE_TYPES"
    FROM_NODES = "SPOTTRAIN_PRICES_FROM_NODES"
    HISTORY_DAYS = "SPOTTRAIN_PRICES_HISTORY_DAYS"
    PRICING_REGION = "SPOTTRAIN_PRICES_PRICING_REGION"
    AZURE_ENDPOINT = "SPOTTRAIN_PRICES_AZURE_ENDPOINT"
    NAMESPACE = "SPOTTRAIN_PRICES_NAMESPACE"
    CONFIG_MAP = "SPOTTRAIN_PRICES_CONFIG_MAP"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    provider: Platform
    namespace: str
    """Of the ConfigMap."""
    config_map: str
    """Name of the ConfigMap to fill."""
    regions: tuple[str, ...] = ()
    """Regions of `instance_types`; empty = those of the nodes."""
    instance_types: tuple[str, ...] = ()
    """Types to price beside those of the nodes."""
    from_nodes: bool = True
    """Whether to price the types of the cluster's nodes."""
    history: timedelta = timedelta(days=7)
    """How long prices are kept after they were last valid."""
    pricing_region: str = PRICING_REGIONS[0]
    """Where to ask for AWS's price list."""
    azure_endpoint: str = AZURE_ENDPOINT

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Parses the environment. Raises ValueError where a variable is missing or invalid."""
        given = {name: environ.get(name, "").strip() for name in PricesEnv}
        for name in (PricesEnv.NAMESPACE, PricesEnv.CONFIG_MAP):
            if not given[name]:
                raise ValueError(f"{name} is missing: it names the ConfigMap that is filled")
        return cls(
            provider=Platform(_one_of(PricesEnv.PROVIDER, given, PROVIDERS)),
            namespace=given[PricesEnv.NAMESPACE],
            config_map=given[PricesEnv.CONFIG_MAP],
            regions=_list(given[PricesEnv.REGIONS]),
            instance_types=_list(given[PricesEnv.INSTANCE_TYPES]),
            from_nodes=_one_of(PricesEnv.FROM_NODES, given, ("true", "false"), default="true") == "true",
            history=timedelta(days=_days(given[PricesEnv.HISTORY_DAYS] or "7")),
            pricing_region=_one_of(
                PricesEnv.PRICING_REGION, given, PRICING_REGIONS, default=PRICING_REGIONS[0]
            ),
            azure_endpoint=(given[PricesEnv.AZURE_ENDPOINT] or AZURE_ENDPOINT).rstrip("/"),
        )


def _list(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _one_of(
    name: PricesEnv, given: Mapping[PricesEnv, str], known: tuple[str, ...], default: str = ""
) -> str:
    text = given[name] or default
    if text not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {text!r}")
    return text


def _days(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= LONGEST_HISTORY):
        raise ValueError(
            f"{PricesEnv.HISTORY_DAYS} must be a whole number from 1 to {LONGEST_HISTORY}, not {text!r}"
        )
    return int(text)
