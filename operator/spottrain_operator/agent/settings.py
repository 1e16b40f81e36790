"""The agent's settings, from the environment that the chart's DaemonSet sets. Read once, by __main__."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from spottrain_operator.agent.metadata import DEFAULT_ENDPOINT


class AgentEnv(StrEnum):
    """Names of the variables."""

    NODE = "SPOTTRAIN_AGENT_NODE"
    METADATA_ENDPOINT = "SPOTTRAIN_AGENT_METADATA_ENDPOINT"
    NAMESPACES = "SPOTTRAIN_AGENT_NAMESPACES"
    POLL_SECONDS = "SPOTTRAIN_AGENT_POLL_SECONDS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    node: str
    """Name of the node that this agent runs on and speaks for."""
    metadata_endpoint: str = DEFAULT_ENDPOINT
    namespaces: tuple[str, ...] = ()
    """Where trainer pods may be; none means anywhere."""
    poll_seconds: float = 1.0

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Raises ValueError with a sentence where a variable is missing or makes no sense."""
        if not environ.get(AgentEnv.NODE):
            raise ValueError(f"{AgentEnv.NODE} must hold the name of this node (downward API: spec.nodeName)")
        return cls(
            node=environ[AgentEnv.NODE],
            metadata_endpoint=environ.get(AgentEnv.METADATA_ENDPOINT) or DEFAULT_ENDPOINT,
            namespaces=tuple(n.strip() for n in environ.get(AgentEnv.NAMESPACES, "").split(",") if n.strip()),
            poll_seconds=_seconds(environ.get(AgentEnv.POLL_SECONDS) or "1"),
        )


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
