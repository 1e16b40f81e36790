"""`python3 -m spottrain_operator`: runs the operator of one cluster."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import datetime

import kopf

from spottrain_operator.control.handlers import registry
from spottrain_operator.control.service import Service, utc_now
from spottrain_operator.io import logs
from spottrain_operator.settings import Settings


async def run(settings: Settings, now: Callable[[], datetime]) -> None:
    await kopf.operator(
        registry=registry(Service(settings, now=now)),
        clusterwide=not settings.namespaces,
        namespaces=list(settings.namespaces),
        standalone=True,
    )


def main(*, now: Callable[[], datetime] = utc_now) -> int:
    try:
        settings = Settings.from_env()
    except ValueError as error:
        print(f"the operator's environment is invalid: {error}", file=sys.stderr)
        return 2
    logs.set_up(settings.log_level)
    asyncio.run(run(settings, now))
    return 0  # ended by a signal; a watch that cannot recover raises, and a restart is cheap


if __name__ == "__main__":
    sys.exit(main())
