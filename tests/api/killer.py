"""A proxy between operator and API server that strikes at a chosen write.

Either the operator is killed right after it: the write has taken effect, and the process dies before the
reply and before its next write. Or the write is held back, as on a network that delivers it late.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from tests.api.kube import Kube
from tests.support.connections import abort_connections, close_server

HOP = {"host", "content-length", "transfer-encoding", "connection", "content-encoding", "accept-encoding"}


@dataclass(frozen=True, kw_only=True)
class Write:
    """A kind of write: its method, what its path ends with, and a word of its body."""

    name: str
    method: str
    resource: str
    body: str = ""

    def fits(self, method: str, path: str, body: bytes) -> bool:
        return method == self.method and self.resource in path and self.body.encode() in body


class KillerProxy:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._target: Write | None = None
        self._kill: Callable[[], None] = lambda: None
        self._holds = False
        self.fired = threading.Event()
        self.deliver = threading.Event()
        """Set by the test: the write that is held back goes on."""
        self.delivered: int | None = None
        """The server's status for it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def arm(self, target: Write, kill: Callable[[], None]) -> None:
        self._kill, self._target = kill, target

    def hold(self, target: Write, strike: Callable[[], None]) -> None:
        """Holds the next such write back until `deliver`; `strike` is called when it comes."""
        self._holds = True
        self.arm(target, strike)

    def __enter__(self) -> KillerProxy:
        self._thread.start()
        assert self._up.wait(10), "the proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.deliver.set()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # it cancels what is left (watches)
            runner.run(self._run())

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        async with aiohttp.ClientSession(auto_decompress=False) as self._session:
            app = web.Application(client_max_size=16 * 2**20)
            app.router.add_route("*", "/{path:.*}", self._forward)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            assert runner.server is not None
            server = await asyncio.get_running_loop().create_server(runner.server, "127.0.0.1", self.port)
            self._up.set()
            await self._stop.wait()
            await close_server(server)
            await runner.cleanup()
        await abort_connections()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        url = f"https://{self._kube.host}{request.raw_path}"
        timeout = aiohttp.ClientTimeout(total=None)
        held = self._holds and self._is_target(request, body)
        if held:
            self._target = None
            self._kill()
            self.fired.set()
            await asyncio.to_thread(self.deliver.wait, 120)
        async with self._session.request(
            request.method, url, data=body or None, headers=headers, ssl=self._kube.context, timeout=timeout
        ) as upstream:
            if self._is_target(request, body) and upstream.status < 400:
                self._target = None
                self._kill()
                self.fired.set()
            if held:
                self.delivered = upstream.status
            reply = web.StreamResponse(status=upstream.status)
            reply.headers["Content-Type"] = upstream.headers.get("Content-Type", "application/json")
            with contextlib.suppress(ConnectionError):  # the operator has been killed
                await reply.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await reply.write(chunk)
            return reply

    def _is_target(self, request: web.Request, body: bytes) -> bool:
        target = self._target
        dry = "dryRun" in request.query
        return target is not None and not dry and target.fits(request.method, request.path, body)
