"""Which request of the operator's is disturbed, and how: drawn from a seed, the scene, and a count. Pure.

Asked by proxy.py. The n-th write in a scene's namespace meets the same fate in each run of that seed; what
the n-th write is depends on what came before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final

from tests.chaosop.scene import Scene


class Fault(StrEnum):
    NONE = "none"
    LATE = "late"
    REFUSED_409 = "409"
    REFUSED_410 = "410"
    REFUSED_429 = "429"
    REFUSED_500 = "500"
    REFUSED_503 = "503"
    LOST = "request lost"
    """The connection ends, and the server has heard nothing."""
    ANSWER_LOST = "answer lost"
    """The server has done it, and the connection ends."""
    ANSWER_500 = "500 after the fact"
    TWICE = "twice"
    """The server does it twice; the second answer counts."""
    WEBHOOK = "refused by a webhook"
    """Each UPDATE of a pod, for a while (`Scene.webhook_down`)."""
    CUT = "watch cut"
    DROPPED = "event dropped"
    DELAYED = "event delayed"
    DOUBLED = "event doubled"
    GONE = "watch: 410"
    BROKEN = "watch: 500"
    """An error event that ends the operator's process."""


REFUSALS: Final = {
    Fault.REFUSED_409: (409, "Conflict"),
    Fault.REFUSED_410: (410, "Expired"),
    Fault.REFUSED_429: (429, "TooManyRequests"),
    Fault.REFUSED_500: (500, "InternalError"),
    Fault.REFUSED_503: (503, "ServiceUnavailable"),
}
WRITES: Final = {
    Fault.LATE: 0.04,
    Fault.REFUSED_409: 0.015,
    Fault.REFUSED_429: 0.015,
    Fault.REFUSED_500: 0.008,
    Fault.REFUSED_503: 0.004,
    Fault.LOST: 0.015,
    Fault.ANSWER_LOST: 0.02,
    Fault.ANSWER_500: 0.008,
    Fault.TWICE: 0.015,
}
"""Share of the operator's writes."""
LISTS: Final = {
    Fault.LATE: 0.03,
    Fault.REFUSED_410: 0.03,
    Fault.REFUSED_429: 0.02,
    Fault.REFUSED_500: 0.02,
    Fault.ANSWER_LOST: 0.02,
}
"""Share of the operator's own page-wise LISTs. A watch hears of 410 by an event, never by a status."""
READS: Final = {
    Fault.LATE: 0.02,
    Fault.REFUSED_429: 0.01,
    Fault.REFUSED_500: 0.01,
    Fault.LOST: 0.01,
    Fault.ANSWER_LOST: 0.01,
}
KINDS: Final = {"write": WRITES, "read": READS, "list": LISTS}
EVENTS: Final = {Fault.DROPPED: 0.004, Fault.DELAYED: 0.06, Fault.DOUBLED: 0.04}
"""Share of the events of watches. Up to 4 s after a dropped one its watch expires with 410: an API server
repeats what it has, and says so where it has it no longer; it never keeps an event to itself."""
STREAMS: Final = {Fault.CUT: 0.004, Fault.GONE: 0.001, Fault.BROKEN: 0.0002}
"""After an event, what becomes of its watch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fate:
    fault: Fault = Fault.NONE
    seconds: float = 0.0


SPARED: Final = Fate()


def request_fate(seed: int, place: str, kind: str, count: int) -> Fate:
    """Of the count-th request of a kind in a place: a namespace, or all that has none."""
    return _draw(Random(f"{seed}/{place}/{kind}/{count}"), KINDS[kind], longest=1.0)


def event_fate(seed: int, place: str, count: int) -> Fate:
    return _draw(Random(f"{seed}/{place}/event/{count}"), EVENTS, longest=4.0)


def stream_fate(seed: int, count: int) -> Fault:
    return _draw(Random(f"{seed}/stream/{count}"), STREAMS, longest=0.0).fault


def kill_at(scene: Scene, write: int) -> bool | None:
    """Whether the operator dies before this write of its in the scene (True), after it (False), or not."""
    return next((kill.before for kill in scene.kills if kill.write == write), None)


def _draw(random: Random, shares: dict[Fault, float], *, longest: float) -> Fate:
    drawn = random.random()
    for fault, share in shares.items():
        if drawn < share:
            return Fate(fault=fault, seconds=random.uniform(0, longest))
        drawn -= share
    return SPARED


@dataclass(frozen=True, kw_only=True, slots=True)
class Jump:
    """From `at` seconds on the operator's clock is ahead by `ahead` seconds, or behind."""

    at: float
    ahead: float


def jumps(seed: int, *, longest: float, until: float) -> tuple[Jump, ...]:
    """Half of the time the clock is right; else it is off by up to `longest` seconds."""
    random, at, made = Random(f"{seed}/clock"), 0.0, list[Jump]()
    while at < until:
        at += random.uniform(3, 20)
        size = longest ** random.random() if longest > 1 else 0.0
        ahead = random.choice((0.0, size, -size)) if random.random() < 0.7 else 0.0
        made.append(Jump(at=at, ahead=ahead))
    return tuple(made)
