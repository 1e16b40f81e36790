"""HEAD: the object that records which attempt trains and which checkpoints are durable; its rules of change.

`compare_and_swap.py` carries out the decisions made here by conditional PUTs, and `owner.py` applies both to
a store. tests/unit/runtime/checkpoint/test_head_model.py runs it through every interleaving of a model.
This module does no I/O, reads no clock and draws no random numbers.

A change of HEAD is an intent (Claiming, Committing, Releasing): a function from the current HEAD to the new
HEAD. An intent that must not proceed raises a RunError.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final, Protocol, TypeVar

from spottrain.contract import CHECKPOINTS_PREFIX, OnExisting, Reason, step_of_key, term_of_key
from spottrain.core.log_format import counted
from spottrain.errors import CheckpointError, ConfigurationError, Superseded

FORMAT: Final = 1
MIN_KEEP: Final = 2
"""A single kept checkpoint could turn out to be damaged, and then all progress would be lost."""
BEST: Final = "best"
"""`keptAs` of the job's best checkpoint so far; at most one entry has it (see `Committing`)."""
KEPT_FOR_JOB: Final = "job:"
"""Prefix of `keptAs` on entries that an earlier job left at this URI (see `Claiming`)."""
MAKE_AGAIN: Final = (
    "spottrain checkpoints repair URI makes HEAD again from the checkpoints that are there; or use another "
    "URI"
)


class HeadState(StrEnum):
    ACTIVE = "active"
    RELEASED = "released"
    DONE = "done"
    DELETED = "deleted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One committed checkpoint."""

    key: str
    step: int
    time: float
    """Unix seconds at which the save began."""
    bytes: int
    keptAs: str = ""
    """Why it is kept beyond `keep`: BEST, or KEPT_FOR_JOB and a UID; no commit drops such an entry.
    Empty for most entries."""

    @property
    def foreign(self) -> bool:
        return self.keptAs.startswith(KEPT_FOR_JOB)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    jobUID: str
    job: str
    attempt: int
    term: int
    """Number of this claim: one more than that of the previous claim, so it is unique."""
    nonce: str
    state: HeadState
    checkpoints: tuple[Entry, ...] = ()
    """Newest commit first. This order, not the step, defines the latest checkpoint."""
    format: int = FORMAT

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(entry.key for entry in self.checkpoints)

    @property
    def resumable(self) -> tuple[Entry, ...]:
        """Entries that the job may resume from, newest first, its best included."""
        return tuple(entry for entry in self.checkpoints if not entry.foreign)

    @property
    def best(self) -> Entry | None:
        return next((entry for entry in self.checkpoints if entry.keptAs == BEST), None)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes | bytearray | memoryview) -> Head:
        """Parses HEAD. Raises ConfigurationError for a newer format, CheckpointError for an invalid HEAD."""
        try:
            raw: Any = json.loads(bytes(text))
            number = _typed(raw, "format", int)
            if number > FORMAT:
                raise ConfigurationError(
                    f"HEAD has format {number}, written by a newer spottrain; this one reads up to {FORMAT}. "
                    "Use the newer image."
                )
            return cls(
                jobUID=_typed(raw, "jobUID", str),
                job=_typed(raw, "job", str),
                attempt=_typed(raw, "attempt", int),
                term=_typed(raw, "term", int),
                nonce=_typed(raw, "nonce", str),
                state=HeadState(raw["state"]),
                checkpoints=tuple(_entry(item) for item in _typed(raw, "checkpoints", list)),
                format=number,
            )
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise CheckpointError(
                f"HEAD cannot be read ({type(error).__name__}: {error}); nothing was changed. {MAKE_AGAIN}"
            ) from error


T = TypeVar("T")


def _typed(raw: Any, name: str, kind: type[T]) -> T:
    value = raw[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}")
    return value


def _entry(raw: Any) -> Entry:
    return Entry(
        key=_typed(raw, "key", str),
        step=_typed(raw, "step", int),
        time=float(raw["time"]),
        bytes=_typed(raw, "bytes", int),
        keptAs=_typed(raw, "keptAs", str),
    )


# --- identities and intents -------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    job_uid: str
    job: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimPolicy:
    on_existing: OnExisting = OnExisting.FAIL
    known_durable_step: int | None = None
    """Last step that the operator knows to be durable; if set, a fresh start is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """One successful claim. Terms are unique, so (job UID, attempt, term) proves ownership."""

    who: Identity
    term: int

    def covers(self, head: Head) -> bool:
        return (head.jobUID, head.attempt, head.term) == (self.who.job_uid, self.who.attempt, self.term)

    def require(self, head: Head) -> None:
        """Raises Superseded, or ConfigurationError if deleted, unless `head` still belongs to this claim."""
        if not self.covers(head):
            raise Superseded(
                f"attempt {self.who.attempt} of {self.who.job} (term {self.term}) is superseded: attempt "
                f"{head.attempt} of {head.job} (term {head.term}) owns HEAD; this process stops here"
            )
        if head.state is HeadState.DELETED:
            raise deleted(head)


class Intent(Protocol):
    def decide(self, head: Head | None, nonce: str) -> Head | None:
        """Returns the HEAD that replaces `head`, or None to leave it unchanged. Raises RunError to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claiming:
    """Claims HEAD: increments the term and sets the state to active.

    A deleted HEAD is claimed by another job with `onExisting: Fresh` alone: no job starts over by mistake.
    With `onExisting: Fresh`, all entries of another job, its best too, stay in HEAD, marked `job:<uid>`.
    Outside HEAD they would be orphans of a lower term and be swept, but a fresh start must not delete another
    job's work. Such entries are never resumed from, counted or pruned; only a person deletes them.
    """

    who: Identity
    policy: ClaimPolicy = ClaimPolicy()
    remains: Collection[str] = ()
    """See `require_head_of`."""

    def decide(self, head: Head | None, nonce: str) -> Head | None:
        require_head_of(self.remains, head)
        if head is not None:
            self._refuse(head)
            if head.jobUID == self.who.job_uid and head.state is HeadState.DONE:
                return None
        claimed = Head(
            jobUID=self.who.job_uid,
            job=self.who.job,
            attempt=self.who.attempt,
            term=head.term + 1 if head else 1,
            nonce=nonce,
            state=HeadState.ACTIVE,
            checkpoints=self._inherit(head) if head else (),
        )
        self._refuse_fresh_start(claimed)
        return claimed

    def _refuse(self, head: Head) -> None:
        if head.state is HeadState.DELETED:
            if head.jobUID == self.who.job_uid or self.policy.on_existing is not OnExisting.FRESH:
                raise deleted(head)
        elif head.jobUID != self.who.job_uid:
            self._refuse_foreign(head)
        elif head.attempt > self.who.attempt and head.state is not HeadState.DONE:
            raise Superseded(
                f"attempt {self.who.attempt} of {self.who.job} started too late: attempt "
                f"{head.attempt} has already claimed HEAD"
            )

    def _refuse_foreign(self, head: Head) -> None:
        owner = f"job {head.job} (UID {head.jobUID}, attempt {head.attempt})"
        if head.state is HeadState.ACTIVE:
            raise ConfigurationError(
                f"the checkpoint URI is in use by {owner}; use another URI for this job, or end that "
                "one. If its owner was killed (out of memory, node lost) and none of its pods is "
                f"left (kubectl get pods -A -l spottrain.io/job-uid={head.jobUID}), spottrain "
                "checkpoints release URI frees it",
                reason=Reason.URI_IN_USE,
            )
        if self.policy.on_existing is OnExisting.FAIL:
            raise ConfigurationError(
                f"the checkpoint URI has {counted(len(head.checkpoints), 'checkpoint')} of {owner}, now "
                f"{head.state}: should this job resume from there, or start fresh? Set checkpoint.onExisting "
                "(spottrain run --on-existing) to Resume or to Fresh, or use another URI; a job that is "
                "applied again under the same name is another job",
                reason=Reason.URI_IN_USE,
            )

    def _inherit(self, head: Head) -> tuple[Entry, ...]:
        if head.jobUID == self.who.job_uid or self.policy.on_existing is OnExisting.RESUME:
            return head.checkpoints
        mark = KEPT_FOR_JOB + head.jobUID
        return tuple(e if e.foreign else replace(e, keptAs=mark) for e in head.checkpoints)

    def _refuse_fresh_start(self, claimed: Head) -> None:
        known = self.policy.known_durable_step
        if known is not None and not claimed.resumable:
            raise ConfigurationError(
                f"step {known} of {self.who.job} is known to be durable, but HEAD is absent or lists "
                "no checkpoint of it; refusing to start from the beginning. Check the URI, or "
                "restore the objects from older versions",
                reason=Reason.CHECKPOINT_MISSING,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Committing:
    """Puts a finished upload at the front of HEAD and drops the oldest entries beyond `keep`.

    An entry committed as BEST takes that mark from the previous best. The previous best then counts by age
    like any other, so this commit may drop it. A damaged best loses its mark too, because it cannot be read;
    the job has no best until a new one is committed.
    """

    lease: Lease
    entry: Entry
    keep: int
    damaged: frozenset[str] = frozenset()
    """Keys of unreadable checkpoints, which do not count towards `keep`."""

    def __post_init__(self) -> None:
        if self.keep < MIN_KEEP:
            raise ValueError(f"keep is {self.keep}: it must be at least {MIN_KEEP}")
        if self.entry.keptAs not in ("", BEST):
            raise ValueError(f"a commit cannot be kept as {self.entry.keptAs!r}")
        if term_of_key(self.entry.key) != self.lease.term:
            # Sweeping orphans is safe only because a claim never adds a key of another term.
            raise ValueError(f"{self.entry.key} is not a key of term {self.lease.term}")

    def decide(self, head: Head | None, nonce: str) -> Head | None:
        head = present(head)
        self.lease.require(head)
        if self.entry.key in head.keys:
            return None  # an earlier attempt that got no response took effect after all
        if head.state is not HeadState.ACTIVE:
            raise ValueError("commit after release")
        entries = (self.entry, *(self._without_lost_mark(entry) for entry in head.checkpoints))
        return replace(head, nonce=nonce, checkpoints=tuple(survivors(entries, self.keep, self.damaged)))

    def _without_lost_mark(self, old: Entry) -> Entry:
        lost = self.entry.keptAs == BEST or old.key in self.damaged
        return replace(old, keptAs="") if old.keptAs == BEST and lost else old


@dataclass(frozen=True, kw_only=True, slots=True)
class Releasing:
    """Releases HEAD, as the last change, so that the successor need not wait."""

    lease: Lease
    done: bool = False

    def decide(self, head: Head | None, nonce: str) -> Head | None:
        head = present(head)
        self.lease.require(head)
        if head.state is not HeadState.ACTIVE:
            return None
        return replace(head, nonce=nonce, state=HeadState.DONE if self.done else HeadState.RELEASED)


def survivors(entries: Iterable[Entry], keep: int, damaged: Collection[str]) -> Iterable[Entry]:
    """Yields, in HEAD's order, all entries up to the `keep`-th intact one, and all with `keptAs`."""
    sound = 0
    for entry in entries:
        if entry.keptAs or sound < keep:
            yield entry
        sound += not entry.keptAs and entry.key not in damaged


def present(head: Head | None) -> Head:
    if head is None:
        raise CheckpointError(
            "HEAD was deleted while this process was using it; it is not written again, because "
            f"whoever deleted it may have started another run. {MAKE_AGAIN}",
            reason=Reason.CHECKPOINT_MISSING,
        )
    return head


def beyond(remains: Collection[str], head: Head | None) -> list[str]:
    """Returns those of these keys that cannot be of this HEAD's own past (see `require_head_of`)."""
    return [key for key in remains if head is None or (term_of_key(key) or 0) > head.term]


def require_head_of(remains: Collection[str], head: Head | None) -> None:
    """Raises CheckpointError if HEAD was removed, or replaced by an older version.

    A run writes HEAD before anything else, and HEAD's term is at least that of each checkpoint. A claim that
    started over would sweep these checkpoints, and its end would replace these final weights.

    Args:
        remains: Keys of the checkpoints that have a manifest, and of all objects of final weights. They must
            be listed before HEAD is read.
    """
    if not (lost := beyond(remains, head)):
        return
    steps = sorted((step for key in lost if (step := step_of_key(key)) is not None), reverse=True)
    if not steps:
        raise CheckpointError(
            f"there is no HEAD object at the checkpoint URI, but {lost[0]} is: a run has ended there, or it "
            "is somebody else's. The end of a new run would replace it; move it away, or use another URI",
            reason=Reason.CHECKPOINT_MISSING,
        )
    found = f"{counted(len(steps), 'checkpoint')} (step {', '.join(map(str, steps))})"
    what = "that are newer than its HEAD" if head else "but no HEAD object"
    raise CheckpointError(
        f"the checkpoint URI has {found} {what}. Nothing was changed, because a run that starts without them "
        f"would delete them. {MAKE_AGAIN}",
        reason=Reason.CHECKPOINT_MISSING,
    )


def deleted(head: Head) -> ConfigurationError:
    return ConfigurationError(
        f"the checkpoints of job {head.job} (UID {head.jobUID}) at this URI were deleted, so there is "
        "nothing to resume; set checkpoint.onExisting (spottrain run --on-existing) of a new job to Fresh to "
        "start there at step 0, or use another URI",
        reason=Reason.CHECKPOINT_MISSING,
    )


# --- read-only rules --------------------------------------------------------------------------------
def gate_is_open(head: Head | None, who: Identity, *, now: float, until: float) -> bool:
    """Returns whether a pod that was created before its predecessor ended may claim.

    It waits only for an active lower attempt of its own job; the claim checks everything else. Opening early
    is harmless, because a claim fences out the predecessor.
    """
    if head is None or head.state is not HeadState.ACTIVE or now >= until:
        return True
    return head.jobUID != who.job_uid or head.attempt >= who.attempt


def orphans(keys: Iterable[str], head: Head, lease: Lease) -> list[str]:
    """Returns the unreachable object keys below `checkpoints/`. Raises Superseded if another claim owns HEAD.

    These keys have terms below the claim's own and are not in `head`, which must be read after `keys` were
    listed. A claim adds only keys of its own term, so no later HEAD can list them. The result stays true even
    if the sweeping process is superseded meanwhile. The order of reads also protects a run that began over at
    term 1 after HEAD was removed by hand: HEAD was still this claim's when the keys were listed.
    """
    lease.require(head)
    return unnamed(keys, head, below=lease.term)


def unnamed(keys: Iterable[str], head: Head, *, below: int) -> list[str]:
    """Returns the keys of terms under `below` that HEAD does not list; keys of another form are ignored."""
    named = head.keys
    return [
        key
        for key in keys
        if (term := term_of_key(key)) is not None and term < below and folder_of(key) not in named
    ]


def folder_of(key: str) -> str:
    """Returns the checkpoint's key that an object's key begins with."""
    return CHECKPOINTS_PREFIX + key.removeprefix(CHECKPOINTS_PREFIX).split("/", 1)[0] + "/"
