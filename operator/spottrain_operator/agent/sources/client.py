"""HTTP client for metadata services: bounded in time and size, without redirects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp

DEFAULT_ENDPOINT: Final = "http://169.254.169.254"
"""The same address on AWS, GCP and Azure."""
LARGEST: Final = 256 * 1024
"""Bytes; real responses have a few hundred. The agent's memory limit is 96 MiB, whatever it receives."""


class Unanswered(Exception):
    """The service gave no usable response; the text names the request and the reason."""


class TimedOut(Unanswered):
    """The service did not respond in time."""


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
        body: object = None,
        timeout: float | None = None,
    ) -> Reply:
        """Sends one request. Raises Unanswered."""
        seconds = timeout or self.timeout
        try:
            async with self._session.request(
                method,
                self._endpoint + path,
                params=query,
                headers=headers,
                json=body,
                timeout=aiohttp.ClientTimeout(total=seconds),
                allow_redirects=False,
            ) as reply:
                content = await _bounded(reply)
                return Reply(
                    status=reply.status, text=content.decode(errors="replace"), headers=reply.headers
                )
        except TimeoutError as e:
            raise TimedOut(f"{method} {path} timed out after {seconds:g} s") from e
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise Unanswered(f"{method} {path}: {type(e).__name__} {e}".rstrip()) from e


async def _bounded(reply: aiohttp.ClientResponse) -> bytes:
    content = b""
    async for part in reply.content.iter_any():
        content += part
        if len(content) > LARGEST:
            raise ValueError(f"its answer is longer than {LARGEST} bytes")
    return content
