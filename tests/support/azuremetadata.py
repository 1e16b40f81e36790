"""A small Azure instance metadata service on loopback: the VM's name, and Scheduled Events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.loopback import Faults, on_loopback

EVENTS = "/metadata/scheduledevents"
NAME = "/metadata/instance/compute/name"
VM = "aks-gpu-31337-vmss_2"
EVENT = "602d9444-d2cd-49c7-8624-8643e7171297"


def event(kind: str = "Preempt", not_before: str = "", **changes: Any) -> dict[str, Any]:
    return {
        "EventId": EVENT,
        "EventStatus": "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [VM],
        "NotBefore": not_before,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    } | changes


@dataclass
class FakeAzure:
    """What the service answers next, and what it was asked."""

    name: str = VM
    events: list[dict[str, Any]] = field(default_factory=list)
    incarnation: int = 1
    faults: Faults = field(default_factory=Faults)
    """Of the events; the name is another service behind the same address."""
    first_seconds: float = 0.0
    """How long the call takes that enables the service."""
    url: str = ""
    enabled: bool = False
    gets: int = 0

    def schedule(self, *events: dict[str, Any]) -> None:
        self.events = list(events)
        self.incarnation += 1

    async def get_name(self, request: web.Request) -> web.Response:
        if refused := _refused(request):
            return refused
        return web.Response(text=self.name)

    async def get_events(self, request: web.Request) -> web.StreamResponse:
        self.gets += 1
        return await self.faults.apply(request, self._events)

    async def _events(self, request: web.Request) -> web.Response:
        if refused := _refused(request):
            return refused
        if not self.enabled:
            await asyncio.sleep(self.first_seconds)
            self.enabled = True
        return web.json_response({"DocumentIncarnation": self.incarnation, "Events": self.events})


def _refused(request: web.Request) -> web.Response | None:
    if request.headers.get("Metadata") != "true":
        return web.json_response({"error": "Bad request. Required metadata header not specified"}, status=400)
    if not request.query.get("api-version"):
        return web.json_response({"error": "Bad request. api-version was not specified"}, status=400)
    return None


@asynccontextmanager
async def fake_azure() -> AsyncIterator[FakeAzure]:
    azure = FakeAzure()
    app = web.Application()
    app.router.add_get(NAME, azure.get_name)
    app.router.add_get(EVENTS, azure.get_events)
    async with on_loopback(app) as azure.url:
        try:
            yield azure
        finally:
            azure.faults.release.set()
