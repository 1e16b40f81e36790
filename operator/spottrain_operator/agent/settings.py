"""The agent's settings, from environment variables that the chart's DaemonSet sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from spottrain_operator.agent.sources.client import DEFAULT_ENDPOINT
from spottrain_operator.environment import EnvironmentSettings, Words

PREFIX: Final = "SPOTTRAIN_AGENT_"


class AgentSettings(EnvironmentSettings):
    """Each is the variable of its name in capitals, after PREFIX."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    node: Annotated[str, Field(description="the name of this node (downward API: spec.nodeName)")]
    platform: Literal["Auto", "AWS", "GCP", "GKE", "Azure"] = "Auto"
    """Auto: the one whose metadata service responds."""
    metadata_endpoint: str = DEFAULT_ENDPOINT
    namespaces: Words = ()
    """Namespaces that may have trainer pods; empty = all."""
    poll_seconds: float = Field(default=1, gt=0, le=60)
    ready_file: Path | None = None
    """A file that is there while the agent would see a notice, for a readiness probe."""
