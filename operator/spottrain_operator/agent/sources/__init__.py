"""What the agent asks: one module for each cloud's metadata service, and one that finds out which it is.

A Source is a few Watches; loop runs each in a task of its own. What an answer means is in pure functions
(`parse_...`) that turn a body into findings. Used by loop and __main__.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from spottrain_operator.agent.findings import Answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """One thing to ask again and again."""

    name: str
    read: Callable[[], Awaitable[Answer]]
    """Answers or says why not, after at most a few minutes; raises nothing. It may wait for a change."""
    polls: int = 1
    """Asked no more than once in so many intervals."""


class Source(Protocol):
    """A cloud's metadata service."""

    @property
    def platform(self) -> str: ...

    @property
    def watches(self) -> tuple[Watch, ...]: ...

    async def acknowledge(self, event: str) -> None:
        """Tells the cloud that an ending need not wait any longer; raises Unanswered."""
