"""The current owner of HEAD: applies the rules of `state.py` to a store.

One HeadOwner per gang, in rank 0's process. The order of calls:

    wait_at_gate -> claim -> [ commit after each upload ] -> release

`sweep_orphans` and `check` may run in another thread at any time after the claim. A lock serializes changes;
`check` only reads and takes no lock.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spottrain.checkpoint.head.admin import leftovers
from spottrain.checkpoint.head.compare_and_swap import (
    Absent,
    Finished,
    Found,
    Get,
    Missing,
    NoAnswer,
    Put,
    Reading,
    Refused,
    Reply,
    Request,
    Step,
    StoredHead,
    Writing,
    begin,
)
from spottrain.checkpoint.head.state import (
    Claiming,
    ClaimPolicy,
    Committing,
    Entry,
    Head,
    HeadState,
    Identity,
    Intent,
    Lease,
    Releasing,
    folder_of,
    gate_is_open,
    orphans,
    present,
    require_head_of,
)
from spottrain.contract import (
    CHECKPOINTS_PREFIX,
    FINAL_PREFIX,
    HEAD_KEY,
    MANIFEST_NAME,
    Reason,
    checkpoint_key,
    step_of_key,
    term_of_key,
)
from spottrain.errors import CheckpointError, ConfigurationError, StoreUnavailable
from spottrain.storage.base import AlreadyExists, KeyMissing, PreconditionFailed, Store, never

__all__ = ["Claim", "ClaimPolicy", "Entry", "HeadOwner", "Identity"]

GATE_POLL: Final = 0.75
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 2.0


def fresh_nonce() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The result of a claim."""

    term: int
    resume: tuple[Entry, ...] = ()
    """Checkpoints to resume from, newest first; empty for a fresh start."""
    done: bool = False
    """The job has already finished, so nothing was claimed."""

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Claim:
        """Returns what another rank sent as `asdict(claim)`."""
        return cls(
            term=facts["term"], resume=tuple(Entry(**each) for each in facts["resume"]), done=facts["done"]
        )


def whole_checkpoints(store: Store) -> list[str]:
    """Returns the keys of the checkpoints that have a manifest, which is written last. Raises StoreError."""
    return whole_of(store.list(CHECKPOINTS_PREFIX))


def whole_of(keys: Iterable[str]) -> list[str]:
    """Returns the checkpoints of which the manifest is among these objects' keys."""
    return [
        folder
        for key in keys
        if step_of_key(folder := folder_of(key)) is not None and key == folder + MANIFEST_NAME
    ]


def remains(store: Store) -> list[str]:
    """Returns the keys that HEAD must account for (see `require_head_of`). Raises StoreError."""
    return whole_checkpoints(store) + store.list(FINAL_PREFIX)


def without_head(store: Store) -> CheckpointError | ConfigurationError:
    """Returns the error for a URI at which there is no HEAD object."""
    try:
        require_head_of(whole_checkpoints(store), None)
    except CheckpointError as error:
        return error
    return ConfigurationError(
        f"there is no HEAD object at {store.uri}, so no job has saved checkpoints there; check the URI",
        reason=Reason.CHECKPOINT_MISSING,
    )


class HeadClient:
    """Reads HEAD, and changes it by compare-and-swap, with retries until the outcome is known."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        nonce: Callable[[], str] = fresh_nonce,
        patience: float = 30.0,
    ) -> None:
        """`patience`: seconds to retry, per call, if the store does not respond."""
        self.clock, self.sleep, self.nonce = clock, sleep, nonce
        self._store = store
        self._patience = patience
        self.open: Step | None = None
        """Last state of the current or abandoned change."""
        self._known: Found | None = None
        """HEAD as the last change left it; None while the outcome of a write is unknown."""

    def change(
        self,
        intent: Intent,
        *,
        patience: float | None = None,
        stopping: Callable[[], bool] = never,
    ) -> Finished | None:
        """Carries out one change of HEAD; returns None if `stopping` returns True first.

        Raises StoreUnavailable after `patience` seconds; then a write may or may not take effect.
        """
        patience = self._patience if patience is None else patience
        give_up = self.clock() + patience
        pause = FIRST_PAUSE
        step, self._known = begin(intent, self.nonce(), self._known), None
        while not isinstance(step, Finished):
            if stopping():
                return None
            reply = self.ask(step.request)
            self.open = step = step.on(reply, self.nonce())
            if isinstance(reply, NoAnswer | Refused) and self.clock() >= give_up:
                raise StoreUnavailable(f"HEAD could not be written or read within {patience:g} s: {reply}")
            if isinstance(reply, NoAnswer):
                self.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        self._known = Found(head=step.head, etag=step.etag)
        return step

    def ask(self, request: Request) -> Reply:
        """Sends one request. Returns what became of it."""
        try:
            if not isinstance(request, Put):
                return self._found() or Absent()
            body = request.head.to_json()
            if request.if_match is None:
                return StoredHead(etag=self._store.put_if_absent(HEAD_KEY, body))
            return StoredHead(etag=self._store.put_if_match(HEAD_KEY, body, request.if_match))
        except StoreUnavailable as error:
            return NoAnswer(why=str(error))
        except (AlreadyExists, PreconditionFailed) as error:
            return Refused(why=str(error))
        except KeyMissing:
            return Missing()

    def read(self) -> Head | None:
        """Returns the current HEAD, with a single request. Raises StoreError."""
        found = self._found()
        return found.head if found else None

    def _found(self) -> Found | None:
        found = self._store.get(HEAD_KEY)
        return Found(head=Head.from_json(found.body), etag=found.etag) if found else None


class HeadOwner:
    """HEAD of one checkpoint URI, on behalf of one attempt: claims, changes and releases it."""

    def __init__(
        self,
        store: Store,
        who: Identity,
        policy: ClaimPolicy | None = None,
        client: HeadClient | None = None,
    ) -> None:
        self._store = store
        self._who = who
        self._policy = policy or ClaimPolicy()
        self._client = client or HeadClient(store)
        self._lock = threading.Lock()
        self._remains: list[str] | None = None
        self._lease: Lease | None = None

    # --- start ------------------------------------------------------------------------------------
    def wait_at_gate(self, until: float, stopping: Callable[[], bool] = never) -> bool:
        """Waits until the predecessor has released HEAD, or `until` (Unix seconds; 0: does not wait).

        Returns False if stopped meanwhile: then nothing may be claimed. Also lists what HEAD must account
        for: here a signal may end the process while the store does not respond.
        """
        while not stopping():
            if self._client.clock() >= until or self._gate_is_open(until):
                self._remains = remains(self._store)
                return True
            self._client.sleep(GATE_POLL)
        return False

    def claim(self, stopping: Callable[[], bool] = never, *, patience: float | None = None) -> Claim | None:
        """Claims HEAD. Returns None if stopped first.

        Raises Superseded, ConfigurationError (another job's HEAD, lost checkpoints), CheckpointError (HEAD
        was removed, or cannot be read), StoreError.
        """
        with self._lock:
            there = remains(self._store) if self._remains is None else self._remains
            intent = Claiming(who=self._who, policy=self._policy, remains=there)
            finished = self._client.change(intent, stopping=stopping, patience=patience)
            if finished is None:
                return None
            head = finished.head
            if head.state is HeadState.DONE:
                return Claim(term=head.term, done=True)
            self._lease = Lease(who=self._who, term=head.term)
            return Claim(term=head.term, resume=head.resumable)

    def sweep_orphans(self) -> list[str]:
        """Deletes objects of earlier terms that HEAD does not list. Returns their keys."""
        return self._sweep(lambda keys, head: orphans(keys, head, self._owned()))

    def sweep_leftovers(self) -> list[str]:
        """After `release`: deletes orphans, those of this term's failed saves too. Returns their keys."""
        return self._sweep(leftovers)

    def _sweep(self, unreachable: Callable[[list[str], Head], list[str]]) -> list[str]:
        keys = self._store.list(CHECKPOINTS_PREFIX)  # before HEAD is read (see `orphans`)
        doomed = unreachable(keys, present(self._client.read()))
        self._store.delete(doomed)
        return doomed

    def outlived(self, key: str) -> bool:
        """Returns whether `key` is of an earlier term, so that an upload to it is useless."""
        term = term_of_key(key)
        return term is not None and term < self._owned().term

    # --- while training ---------------------------------------------------------------------------
    def new_key(self, step: int) -> str:
        """Returns a key (folder) for the next checkpoint, unique across processes and saves."""
        return checkpoint_key(self._owned().term, step, self._client.nonce())

    def commit(
        self,
        entry: Entry,
        keep: int,
        *,
        damaged: frozenset[str] = frozenset(),
        patience: float | None = None,
    ) -> tuple[str, ...]:
        """Makes `entry`, whose objects are all uploaded, the latest. Returns the keys dropped from HEAD.

        After StoreUnavailable the commit may or may not take effect. The objects must stay, and the next
        commit or release determines the outcome.

        An `entry` with keptAs=BEST takes that mark from the previous best (see `Committing`).
        """
        with self._lock:
            intent = Committing(lease=self._owned(), entry=entry, keep=keep, damaged=damaged)
            finished = self._client.change(intent, patience=patience)
            assert finished is not None, "a change without `stopping` runs to its end"
            return finished.dropped

    def prune(self, dropped: Sequence[str]) -> None:
        """Deletes the objects of keys that a commit of this process dropped from HEAD."""
        for key in dropped:
            self._store.delete(self._store.list(key))

    def check(self) -> None:
        """Re-reads HEAD once. Raises Superseded if another process owns it.

        StoreUnavailable says nothing about the owner.
        """
        self._owned().require(present(self._client.read()))

    # --- end --------------------------------------------------------------------------------------
    def release(self, done: bool = False, *, patience: float | None = None) -> None:
        """Releases HEAD, if a claim succeeded. If superseded, raises Superseded and changes nothing."""
        with self._lock:
            self._settle_claim()
            if self._lease is not None:
                self._client.change(Releasing(lease=self._lease, done=done), patience=patience)

    # --- internal ---------------------------------------------------------------------------------
    def _gate_is_open(self, until: float) -> bool:
        match self._client.ask(Get()):
            case Found(head=head):
                return gate_is_open(head, self._who, now=self._client.clock(), until=until)
            case Absent():
                return True
        return False  # no response: retry; the deadline opens the gate in the end

    def _owned(self) -> Lease:
        if self._lease is None:
            raise RuntimeError("HEAD is not claimed")
        return self._lease

    def _settle_claim(self) -> None:
        """Checks once whether an abandoned claim took effect after all, so that HEAD must be released."""
        match self._client.open:
            case Reading(intent=Claiming(), sent=Writing(body=body)):
                head = self._client.read()
                if head is not None and head.nonce == body.nonce:
                    self._lease = Lease(who=self._who, term=head.term)
