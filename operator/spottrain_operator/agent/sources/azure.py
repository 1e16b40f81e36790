"""Azure's Scheduled Events: evictions and maintenance of this VM, acknowledged once no trainer is left.

Source: "Azure Metadata Service: Scheduled Events for Linux VMs" (header Metadata:true; no NotBefore when
an event has begun; a VM also gets its neighbours' events, so Resources decides; the first call enables the
service and may take two minutes, 24 hours without one disable it; StartRequests let an event begin early, for
all of its Resources).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from spottrain_operator.agent.findings import (
    BEGUN_SECONDS,
    LEAD_SECONDS,
    Finding,
    Findings,
    Unreadable,
    each,
    moment,
    parsed,
    unreadable,
    word,
)
from spottrain_operator.agent.log import log
from spottrain_operator.agent.sources.client import Client, Source, Watch
from spottrain_operator.names import Platform

EVENTS_PATH: Final = "/metadata/scheduledevents"
EVENTS_VERSION: Final = "2020-07-01"
NAME_PATH: Final = "/metadata/instance/compute/name"
NAME_VERSION: Final = "2021-02-01"
HEADERS: Final = {"Metadata": "true"}
LONGEST_NAME: Final = 256

_FIRST_SECONDS: Final = 150.0
"""Timeout of the call that enables the service; Azure documents up to two minutes."""
_SECONDS: Final = 10.0
_SOURCE: Final = "Azure scheduled event"
_PREEMPT: Final = "Preempt"
_PLANNED: Final = frozenset({"Terminate", "Redeploy", "Reboot"})
_FREEZE: Final = "Freeze"
"""The VM pauses for seconds and continues."""
_OVER: Final = frozenset({"Completed", "Canceled"})
_STARTED: Final = "Started"


class Azure(Source):
    """The metadata service of this VM."""

    platform = Platform.AZURE

    def __init__(
        self, client: Client, *, first_seconds: float = _FIRST_SECONDS, seconds: float = _SECONDS
    ) -> None:
        self._client = client
        self._first_seconds = first_seconds
        self._seconds = seconds
        self._name = ""
        self._enabled = False
        self._logged = False
        self.watches = (Watch(name="Azure scheduledevents", read=self._read),)

    async def acknowledge(self, event: str) -> None:
        await self._events("POST", {"StartRequests": [{"EventId": event}]})

    async def _read(self) -> Findings:
        if not self._logged:
            self._logged = True
            log("scheduledEventsFirstCall", why="it enables Scheduled Events and may take two minutes")
        self._name = self._name or await instance_name(self._client)
        text = await self._events("GET")
        self._enabled = True
        return parse_events(text, self._name)

    async def _events(self, method: str, body: object = None) -> str:
        seconds, query = (
            self._seconds if self._enabled else self._first_seconds,
            {"api-version": EVENTS_VERSION},
        )
        reply = await self._client.request(
            method, EVENTS_PATH, headers=HEADERS, query=query, body=body, timeout=seconds
        )
        return reply.text


async def instance_name(client: Client) -> str:
    """Returns this VM's name as in Scheduled Events. Raises Unreadable."""
    query = {"api-version": NAME_VERSION, "format": "text"}
    name = (await client.request("GET", NAME_PATH, headers=HEADERS, query=query)).text.strip()
    if not name or len(name) > LONGEST_NAME:
        raise Unreadable(f"GET {NAME_PATH} returned {name[:40]!r}, not a VM's name")
    return name


def parse_events(text: str, name: str) -> Findings:
    """Parses the events that name this VM."""
    body = parsed(text)
    events = body.get("Events") if isinstance(body, dict) else None
    if not isinstance(events, list):
        raise unreadable(_SOURCE, text)
    return each(events, partial(_event, name=name.casefold()))


def _event(event: Mapping[str, Any], name: str) -> Finding | None:
    """Parses one event. Raises ValueError, KeyError or TypeError where it is invalid."""
    resources = {resource.casefold() for resource in _texts(event["Resources"])}
    if name not in resources or event.get("EventStatus") in _OVER:
        return None
    kind, id = event["EventType"], word(event, "EventId")
    source = f"{_SOURCE} {kind}"
    if kind == _FREEZE:
        return Finding(ends=False, source=source, action=kind, id=id)
    if kind != _PREEMPT and kind not in _PLANNED:
        raise ValueError("its EventType is not known")
    started = event.get("EventStatus") == _STARTED
    # An eviction counts even if its time is unreadable: it may have begun.
    at = None if started else moment(event.get("NotBefore"))
    # Acknowledging starts the event for all of its resources: on another VM a trainer may still save.
    alone = resources == {name} and not started
    ending = Finding(source=source, action=kind, id=id, at=at, acknowledge=id if alone else "")
    if at is None:
        return replace(ending, after=BEGUN_SECONDS)
    return ending if kind == _PREEMPT else replace(ending, lead=LEAD_SECONDS)


def _texts(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError("its Resources are not a list of names")
    return value
