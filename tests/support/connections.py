"""How servers and clients of the tests end."""

from __future__ import annotations

import asyncio


async def close_server(server: asyncio.Server) -> None:
    """Closes it when what it has accepted is a connection.

    What asyncio accepts in the turn of the loop in which a server is closed stays open for good, and a later
    test fails by that.
    """
    for each in server.sockets:
        asyncio.get_running_loop().remove_reader(each.fileno())
    await asyncio.sleep(0.01)
    server.close()


async def abort_connections() -> None:
    """Aborts all connections of the running loop, which is about to be closed.

    A TLS connection that is closed waits for its peer, and stays open in a loop that does not run any more.
    """
    for transport in list(asyncio.get_running_loop()._transports.values()):  # type: ignore[attr-defined]
        transport.abort()
    await asyncio.sleep(0.01)
