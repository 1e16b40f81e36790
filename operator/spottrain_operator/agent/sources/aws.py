"""The AWS instance metadata service (IMDSv2): interruptions, rebalance recommendations, maintenance.

Sources: EC2 user guide, "Spot Instance interruption notices" (404 = none, JSON {action, time}; hibernation
begins with the notice), "EC2 instance rebalance recommendations" ({noticeTime}), "Scheduled events for Amazon
EC2 instances" (a list of {NotBefore, Code, EventId, State}) and "Use the Instance Metadata Service" (session
tokens of at most six hours; 401 = token missing or no longer valid).
"""

from __future__ import annotations

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

    def __init__(self, client: Client) -> None:
        self._client = client
        self._token = ""
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
        reply = await self._get(path, 200, 401, 404) if self._token else None
        if reply is None or reply.status == 401:  # the token's six hours are over, or the service has lost it
            self._token = await new_token(self._client)
            reply = await self._get(path, 200, 404)
        return NOTHING if reply.status == 404 else parse(reply.text)

    async def _get(self, path: str, *expected: int) -> Reply:
        headers = {_TOKEN_HEADER: self._token}
        path = f"/latest/meta-data/{path}"
        return await self._client.request("GET", path, headers=headers, expected=expected)


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
    at = moment(body.get("time")) if action else None
    if at is not None:
        return found(Finding(source=source, action=action, at=at))
    if action in _ENDS:
        return found(Finding(source=source, action=action, after=BEGUN_SECONDS))
    raise unreadable(source, text)


def parse_rebalance(text: str) -> Findings:
    """Parses {noticeTime}, one advice per time."""
    source, body = f"AWS {REBALANCE}", parsed(text)
    at = moment(body.get("noticeTime")) if isinstance(body, dict) else None
    if at is None:
        raise unreadable(source, text)
    return found(Finding(source=source, action="rebalance", ends=False, at=at))


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
    if at is None:
        raise ValueError("its NotBefore is not a time")
    return Finding(source=source, action=code, id=word(event, "EventId"), at=at, lead=LEAD_SECONDS)
