"""The AWS instance metadata service (IMDSv2): interruptions, rebalance recommendations, maintenance.

Sources: EC2 user guide, "Spot Instance interruption notices" (404 = none, JSON {action, time}; hibernation
begins with the notice), "EC2 instance rebalance recommendations" ({noticeTime}), "Scheduled events for Amazon
EC2 instances" (a list of {NotBefore, Code, EventId, State}) and "Use the Instance Metadata Service" (session
tokens of at most six hours; 401 = token missing or no longer valid).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from spottrain_operator.agent.findings import (
    BEGUN_SECONDS,
    LEAD_SECONDS,
    NOTHING,
    Finding,
    Findings,
    Unreadable,
    each,
    found,
    moment,
    optional_moment,
    parsed,
    unreadable,
    word,
)
from spottrain_operator.agent.sources.client import Client, Reply, Source, Watch
from spottrain_operator.names import AWS_SPOT_NOTICE, Platform

ACTION: Final = "spot/instance-action"
REBALANCE: Final = "events/recommendations/rebalance"
MAINTENANCE: Final = "events/maintenance/scheduled"
TOKEN_PATH: Final = "/latest/api/token"
_TTL_HEADER: Final = "X-aws-ec2-metadata-token-ttl-seconds"
_TOKEN_HEADER: Final = "X-aws-ec2-metadata-token"
_TOKEN_SECONDS: Final = 21600
"""The longest lifetime that the service allows."""
_HOP_LIMIT: Final = (
    "; an agent that is not on the node's network (hostNetwork) gets no token unless the instance's "
    "HttpPutResponseHopLimit is 2 or more"
)

_HIBERNATE: Final = "hibernate"
"""The only action that begins with the notice, not two minutes later."""
_ENDS: Final = frozenset({"terminate", "stop"})
_OVER: Final = frozenset({"completed", "canceled"})
_ENDING_CODES: Final = frozenset({"instance-stop", "instance-retirement", "instance-reboot", "system-reboot"})
_PAUSING_CODES: Final = frozenset({"system-maintenance"})
"""Network or power maintenance; the instance continues."""


class Aws(Source):
    """The metadata service of this instance, with its session token."""

    platform = Platform.AWS

    def __init__(self, client: Client, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._token = ""
        self._renew_at = 0.0
        self._renewing = asyncio.Lock()
        paths = (
            (ACTION, parse_instance_action, 1),
            (REBALANCE, parse_rebalance, 5),
            (MAINTENANCE, parse_maintenance, 30),
        )
        self.watches = tuple(
            Watch(name=f"AWS {path}", read=partial(self._read, path, parse), polls=polls)
            for path, parse, polls in paths
        )

    async def _read(self, path: str, parse: Callable[[str], Findings]) -> Findings:
        path, token = f"/latest/meta-data/{path}", await self._fresh_token()
        reply = await self._get(path, token, (200, 401, 404))
        if reply.status == 401:  # the service has lost the token, or its clock is ahead of ours
            reply = await self._get(path, await self._fresh_token(refused=token), (200, 404))
        return NOTHING if reply.status == 404 else parse(reply.text)

    async def _get(self, path: str, token: str, expected: tuple[int, ...]) -> Reply:
        return await self._client.request("GET", path, headers={_TOKEN_HEADER: token}, expected=expected)

    async def _fresh_token(self, refused: str = "") -> str:
        """Returns a valid token. If several watches had theirs rejected, the first one renews it for all."""
        async with self._renewing:
            if self._token in ("", refused) or self._clock() >= self._renew_at:
                self._token = ""
                self._token = await new_token(self._client)
                self._renew_at = self._clock() + _TOKEN_SECONDS / 2
            return self._token


async def new_token(client: Client) -> str:
    """Requests a session token. Raises Unreadable where the service grants none."""
    try:
        reply = await client.request("PUT", TOKEN_PATH, headers={_TTL_HEADER: str(_TOKEN_SECONDS)})
    except Unreadable as e:
        hint = _HOP_LIMIT if isinstance(e.__cause__, TimeoutError) else ""
        raise Unreadable(f"{e}{hint}") from e
    token = reply.text.strip()
    if not (token and token.isascii() and token.isprintable()):
        raise Unreadable(f"PUT {TOKEN_PATH} did not return a token: {token[:40]!r}")
    return token


def parse_instance_action(text: str) -> Findings:
    """Parses {action, time}, an end. A known action counts even if its time is unreadable."""
    source = AWS_SPOT_NOTICE
    body = parsed(text)
    action = word(body, "action") if isinstance(body, dict) else ""
    if action == _HIBERNATE:
        return found(Finding(source=source, action=action, id=word(body, "time")))
    at = optional_moment(body.get("time")) if action else None
    if at is not None:
        return found(Finding(source=source, action=action, at=at))
    if action in _ENDS:
        return found(Finding(source=source, action=action, after=BEGUN_SECONDS))
    raise unreadable(source, text)


def parse_rebalance(text: str) -> Findings:
    """Parses {noticeTime}, one advice per time."""
    source = f"AWS {REBALANCE}"
    try:
        body = parsed(text)
        return found(Finding(ends=False, source=source, action="rebalance", at=moment(body["noticeTime"])))
    except (ValueError, KeyError, TypeError) as e:
        raise unreadable(source, text) from e


def parse_maintenance(text: str) -> Findings:
    """Parses the list of events."""
    events = parsed(text)
    if not isinstance(events, list):
        raise unreadable(f"AWS {MAINTENANCE}", text)
    return each(events, _maintenance)


def _maintenance(event: Mapping[str, Any]) -> Finding | None:
    """Parses one event. Raises ValueError, KeyError or TypeError where it is invalid."""
    code, source = event["Code"], f"AWS {MAINTENANCE}"
    if event.get("State") in _OVER:
        return None
    if code in _PAUSING_CODES:
        return Finding(ends=False, source=source, action=code, id=word(event, "EventId"))
    if code not in _ENDING_CODES:
        raise ValueError("its Code is not known")
    at = moment(event["NotBefore"])
    return Finding(source=source, action=code, id=word(event, "EventId"), at=at, lead=LEAD_SECONDS)
