"""Small worlds for the search of `headexplore.py`. Used by the model tests."""

from __future__ import annotations

from dataclasses import replace

from spottrain.checkpoint.head.state import BEST, ClaimPolicy, Entry, Head, HeadState, Identity
from spottrain.contract import OnExisting

from tests.support.headworld import Scenario


def a(attempt: int) -> Identity:
    return Identity(job_uid="A", job="digits", attempt=attempt)


OTHER = Identity(job_uid="B", job="other", attempt=1)


def head(
    *steps: int, state: HeadState = HeadState.RELEASED, attempt: int = 1, best: int | None = None
) -> Head:
    """HEAD of job A with these checkpoints, newest first, of which the one of step `best` is marked."""
    entries = tuple(
        Entry(
            key=f"checkpoints/t000001-s{s:09d}-old/",
            step=s,
            time=0.0,
            bytes=1,
            keptAs=BEST if s == best else "",
        )
        for s in steps
    )
    return Head(
        jobUID="A", job="digits", attempt=attempt, term=1, nonce="old", state=state, checkpoints=entries
    )


TWO_ATTEMPTS = Scenario(name="two attempts, two commits each", people=(a(1), a(2)), commits=2, faults=1)
SUCCESSION = Scenario(
    name="an attempt takes over from one that crashed, and prunes",
    people=(a(2), a(3)),
    commits=1,
    faults=2,
    head=head(5, 4, state=HeadState.ACTIVE),
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
BEST_KEPT = Scenario(
    name="some commits are the best so far",
    people=(a(2), a(3)),
    commits=2,
    best=True,
    faults=0,
    head=head(7, 5, 4, state=HeadState.ACTIVE, best=4),
)
PRUNED = Scenario(
    name="a person prunes while a job comes",
    people=(a(2),),
    tools=("prune",),
    best=True,
    faults=2,
    head=head(7, 5, 4, 3, best=4),
)
PRUNED_TWICE = replace(PRUNED, name="two persons prune", tools=("prune", "prune"), best=False, faults=1)
COPIED_OVER = Scenario(
    name="a copy into a finished URI that others want",
    people=(OTHER,),
    policies=(ClaimPolicy(on_existing=OnExisting.RESUME),),
    tools=("copy", "prune"),
    faults=1,
    crashes=0,
    head=head(7, 5, state=HeadState.DONE, best=5),
)
COPIED_AGAIN = Scenario(
    name="two copies into an empty URI that a job wants",
    people=(OTHER,),
    policies=(ClaimPolicy(on_existing=OnExisting.FRESH),),
    tools=("copy", "copy"),
    faults=1,
)
VANISH_REPAIRED = replace(
    VANISH,
    name="somebody deletes HEAD and makes it again",
    people=(a(2), OTHER),
    policies=(ClaimPolicy(), ClaimPolicy(on_existing=OnExisting.RESUME)),
    tools=("repair",),
    keep=9,
    crashes=0,
    head=head(5),
)
"""Nobody deletes in it: what a run is deleting just then may be named again, and a resume passes over it."""
VANISH_SWEPT = replace(
    VANISH, name="somebody deletes HEAD while another sweeps", sweep=True, faults=0, head=head()
)
SCENARIOS = [
    SUCCESSION,
    SWEEP,
    FALL_BACK,
    VANISH,
    VANISH_SWEPT,
    VANISH_REPAIRED,
    PRUNED,
    PRUNED_TWICE,
    COPIED_OVER,
    COPIED_AGAIN,
    foreign(OnExisting.FAIL),
]
"""Together ten seconds: tests/unit runs them all."""
LONGER = [
    TWO_ATTEMPTS,
    THREE,
    SAME,
    BEST_KEPT,
    *(foreign(policy) for policy in (OnExisting.RESUME, OnExisting.FRESH)),
]
"""Seconds each: `make test-heavy` runs them all."""
