"""What the fake metadata servers share: a real HTTP server on loopback, and the faults that it can have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Faults:
    """How the next requests go wrong, all alike until it is changed."""

    status: int | None = None
    """Answered to whatever comes."""
    location: str = ""
    """Where such an answer points to."""
    hang: bool = False
    """Answers nothing until the server ends."""
    reset: bool = False
    """Cuts the connection instead of answering."""
    truncate: bool = False
    """Promises more than it sends."""
    seconds: float = 0.0
    """Before each answer."""
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def clear(self) -> None:
        self.status, self.location, self.hang, self.seconds = None, "", False, 0.0
        self.reset = self.truncate = False

    async def apply(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        await asyncio.sleep(self.seconds)
        if self.hang:
            await self.release.wait()
        if self.reset:
            cut(request)
            return web.Response()
        if self.status is not None:
            return web.Response(status=self.status, headers={"Location": self.location})
        if self.truncate:
            return await _truncated(request)
        return await handler(request)


def cut(request: web.Request) -> None:
    """As a server does that is moved or restarted: the connection is reset."""
    if request.transport is not None:
        request.transport.abort()


async def _truncated(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"action": "term')
    cut(request)
    return response


@asynccontextmanager
async def on_loopback(app: web.Application) -> AsyncIterator[str]:
    """The URL of the server for the length of the block."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
