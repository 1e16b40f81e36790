"""Asks the AWS instance metadata service (IMDSv2) whether an interruption is announced. Called by loop.

Sources: EC2 user guide, "Spot Instance interruption notices" (404 = none, JSON {action, time}) and "Use the
Instance Metadata Service" (session tokens of at most six hours; 401 = token missing or no longer valid).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import aiohttp

from spottrain_operator.agent.plan import Answer, InstanceAction, NoNotice, Unreadable

DEFAULT_ENDPOINT: Final = "http://169.254.169.254"
_TOKEN_PATH: Final = "/latest/api/token"
_ACTION_PATH: Final = "/latest/meta-data/spot/instance-action"
_TTL_HEADER: Final = "X-aws-ec2-metadata-token-ttl-seconds"
_TOKEN_HEADER: Final = "X-aws-ec2-metadata-token"
_TOKEN_SECONDS: Final = 21600
"""The longest life that the service grants."""


class TokenRefused(Exception):
    """The service answered, but gave no token."""


class Metadata:
    """The metadata service of this instance. `read` answers or says why not; it raises nothing."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        endpoint: str = DEFAULT_ENDPOINT,
        timeout: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._endpoint = endpoint.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._clock = clock
        self._token = ""
        self._renew_at = 0.0

    async def read(self) -> Answer:
        try:
            status, text = await self._get_action()
            if status == 401:  # the service has forgotten the token, or its clock is ahead of ours
                self._token = ""
                status, text = await self._get_action()
        except (aiohttp.ClientError, TimeoutError, OSError, TokenRefused) as e:
            return Unreadable(why=f"{type(e).__name__}: {e}".rstrip(": "))
        return _answer(status, text)

    async def _get_action(self) -> tuple[int, str]:
        headers = {_TOKEN_HEADER: await self._fresh_token()}
        return await self._request("GET", _ACTION_PATH, headers)

    async def _fresh_token(self) -> str:
        if not self._token or self._clock() >= self._renew_at:
            status, text = await self._request("PUT", _TOKEN_PATH, {_TTL_HEADER: str(_TOKEN_SECONDS)})
            if status != 200:
                raise TokenRefused(f"PUT {_TOKEN_PATH} was answered {status}")
            self._token, self._renew_at = text, self._clock() + _TOKEN_SECONDS / 2
        return self._token

    async def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        url = self._endpoint + path
        async with self._session.request(
            method, url, headers=headers, timeout=self._timeout, allow_redirects=False
        ) as reply:
            return reply.status, await reply.text(errors="replace")


def _answer(status: int, text: str) -> Answer:
    if status == 404:
        return NoNotice()
    if status != 200:
        return Unreadable(why=f"GET {_ACTION_PATH} was answered {status}")
    try:
        body = json.loads(text)
        moment = datetime.fromisoformat(body["time"])
        return InstanceAction(
            action=str(body["action"]), time=moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        )
    except (ValueError, KeyError, TypeError):
        return Unreadable(
            why=f"GET {_ACTION_PATH} was answered with no notice that can be read: {text[:200]!r}"
        )
