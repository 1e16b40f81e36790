"""What the clouds' metadata services have in common: values to poll, and bounded requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp

from spottrain_operator.agent.findings import Findings, Unreadable
from spottrain_operator.names import Platform

DEFAULT_ENDPOINT: Final = "http://169.254.169.254"
"""The same address on AWS, GCP and Azure."""
LARGEST: Final = 256 * 1024
"""Bytes; real responses have a few hundred. The agent's memory limit is 96 MiB, whatever it receives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """One value to poll."""

    name: str
    read: Callable[[], Awaitable[Findings]]
    """Raises Unreadable. It may be a long poll."""
    polls: int = 1
    """Poll at most once in this many intervals."""


class Source:
    """A cloud's metadata service."""

    platform: Platform
    watches: tuple[Watch, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    status: int
    text: str
    headers: Mapping[str, str]
    """Names are case-insensitive."""


class Client:
    def __init__(
        self, session: aiohttp.ClientSession, *, endpoint: str = DEFAULT_ENDPOINT, timeout: float = 2.0
    ) -> None:
        self._session = session
        self._endpoint = endpoint.rstrip("/")
        self.timeout = timeout
        """Default timeout of a request, in seconds."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        query: Mapping[str, str] | None = None,
        timeout: float | None = None,
        expected: Container[int] = (200,),
    ) -> Reply:
        """Sends one request, and follows no redirect. Raises Unreadable, also for an unexpected status."""
        seconds = timeout or self.timeout
        try:
            async with self._session.request(
                method,
                self._endpoint + path,
                params=query,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=seconds),
                allow_redirects=False,
            ) as reply:
                content = b""
                async for part in reply.content.iter_any():
                    content += part
                    if len(content) > LARGEST:
                        raise ValueError(f"its answer is longer than {LARGEST} bytes")
        except TimeoutError as e:
            raise Unreadable(f"{method} {path} timed out after {seconds:g} s") from e
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise Unreadable(f"{method} {path}: {type(e).__name__} {e}".rstrip()) from e
        if reply.status not in expected:
            raise Unreadable(f"{method} {path} returned {reply.status}")
        return Reply(status=reply.status, text=content.decode(errors="replace"), headers=reply.headers)
