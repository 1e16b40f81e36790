"""Kept connections to trainers, which run programs that nobody here has read.

aiohttp goes on reading a connection that waits for its next request, and keeps every response that comes,
without a bound: a trainer could fill the operator's memory. Here a response that was not asked for ends the
connection. `_factory` is private to aiohttp; tests/unit/controller/test_kept_connections.py notices a change.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler


class _Connection(ResponseHandler):
    _asked = False

    def set_response_params(self, **settings: Any) -> None:
        """aiohttp calls this before it sends a request."""
        self._asked = True
        super().set_response_params(**settings)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """aiohttp calls this for each response: its head, and where its body will be read."""
        if self._asked:
            super().feed_data(data, size)
        else:
            self.abort()
        self._asked = False


def _connection(loop: asyncio.AbstractEventLoop) -> ResponseHandler:
    return _Connection(loop)


class KeptConnections(aiohttp.TCPConnector):
    """At most `limit` requests at once; a connection is closed when it was not used for `seconds`."""

    def __init__(self, *, limit: int, seconds: float) -> None:
        super().__init__(limit=limit, keepalive_timeout=seconds)
        self._factory = partial(_connection, asyncio.get_running_loop())
