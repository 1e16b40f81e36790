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

TOKEN_HEADER = "X-aws-ec2-metadata-token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"


@dataclass
class FakeImds:
    """What the service answers next, and what it was asked."""

    action: str | None = None
    """Body of spot/instance-action; None is a 404."""
    status: int | None = None
    """When set, every GET is answered with it."""
    location: str = ""
    """Where such an answer points to."""
    token_status: int = 200
    hang: bool = False
    """Answers nothing until `release` is set."""
    url: str = ""
    tokens: set[str] = field(default_factory=set)
    issued: int = 0
    gets: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def announce(self, action: str, time: str) -> None:
        self.action = json.dumps({"action": action, "time": time})

    def forget_tokens(self) -> None:
        """What happens when a token's life is over."""
        self.tokens.clear()

    async def put_token(self, request: web.Request) -> web.Response:
        if not 1 <= int(request.headers.get(TTL_HEADER, "0")) <= 21600:
            return web.Response(status=400)
        if self.token_status != 200:
            return web.Response(status=self.token_status)
        self.issued += 1
        token = f"token-{self.issued}"
        self.tokens.add(token)
        return web.Response(text=token)

    async def get_action(self, request: web.Request) -> web.Response:
        self.gets += 1
        if self.hang:
            await self.release.wait()
        if request.headers.get(TOKEN_HEADER) not in self.tokens:
            return web.Response(status=401)
        if self.status is not None:
            return web.Response(status=self.status, headers={"Location": self.location})
        return web.Response(status=404) if self.action is None else web.Response(text=self.action)


@asynccontextmanager
async def fake_imds() -> AsyncIterator[FakeImds]:
    imds = FakeImds()
    app = web.Application()
    app.router.add_put("/latest/api/token", imds.put_token)
    app.router.add_get("/latest/meta-data/spot/instance-action", imds.get_action)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    imds.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield imds
    finally:
        imds.release.set()
        await runner.cleanup()
