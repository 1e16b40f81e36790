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

LONG = 3600.0


@pytest.mark.parametrize("status", [403, 503])
async def test_none_of_kopfs_requests_is_given_up(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, slept = kopf.OperatorSettings(), list[float]()
    tune(settings)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def answer(_: web.Request) -> web.StreamResponse:
        if sum(slept) > LONG:
            return web.json_response({})
        return web.json_response({"kind": "Status", "code": status}, status=status)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    request: Any = api.request
    async with on_loopback(app) as url, aiohttp.ClientSession() as session:
        context = SimpleNamespace(server=url, session=session)
        monkeypatch.setattr(api, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
        for _ in range(2):
            slept.clear()
            reply = await request.__wrapped__(
                "get", "/x", settings=settings, context=context, logger=logging.getLogger("kopf")
            )
            assert reply.status == 200 and slept[0] == 5.0 and max(slept) == 30.0, (
                "each begins with short waits"
            )
