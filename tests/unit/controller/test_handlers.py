"""How kopf is tuned."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import aiohttp
import kopf
import pytest
from aiohttp import web
from kopf._cogs.clients import api
from spottrain_operator.control.handlers import tune

from tests.support.loopback import on_loopback

HOUR = 3600.0


async def test_each_of_kopfs_requests_outlives_an_outage_of_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, slept, asked = kopf.OperatorSettings(), list[float](), 0
    tune(settings)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def answer(_: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return web.json_response({"kind": "Status", "code": 503}, status=503)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    request: Any = api.request
    async with on_loopback(app) as url, aiohttp.ClientSession() as session:
        context = SimpleNamespace(server=url, session=session)
        monkeypatch.setattr(api, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
        for _ in range(2):
            slept.clear()
            with pytest.raises(Exception, match="503"):
                await request.__wrapped__(
                    "get", "/x", settings=settings, context=context, logger=logging.getLogger("kopf")
                )
            assert sum(slept) == HOUR and max(slept) == 5.0, "each request begins anew"
    assert asked == 2 * (len(slept) + 1)
