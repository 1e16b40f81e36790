"""/readyz on the node's loopback: whether the metadata service responds, and if not, why.

The agent uses the host network, so it opens no other port; the kubelet, on the same node, probes 127.0.0.1.
aiohttp's server is not used: it would cost each node some MiB more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

from spottrain_operator.agent.log import log

LOOPBACK: Final = "127.0.0.1"
_ASK_SECONDS = 5.0


@asynccontextmanager
async def serving(
    port: int, state: Callable[[], tuple[bool, str]], host: str = LOOPBACK
) -> AsyncIterator[int]:
    """Serves /readyz within the block; yields the port, or 0 where it is disabled or already in use."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                request = await reader.readline()
            writer.write(_reply(request, *state()))
            await writer.drain()
        except (TimeoutError, ValueError, OSError):  # no request, or the peer has disconnected
            pass
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, host, port) if port else None
    except OSError as e:
        log(
            "readyPortTaken",
            address=host,
            port=port,
            why=f"{e}; set agent.readyPort to a port that is free on the nodes",
        )
        server = None
    try:
        yield server.sockets[0].getsockname()[1] if server else 0
    finally:
        if server:
            server.close()


def _reply(request: bytes, ready: bool, sentence: str) -> bytes:
    method, path, *_ = [*request.split(), b"", b""]
    if method not in (b"GET", b"HEAD") or path.partition(b"?")[0] != b"/readyz":
        status, sentence = HTTPStatus.NOT_FOUND, "only GET /readyz is answered here"
    else:
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
    body = f"{sentence}\n".encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == b"HEAD" else body)
