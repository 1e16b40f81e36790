"""`python -m spottrain_operator.agent`: settings, sessions, signals. Process of the chart's DaemonSet.

No port and no probe: the network is the node's, where ports collide, and a probe that starts a process on
every node costs more than the agent. Instead each poll winds up a timer outside the event loop; should it
run down, it prints the stacks and ends the process, and the kubelet starts it anew.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
from functools import partial
from typing import Final

import aiohttp

from spottrain_operator.agent.api import Api, Endpoint
from spottrain_operator.agent.loop import Agent, log
from spottrain_operator.agent.metadata import Metadata
from spottrain_operator.agent.settings import Settings

STALLED_SECONDS: Final = 30.0
"""Far above what one poll can take: an interval and, at worst, four requests to the metadata service."""


async def serve(settings: Settings, endpoint: Endpoint) -> None:
    """Runs until SIGTERM or SIGINT."""
    stalled = settings.poll_seconds + STALLED_SECONDS
    async with aiohttp.ClientSession() as session:
        agent = Agent(
            Metadata(session, endpoint=settings.metadata_endpoint),
            Api(session, endpoint, node=settings.node, namespaces=settings.namespaces),
            poll_seconds=settings.poll_seconds,
            heartbeat=partial(faulthandler.dump_traceback_later, stalled, exit=True),
        )
        work = asyncio.create_task(agent.run())
        # As the first process of its container it would otherwise not react to SIGTERM at all.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        log("started", node=settings.node, metadata=settings.metadata_endpoint)
        await asyncio.wait([work])
        faulthandler.cancel_dump_traceback_later()
    log("stopped")
    if not work.cancelled():
        work.result()


def main() -> None:
    try:
        settings, endpoint = Settings.from_env(os.environ), Endpoint.in_cluster()
    except (ValueError, KeyError, OSError) as e:
        sys.exit(f"the notice agent cannot start: {type(e).__name__} {e}")
    asyncio.run(serve(settings, endpoint))


if __name__ == "__main__":
    main()
