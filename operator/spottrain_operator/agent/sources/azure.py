"""Azure's Scheduled Events: evictions and maintenance of this VM.

Source: "Azure Metadata Service: Scheduled Events for Linux VMs" (header Metadata:true; no NotBefore when
an event has begun; a VM also gets its neighbours' events, so Resources decides; the first call enables the
service and may take two minutes, 24 hours without one disable it).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf
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

    async def _read(self) -> Findings:
        if not self._logged:
            self._logged = True
            log("scheduledEventsFirstCall", why="it enables Scheduled Events and may take two minutes")
        self._name = self._name or await instance_name(self._client)
        query, seconds = (
            {"api-version": EVENTS_VERSION},
            self._seconds if self._enabled else self._first_seconds,
        )
        reply = await self._client.request("GET", EVENTS_PATH, headers=HEADERS, query=query, timeout=seconds)
        self._enabled = True
        return parse_events(reply.text, self._name)


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
    resources = event["Resources"]
    if not isinstance(resources, list) or not all(isinstance(resource, str) for resource in resources):
        raise TypeError("its Resources are not a list of names")
    if name not in map(str.casefold, resources) or event.get("EventStatus") in _OVER:
        return None
    kind, id = event["EventType"], word(event, "EventId")
    source = f"{_SOURCE} {kind}"
    if kind == _FREEZE:
        return Finding(ends=False, source=source, action=kind, id=id)
    if kind != _PREEMPT and kind not in _PLANNED:
        raise ValueError("its EventType is not known")
    # An eviction counts even if its time is unreadable: it may have begun.
    at = None if event.get("EventStatus") == _STARTED else moment(event.get("NotBefore"))
    if at is None:
        return Finding(source=source, action=kind, id=id, after=BEGUN_SECONDS)
    lead = inf if kind == _PREEMPT else LEAD_SECONDS
    return Finding(source=source, action=kind, id=id, at=at, lead=lead)
