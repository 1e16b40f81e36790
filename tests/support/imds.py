"""A small AWS instance metadata service on loopback, for tests of whatever reads one.

Speaks IMDSv2 only: a PUT gives a token of a limited number of uses, a GET without a valid one is a 401.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from tests.support.loopback import Faults, on_loopback

TOKEN_HEADER = "X-aws-ec2-metadata-token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
ROOT = "/latest/meta-data/"
ACTION = "spot/instance-action"
REBALANCE = "events/recommendations/rebalance"
MAINTENANCE = "events/maintenance/scheduled"


@dataclass
class FakeImds:
    """What the service answers next, and what it was asked."""

    bodies: dict[str, str] = field(default_factory=dict)
    """By path below meta-data; what is not there is a 404."""
    faults: Faults = field(default_factory=Faults)
    """Of every GET."""
    broken: dict[str, int] = field(default_factory=dict)
    """Paths below meta-data that are answered with a status of their own."""
    token_status: int = 200
    hop_limit: int = 2
    """With 1 the answer with the token does not reach a pod that has a network of its own."""
    url: str = ""
    tokens: set[str] = field(default_factory=set)
    issued: int = 0
    asked: list[str] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def gets(self) -> int:
        """How often it was asked for the interruption."""
        return self.asked.count(ACTION)

    def announce(self, action: str, time: str) -> None:
        self.bodies[ACTION] = json.dumps({"action": action, "time": time})

    def withdraw(self) -> None:
        del self.bodies[ACTION]

    def recommend(self, time: str) -> None:
        self.bodies[REBALANCE] = json.dumps({"noticeTime": time})

    def schedule(self, code: str, not_before: str, state: str = "active") -> None:
        event = {
            "NotBefore": not_before,
            "Code": code,
            "Description": "scheduled reboot",
            "EventId": "instance-event-0d59937288b749b32",
            "NotAfter": "21 Nov 2026 23:00:00 GMT",
            "State": state,
        }
        self.bodies[MAINTENANCE] = json.dumps([event])

    def forget_tokens(self) -> None:
        """What happens when a token's life is over."""
        self.tokens.clear()

    async def put_token(self, request: web.Request) -> web.Response:
        if not 1 <= int(request.headers.get(TTL_HEADER, "0")) <= 21600:
            return web.Response(status=400)
        if self.hop_limit < 2:
            await self.release.wait()
        if self.token_status != 200:
            return web.Response(status=self.token_status)
        self.issued += 1
        token = f"token-{self.issued}"
        self.tokens.add(token)
        return web.Response(text=token)

    async def get(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path.removeprefix(ROOT))
        return await self.faults.apply(request, self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        if request.headers.get(TOKEN_HEADER) not in self.tokens:
            return web.Response(status=401)
        path = request.path.removeprefix(ROOT)
        if path in self.broken:
            return web.Response(status=self.broken[path])
        body = self.bodies.get(path)
        return web.Response(status=404) if body is None else web.Response(text=body)


@asynccontextmanager
async def fake_imds() -> AsyncIterator[FakeImds]:
    imds = FakeImds()
    app = web.Application()
    app.router.add_put("/latest/api/token", imds.put_token)
    app.router.add_get(ROOT + "{path:.+}", imds.get)
    async with on_loopback(app) as imds.url:
        try:
            yield imds
        finally:
            imds.faults.release.set()
            imds.release.set()
