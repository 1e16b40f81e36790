"""How servers of the tests end."""

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
