"""What happens in a scene, as data: one job, how each of its attempts ends, when the operator is killed.

Made by chance.py, played by play.py, judged by judge.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Blow(StrEnum):
    """What ends an attempt."""

    # the trainer by itself
    DONE = "done"
    DONE_BARE = "exit 0 without a message"
    REFUSED = "64 with a message"
    REFUSED_BARE = "64 without a message"
    SAVED = "75 with a message"
    SAVED_BARE = "75 without a message"
    LOST = "79 with a message"
    LOST_BARE = "79 without a message"
    CRASHED = "1"
    KILLED = "137"
    OUT_OF_MEMORY = "OOMKilled"
    # the kubelet
    OVER_LIMIT = "evicted for a limit of its own"
    PRESSURE = "evicted by a node under pressure"
    SHUTDOWN = "graceful shutdown of the node"
    REJECTED = "refused by the kubelet"
    # from outside
    DELETED = "deleted by hand"
    DELETED_EARLY = "deleted by hand before it had a node"
    FORCED = "deleted by hand with force"
    STRIPPED = "deleted by hand with force, finalizer and all"
    EVICTED = "evicted through the API"
    PREEMPTED = "preempted by the scheduler"
    TAINTED = "deleted for a taint"
    NOTICE = "notice, and the node's end"
    VANISHED = "node gone with no word, its object deleted"
    SILENT = "node gone with no word, its object not ready"
    LOST_AT_DONE = "node gone between done and its word"


class Farewell(StrEnum):
    """What a trainer does that is told to stop."""

    SAVES = "75"
    LOSES = "79"
    LEAVES = "0 without a message"
    CRASHES = "1"
    DEAF = "killed after its grace"
    FINISHES = "done"


POLITE: Final = frozenset(
    {Blow.DELETED, Blow.EVICTED, Blow.PREEMPTED, Blow.TAINTED, Blow.NOTICE, Blow.SHUTDOWN}
)
"""Blows at which the trainer is told to stop, and has time to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """How one attempt ends. Times in seconds."""

    blow: Blow
    after: float = 1.0
    """Since the trainer trains; since the pod was made where it never will."""
    rank: int = 0
    """Which pod is hit."""
    farewell: Farewell = Farewell.SAVES
    saving: float = 0.5
    warning: float = 6.0
    """Between notice and end."""
    told: bool = True
    """Whether the agent writes the deadline onto the pod as well."""
    evicts: bool = True
    """Whether pods of a silent node are deleted for its taint; else its object is removed."""
    cleaning: float = 5.0
    """Until the pod garbage collector, or whoever it is, takes away what a vanished node has left."""
    peers_hang: bool = False
    """Whether the other ranks of a gang hang when one is gone; else they leave."""

    @property
    def may_finish(self) -> bool:
        return self.blow in POLITE and self.farewell is Farewell.FINISHES


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """SIGKILL of the operator at its n-th write in the scene's namespace."""

    write: int
    before: bool
    """Before it takes effect; else after that, and before the reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The job's budgets, and where it runs."""

    failures: int = 3
    interruptions: int = 100
    backoff: int = 1
    capacity: str = "Spot"
    """Or SpotFirst, on demand after one reclaim and back after a minute; or Cheapest."""
    deadline: float = 0.0
    """Of Cheapest, in seconds from the job's start."""

    @property
    def mixes(self) -> bool:
        """Whether it moves between spot and on-demand."""
        return self.capacity != "Spot"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    seed: int
    number: int
    workers: int = 1
    policy: Policy = Policy()
    grace: int = 4
    acts: tuple[Act, ...] = ()
    kills: tuple[Kill, ...] = ()
    webhook_down: float = 0.0
    """Seconds from the operator's first UPDATE of a pod in which a failing webhook refuses each of them."""
    edited: bool = False
    """Whether the budgets are raised once it is over: a new generation, which another run looks at."""

    @property
    def namespace(self) -> str:
        return f"chaos-{self.number}"

    @property
    def name(self) -> str:
        return f"scene {self.number}"
