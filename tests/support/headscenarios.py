"""Small worlds for the search of `headexplore.py`. Used by the model test and by bench/head_explore.py."""

from __future__ import annotations

from dataclasses import replace

from spottrain.contract import OnExisting
from spottrain.head import ClaimPolicy, Entry, Head, Identity, State

from tests.support.headworld import Scenario


def a(attempt: int) -> Identity:
    return Identity(job_uid="A", job="digits", attempt=attempt)


OTHER = Identity(job_uid="B", job="other", attempt=1)


def head(*steps: int, state: State = State.RELEASED, attempt: int = 1) -> Head:
    """HEAD of job A with these checkpoints, newest first."""
    entries = tuple(Entry(key=f"checkpoints/t000001-s{s:09d}-old/", step=s, time=0.0, bytes=1) for s in steps)
    return Head(
        jobUID="A", job="digits", attempt=attempt, term=1, nonce="old", state=state, checkpoints=entries
    )


TWO_ATTEMPTS = Scenario(name="two attempts, two commits each", people=(a(1), a(2)), commits=2, faults=1)
SUCCESSION = Scenario(
    name="an attempt takes over from one that crashed, and prunes",
    people=(a(2), a(3)),
    commits=1,
    faults=2,
    head=head(5, 4, state=State.ACTIVE),
)
THREE = Scenario(name="three attempts", people=(a(1), a(2), a(3)), faults=0)
SAME = Scenario(name="one attempt started twice", people=(a(1), a(1)), commits=1, faults=2)
SWEEP = Scenario(
    name="sweeping beside a successor",
    people=(a(2), a(3)),
    faults=1,
    sweep=True,
    head=head(5, 4),
)
FALL_BACK = Scenario(
    name="the newest checkpoints are damaged",
    people=(a(2), a(3)),
    faults=0,
    commits=2,
    fall_back=True,
    head=head(9, 5),
)


def foreign(policy: OnExisting) -> Scenario:
    return Scenario(
        name=f"another job comes after, onExisting {policy}",
        people=(a(1), a(2), OTHER),
        policies=(ClaimPolicy(), ClaimPolicy(), ClaimPolicy(on_existing=policy)),
        commits=1,
        faults=1,
        crashes=0,
    )


VANISH = Scenario(name="somebody deletes HEAD", people=(a(2), a(3)), faults=1, vanish=True, head=head(5, 4))
SCENARIOS = [
    TWO_ATTEMPTS,
    SUCCESSION,
    THREE,
    SAME,
    SWEEP,
    FALL_BACK,
    VANISH,
    *(foreign(policy) for policy in OnExisting),
]
"""Seconds each; the test runs them all."""
LARGE = [
    replace(TWO_ATTEMPTS, faults=2, crashes=2),
    replace(SUCCESSION, commits=2, faults=2),
    replace(THREE, faults=1, crashes=0),
    replace(SWEEP, faults=2, crashes=2),
    replace(FALL_BACK, faults=1),
    replace(VANISH, faults=2, crashes=2),
]
"""Minutes each, and gigabytes."""
