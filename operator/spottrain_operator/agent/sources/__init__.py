"""Clients of the metadata services: one module per cloud, and `choose`, which detects the cloud.

A Source is a set of Watches, each of which runs in a task of its own. Pure functions (`parse_...`) turn a
response body into findings.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from spottrain_operator.agent.findings import Answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """One value to poll."""

    name: str
    read: Callable[[], Awaitable[Answer]]
    """Returns a response or why there is none, within a few minutes; never raises. It may be a long poll."""
    polls: int = 1
    """Poll at most once in this many intervals."""


class Source(Protocol):
    """A cloud's metadata service."""

    @property
    def platform(self) -> str: ...

    @property
    def watches(self) -> tuple[Watch, ...]: ...

    async def acknowledge(self, event: str) -> None:
        """Tells the cloud that it may start the event now. Raises Unanswered."""
