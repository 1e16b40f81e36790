"""`python -m spottrain_operator.agent`: runs the notice agent with its settings, sessions and signals.

It uses the host network and opens no port: the readiness probe looks for a file. No liveness probe is needed:
the event loop resets a timer of faulthandler. If the timer expires, it prints the stacks and exits the
process, and the kubelet restarts it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp

from spottrain_operator.agent.api import Api
from spottrain_operator.agent.log import log
from spottrain_operator.agent.loop import Agent
from spottrain_operator.agent.settings import AgentSettings
from spottrain_operator.agent.sources.choose import source_of
from spottrain_operator.agent.sources.client import Client
from spottrain_operator.environment import Endpoint

STALLED_SECONDS: Final = 30.0
"""Far longer than one iteration of the event loop can take."""


async def serve(settings: AgentSettings, endpoint: Endpoint) -> None:
    """Runs until SIGTERM or SIGINT."""
    stalled = settings.poll_seconds + STALLED_SECONDS

    def beat(ready: bool) -> None:
        faulthandler.dump_traceback_later(stalled, exit=True)
        show(settings.ready_file, ready)

    show(settings.ready_file, False)  # the file of an earlier container of this pod
    async with aiohttp.ClientSession() as session:
        agent = Agent(
            partial(source_of, settings.platform, Client(session, endpoint=settings.metadata_endpoint)),
            Api(session, endpoint, node=settings.node, namespaces=settings.namespaces),
            poll_seconds=settings.poll_seconds,
            beat=beat,
        )
        work = asyncio.create_task(agent.run())
        # PID 1 of a container ignores SIGTERM unless it has a handler.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        log("started", node=settings.node, platform=settings.platform, metadata=settings.metadata_endpoint)
        await asyncio.wait([work])
        faulthandler.cancel_dump_traceback_later()
    log("stopped")
    if not work.cancelled():
        work.result()


def show(ready_file: Path | None, ready: bool) -> None:
    """Makes or removes the file for which the readiness probe looks."""
    if ready_file is not None:
        ready_file.touch() if ready else ready_file.unlink(missing_ok=True)


def main() -> None:
    try:
        settings, endpoint = AgentSettings.from_env(), Endpoint.in_pod()
    except ValueError as e:
        sys.exit(f"the notice agent cannot start: {e}")
    asyncio.run(serve(settings, endpoint))


if __name__ == "__main__":
    main()
