"""`python -m spottrain_operator.agent`: runs the notice agent with its settings, sessions and signals.

On the host network ports can collide, so the only port is a readiness endpoint on loopback. No liveness probe
is needed: the event loop resets a timer of faulthandler. If the timer expires, it prints the stacks and exits
the process, and the kubelet restarts it.
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
from spottrain_operator.agent.log import log
from spottrain_operator.agent.loop import Agent
from spottrain_operator.agent.ready import serving
from spottrain_operator.agent.settings import AgentSettings
from spottrain_operator.agent.sources.choose import source_of
from spottrain_operator.agent.sources.client import Client

STALLED_SECONDS: Final = 30.0
"""Far longer than one iteration of the event loop can take."""


async def serve(settings: AgentSettings, endpoint: Endpoint) -> None:
    """Runs until SIGTERM or SIGINT."""
    stalled = settings.poll_seconds + STALLED_SECONDS
    async with aiohttp.ClientSession() as session:
        agent = Agent(
            partial(source_of, settings.platform, Client(session, endpoint=settings.metadata_endpoint)),
            Api(session, endpoint, node=settings.node, namespaces=settings.namespaces),
            acknowledge=settings.acknowledge,
            poll_seconds=settings.poll_seconds,
            heartbeat=partial(faulthandler.dump_traceback_later, stalled, exit=True),
        )
        work = asyncio.create_task(agent.run())
        # PID 1 of a container ignores SIGTERM unless it has a handler.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        async with serving(settings.ready_port, agent.readiness, settings.bind_address):
            log(
                "started", node=settings.node, platform=settings.platform, metadata=settings.metadata_endpoint
            )
            await asyncio.wait([work])
        faulthandler.cancel_dump_traceback_later()
    log("stopped")
    if not work.cancelled():
        work.result()


def main() -> None:
    try:
        settings = AgentSettings.from_env(os.environ)
        endpoint = Endpoint.in_cluster(settings.account)
    except (ValueError, KeyError, OSError) as e:
        sys.exit(f"the notice agent cannot start: {type(e).__name__} {e}")
    asyncio.run(serve(settings, endpoint))


if __name__ == "__main__":
    main()
