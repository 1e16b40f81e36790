"""What a job's status must say in the end, from what was really done to its attempts. Pure; called by judge.

Written from the design's table of endings and not from the operator's code: the two agree, or one is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tests.chaosop.scene import Blow, Policy


class Charge(StrEnum):
    """What an ending costs."""

    SUCCESS = "success"
    PERMANENT = "permanent failure"
    FAILURE = "failure"
    INTERRUPTION = "interruption"


CHARGES: Final = {
    Blow.DONE: Charge.SUCCESS,
    Blow.DONE_BARE: Charge.PERMANENT,
    Blow.REFUSED: Charge.PERMANENT,
    Blow.REFUSED_BARE: Charge.PERMANENT,
    Blow.SAVED: Charge.INTERRUPTION,
    Blow.SAVED_BARE: Charge.INTERRUPTION,
    Blow.LOST: Charge.INTERRUPTION,
    Blow.LOST_BARE: Charge.INTERRUPTION,
    Blow.CRASHED: Charge.FAILURE,
    Blow.KILLED: Charge.FAILURE,
    Blow.OUT_OF_MEMORY: Charge.FAILURE,
    Blow.OVER_LIMIT: Charge.FAILURE,
    Blow.PRESSURE: Charge.INTERRUPTION,
    Blow.SHUTDOWN: Charge.INTERRUPTION,
    Blow.REJECTED: Charge.INTERRUPTION,
    Blow.DELETED: Charge.INTERRUPTION,
    Blow.DELETED_EARLY: Charge.INTERRUPTION,
    Blow.FORCED: Charge.INTERRUPTION,
    Blow.STRIPPED: Charge.INTERRUPTION,
    Blow.EVICTED: Charge.INTERRUPTION,
    Blow.PREEMPTED: Charge.INTERRUPTION,
    Blow.TAINTED: Charge.INTERRUPTION,
    Blow.NOTICE: Charge.INTERRUPTION,
    Blow.VANISHED: Charge.INTERRUPTION,
    Blow.SILENT: Charge.INTERRUPTION,
    Blow.LOST_AT_DONE: Charge.INTERRUPTION,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Deed:
    """What was done to an attempt."""

    attempt: int
    blow: Blow
    finished: bool = False
    """Whether the trainer, asked to stop, said that it is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    phase: str
    """Succeeded or Failed; "" where nothing that was done ends the job."""
    failures: int
    interruptions: frozenset[int]
    """One number, but for a trainer that finishes under its notice: counted before it says done, or not."""
    charged: dict[int, bool]
    """By attempt, whether it is charged as a failure."""


def truth(deeds: Iterable[Deed], policy: Policy) -> Truth:
    """The deeds up to the one that ends the job; what is done later changes nothing."""
    failures = interruptions = 0
    charged: dict[int, bool] = {}
    for deed in deeds:
        charge = Charge.SUCCESS if deed.finished else CHARGES[deed.blow]
        charged[deed.attempt] = charge in (Charge.FAILURE, Charge.PERMANENT)
        if charge is Charge.SUCCESS:
            counts = {interruptions, interruptions + (deed.blow is Blow.NOTICE)}
            return _truth("Succeeded", failures, counts, charged)
        failures += charge in (Charge.FAILURE, Charge.PERMANENT)
        interruptions += charge is Charge.INTERRUPTION
        spent = failures > policy.failures or interruptions > policy.interruptions
        if charge is Charge.PERMANENT or spent:
            return _truth("Failed", failures, {interruptions}, charged)
    return _truth("", failures, {interruptions}, charged)


def _truth(phase: str, failures: int, counts: set[int], charged: dict[int, bool]) -> Truth:
    return Truth(phase=phase, failures=failures, interruptions=frozenset(counts), charged=charged)
