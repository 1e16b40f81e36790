"""/livez, /readyz and /metrics on one port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from spottrain.contract import listening_socket

from spottrain_operator.io.metrics import LOOP_LAG

STUCK = 30.0
"""Seconds of event-loop lag at which /livez fails, so that the kubelet restarts the operator."""


class Health:
    def __init__(self, *, ready: Callable[[], bool]) -> None:
        """`ready` returns whether the caches are filled."""
        self._ready = ready
        self._beat = 0.0

    async def start(self, port: int, host: str = "") -> web.AppRunner:
        """Serves on this IP address; "" for all, of IPv4 and of IPv6. Raises OSError if it cannot."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listening_socket(host, port)).start()
        return runner

    async def measure_lag(self) -> None:
        """Measures the event loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._beat = loop.time()
            await asyncio.sleep(1.0)
            LOOP_LAG.set(max(0.0, loop.time() - self._beat - 1.0))

    async def _livez(self, _: web.Request) -> web.Response:
        late = asyncio.get_running_loop().time() - self._beat if self._beat else 0.0
        words = f"event loop is {late:.1f} s late\n"
        return web.Response(text=words, status=200 if late < STUCK else 500)

    async def _readyz(self, _: web.Request) -> web.Response:
        ready = self._ready()
        return web.Response(
            text="caches are filled\n" if ready else "listing\n", status=200 if ready else 503
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})
