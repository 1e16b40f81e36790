"""The agent's settings, from environment variables that the chart's DaemonSet sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from spottrain.contract import bind_address

from spottrain_operator.agent.ready import LOOPBACK
from spottrain_operator.agent.sources.client import DEFAULT_ENDPOINT
from spottrain_operator.names import SERVICE_ACCOUNT, Platform, service_account

READY_PORT: Final = 19734
"""Neither a node port, nor an ephemeral port, nor a well-known service's."""


class AgentEnv(StrEnum):
    """Names of the environment variables."""

    NODE = "SPOTTRAIN_AGENT_NODE"
    PLATFORM = "SPOTTRAIN_AGENT_PLATFORM"
    METADATA_ENDPOINT = "SPOTTRAIN_AGENT_METADATA_ENDPOINT"
    NAMESPACES = "SPOTTRAIN_AGENT_NAMESPACES"
    POLL_SECONDS = "SPOTTRAIN_AGENT_POLL_SECONDS"
    ACKNOWLEDGE = "SPOTTRAIN_AGENT_ACKNOWLEDGE"
    READY_PORT = "SPOTTRAIN_AGENT_READY_PORT"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    node: str
    """Name of the node that this agent runs on."""
    platform: str = Platform.AUTO
    """AUTO: the one whose metadata service responds."""
    metadata_endpoint: str = DEFAULT_ENDPOINT
    namespaces: tuple[str, ...] = ()
    """Namespaces that may have trainer pods; empty = all."""
    poll_seconds: float = 1.0
    acknowledge: bool = True
    """Whether Azure may reclaim the machine as soon as no trainer is left on it."""
    ready_port: int = READY_PORT
    """Port of /readyz; 0 disables it."""
    bind_address: str = LOOPBACK
    """IP address of /readyz."""
    account: Path = SERVICE_ACCOUNT
    """Folder with the service account's token and the API server's CA."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> AgentSettings:
        """Parses the environment. Raises ValueError where a variable is missing or invalid."""
        if not environ.get(AgentEnv.NODE):
            raise ValueError(f"{AgentEnv.NODE} must hold the name of this node (downward API: spec.nodeName)")
        return cls(
            node=environ[AgentEnv.NODE],
            platform=_platform(environ.get(AgentEnv.PLATFORM) or Platform.AUTO),
            metadata_endpoint=environ.get(AgentEnv.METADATA_ENDPOINT) or DEFAULT_ENDPOINT,
            namespaces=tuple(n.strip() for n in environ.get(AgentEnv.NAMESPACES, "").split(",") if n.strip()),
            poll_seconds=_seconds(environ.get(AgentEnv.POLL_SECONDS) or "1"),
            acknowledge=_switch(environ.get(AgentEnv.ACKNOWLEDGE) or "true"),
            ready_port=_port(environ.get(AgentEnv.READY_PORT) or str(READY_PORT)),
            bind_address=bind_address(environ, LOOPBACK),
            account=service_account(environ),
        )


def _platform(text: str) -> str:
    if text not in set(Platform):
        raise ValueError(f"{AgentEnv.PLATFORM} must be one of {', '.join(Platform)}, not {text!r}")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 60:
        raise ValueError(
            f"{AgentEnv.POLL_SECONDS} must be a number of seconds above 0 and up to 60, not {text!r}"
        )
    return seconds


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{AgentEnv.ACKNOWLEDGE} must be true or false, not {text!r}")
    return text == "true"


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise ValueError(f"{AgentEnv.READY_PORT} must be a port, or 0 for none, not {text!r}")
    return int(text)
