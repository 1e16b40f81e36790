"""What the proxy before the S3 server does to a scene's requests, by a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from spottrain.contract import HEAD_KEY

from tests.support.faultproxy import Fault, Plan, Request, Treatment
from tests.support.headrace import FAULTS as OF_HEAD

OF_OTHERS: Final = {
    Fault.NONE: 180,
    Fault.REPLY_LOST: 4,
    Fault.TWICE: 3,
    Fault.ERROR_503: 3,
    Fault.ERROR_500: 2,
    Fault.ERROR_AFTER: 2,
    Fault.REQUEST_LOST: 2,
    Fault.REQUEST_LATE: 2,
    Fault.REQUEST_CUT: 1,
    Fault.REPLY_CUT: 1,
}
"""Weights, for shards, manifests, listings, deletions. A time-out of theirs takes a minute, so none hangs."""


def is_head(request: Request) -> bool:
    return request.path.split("?")[0].endswith(f"/{HEAD_KEY}")


def plan(seed: str) -> Plan:
    def treat(request: Request) -> Treatment:
        chance = random.Random(f"{seed}/{request.client}/{request.number}")
        weights = OF_HEAD if is_head(request) else OF_OTHERS
        fault = chance.choices(list(weights), list(weights.values()))[0]
        return Treatment(fault=fault, delay=chance.uniform(0, 0.012), late=chance.uniform(0, 0.12))

    return treat


def with_outages(otherwise: Plan, dark_until: Callable[[], float]) -> Plan:
    """Until that moment of the monotonic clock the store is down: connections end, or a proxy says 503."""

    def treat(request: Request) -> Treatment:
        if time.monotonic() >= dark_until():
            return otherwise(request)
        return Treatment(fault=Fault.REQUEST_LOST if request.number % 2 else Fault.ERROR_503)

    return treat
