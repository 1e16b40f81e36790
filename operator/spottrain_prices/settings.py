"""The price CronJob's settings, from environment variables that the chart sets."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Final, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict
from spottrain_operator.environment import EnvironmentSettings, Words, from_text

PREFIX: Final = "SPOTTRAIN_PRICES_"


class Settings(EnvironmentSettings):
    """Each is the variable of its name in capitals, after PREFIX."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    provider: Annotated[Literal["AWS", "Azure"], Field(description="AWS or Azure")]
    namespace: Annotated[str, Field(min_length=1, description="of the ConfigMap that is filled")]
    config_map: Annotated[str, Field(min_length=1, description="name of the ConfigMap that is filled")]
    regions: Words = ()
    """Regions of `instance_types`; empty = those of the nodes."""
    instance_types: Words = ()
    """Types to price beside those of the nodes."""
    from_nodes: bool = True
    """Whether to price the types of the cluster's nodes."""
    history_days: int = Field(default=7, ge=1, le=90)
    """How long prices are kept after they were last valid."""
    pricing_region: Literal["us-east-1", "eu-central-1", "ap-south-1"] = "us-east-1"
    """Where to ask for AWS's price list; each of them has the prices of all regions."""
    azure_endpoint: Annotated[str, from_text(lambda text: text.rstrip("/"))] = "https://prices.azure.com"

    @property
    def history(self) -> timedelta:
        return timedelta(days=self.history_days)
