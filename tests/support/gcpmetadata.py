"""A small Compute Engine metadata server on loopback: ETags, and GETs that wait for a change."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from aiohttp import web

from tests.support.loopback import Faults, cut, on_loopback

ROOT = "/computeMetadata/v1/"
PREEMPTED = "instance/preempted"
MAINTENANCE = "instance/maintenance-event"
NOTICE_SECONDS = "instance/attributes/spottrain-preemption-notice-seconds"


def _first_values() -> dict[str, str]:
    return {PREEMPTED: "FALSE", MAINTENANCE: "NONE", "instance/id": "4520031799277581759"}


@dataclass
class FakeGcp:
    """What the server answers next, and what it was asked."""

    values: dict[str, str] = field(default_factory=_first_values)
    faults: Faults = field(default_factory=Faults)
    etags: bool = True
    """A proxy in between may drop them."""
    url: str = ""
    asked: list[str] = field(default_factory=list)
    """Keys, those with a wait ending in `?wait`."""
    waiting: dict[int, tuple[str, web.Request]] = field(default_factory=dict)
    """Questions that are held open."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, key: str, value: str) -> None:
        self.values[key] = value
        self.changed.set()
        self.changed = asyncio.Event()

    def preempt(self) -> None:
        self.put(PREEMPTED, "TRUE")

    def is_awaited(self, key: str) -> bool:
        return any(key == awaited for awaited, _ in self.waiting.values())

    def cut(self) -> None:
        """Every wait ends without an answer."""
        for _, request in self.waiting.values():
            cut(request)

    def etag(self, key: str) -> str:
        return hashlib.sha256(self.values.get(key, "").encode()).hexdigest()[:16]

    async def get(self, request: web.Request) -> web.StreamResponse:
        key, waits = request.path.removeprefix(ROOT), "wait_for_change" in request.query
        self.asked.append(key + "?wait" * waits)
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403, text="Missing required header 'Metadata-Flavor': 'Google'")
        return await self.faults.apply(request, self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        key = request.path.removeprefix(ROOT)
        if request.query.get("wait_for_change") == "true":
            await self._wait(request, key)
        headers = {"Metadata-Flavor": "Google", "Content-Type": "application/text"}
        if self.etags:
            headers["ETag"] = self.etag(key)
        if key not in self.values:
            return web.Response(status=404, headers=headers)
        return web.Response(text=self.values[key], headers=headers)

    async def _wait(self, request: web.Request, key: str) -> None:
        """Until the value is another than the one that was known, or than now where none was named."""
        known = request.query.get("last_etag") or self.etag(key)
        self.waiting[id(request)] = (key, request)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(float(request.query.get("timeout_sec", "3600"))):
                    while self.etag(key) == known:
                        await self.changed.wait()
        finally:
            del self.waiting[id(request)]


@asynccontextmanager
async def fake_gcp() -> AsyncIterator[FakeGcp]:
    gcp = FakeGcp()
    app = web.Application()
    app.router.add_get(ROOT + "{key:.+}", gcp.get)
    async with on_loopback(app) as gcp.url:
        try:
            yield gcp
        finally:
            gcp.faults.release.set()
            gcp.cut()
