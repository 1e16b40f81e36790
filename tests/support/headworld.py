"""Every reachable state of a small world in which several attempts share one HEAD.

The processes run the very code of
`spottrain.checkpoint.head`; only the store, the network and time are modelled:

* the store is strongly consistent, its ETag is a function of the content (the worst case: equal content,
  equal ETag), and what is modelled of a checkpoint is its shard and its manifest;
* any process may pause for any time at any point, so a gate that opens early, a ghost and a slow network are
  all just orders in which the moves of the processes interleave;
* a PUT of HEAD may go unanswered and land later or never, be answered and land a second time later, or be
  turned away with 409 although nothing changed; each of these costs one of the scenario's `faults`;
* a process may crash at any point, its request in the air or not; each costs one of `crashes`.

States are tuples of small integers (every part is interned), so that a million of them fit and hash fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from spottrain.checkpoint.head.admin import (
    Adopting,
    Pruning,
    leftovers,
    prunable,
    repaired,
    require_idle,
    term_for_copy,
)
from spottrain.checkpoint.head.compare_and_swap import (
    Absent,
    Finished,
    Found,
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
    BEST,
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
    beyond,
    orphans,
    present,
)
from spottrain.contract import checkpoint_key, step_of_key
from spottrain.errors import RunError, Superseded

from tests.support.headrules import (
    Violation,
    check_change,
    check_copied,
    check_end,
    check_finished,
    check_start,
)

UNCONDITIONAL: Final = "any ETag"
"""`if_match` of a PUT without a condition; only a broken protocol sends it."""
NAMES: Final = "abcd"
TOOLS: Final = ("pruning", "copying")
"""Phases in which a person's command changes HEAD."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The protocol under test; a mutant replaces one part."""

    claiming: Callable[[Identity, ClaimPolicy, Collection[str]], Intent] = lambda who, policy, remains: (
        Claiming(who=who, policy=policy, remains=remains)
    )
    committing: Callable[[Lease, Entry, int], Intent] = lambda lease, entry, keep: Committing(
        lease=lease, entry=entry, keep=keep
    )
    releasing: Callable[[Lease, bool], Intent] = lambda lease, done: Releasing(lease=lease, done=done)
    request: Callable[[Any], Request] = lambda step: step.request
    on: Callable[[Any, Reply, str], Step] = lambda step, reply, nonce: step.on(reply, nonce)
    pruning: Callable[[Head, frozenset[str]], Intent] = lambda seen, doomed: Pruning(seen=seen, doomed=doomed)
    adopting: Callable[[Entry], Intent] = lambda entry: Adopting(entry=entry, job="elsewhere")
    repaired: Callable[[Iterable[Entry], Iterable[str], str], Head] = lambda entries, keys, nonce: repaired(
        entries, keys, None, nonce=nonce
    )
    orphans: Callable[[Iterable[str], Head, Lease], list[str]] = orphans
    leftovers: Callable[[Iterable[str], Head], list[str]] = leftovers
    nonce: Callable[[str, int], str] = lambda name, number: f"{name}{number}"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    name: str
    people: tuple[Identity, ...]
    tools: tuple[str, ...] = ()
    """A person's commands: `prune` (to one, then the orphans), `copy` (to this URI), `repair`."""
    policies: tuple[ClaimPolicy, ...] = ()
    commits: int = 1
    keep: int = 2
    best: bool = False
    """A commit may be the best so far."""
    faults: int = 1
    crashes: int = 1
    sweep: bool = False
    fall_back: bool = False
    """A restore may find its newest checkpoint damaged."""
    vanish: bool = False
    """Somebody may delete HEAD by hand, once."""
    head: Head | None = None

    def policy(self, index: int) -> ClaimPolicy:
        return self.policies[index] if self.policies else ClaimPolicy()


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    index: int
    phase: str = "look"
    """look, claim, restore, sweep, read, delete, idle, shard, manifest, commit, prune, release, ended; of a
    tool: look_to_prune, pruning, drop, tidy, tidy_read, tidy_delete, look_to_copy, shard, manifest, copying,
    look_to_repair, repairing."""
    step: Step | None = None
    lease: Lease | None = None
    known: Found | None = None
    entry: Entry | None = None
    at_step: int = 0
    saves: int = 0
    bodies: int = 0
    keys: tuple[str, ...] = ()
    """Keys that this process is about to delete, or of a sweep has listed."""
    ended: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    head: Head | None
    parts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Move:
    label: str
    process: Process
    store: Store
    flies: Put | None = None
    faults: int = 0
    crashes: int = 0


class Ids:
    """Things to small integers and back."""

    def __init__(self) -> None:
        self.of: dict[Hashable, int] = {}
        self.things: list[Any] = []

    def __call__(self, thing: Hashable) -> int:
        number = self.of.get(thing)
        if number is None:
            number = self.of[thing] = len(self.things)
            self.things.append(thing)
        return number


def parts_of(key: str) -> tuple[str, str]:
    return f"{key}shard", f"{key}manifest"


@dataclass
class World:
    """The moves of one scenario under one set of rules."""

    scenario: Scenario
    rules: Rules = field(default_factory=Rules)
    etags: Ids = field(default_factory=Ids)

    def first(self) -> tuple[Store, tuple[Process, ...]]:
        head = self.scenario.head
        parts = frozenset(part for key in (head.keys if head else ()) for part in parts_of(key))
        return Store(head=head, parts=parts), tuple(
            Process(index=i) for i in range(len(self.scenario.people))
        ) + tuple(
            Process(index=i, phase=f"look_to_{tool}")
            for i, tool in enumerate(self.scenario.tools, len(self.scenario.people))
        )

    def read(self, store: Store) -> Found | Absent:
        return Found(head=store.head, etag=str(self._etag(store.head))) if store.head else Absent()

    def apply(self, put: Put, store: Store) -> tuple[Store, Reply]:
        """What the store makes of a PUT of HEAD; checks that the change is a lawful one."""
        etag = self._etag(store.head)
        if put.if_match != UNCONDITIONAL:
            if put.if_match is not None and store.head is None:
                return store, Missing()
            if put.if_match != etag:
                return store, Refused()
        check_change(store.head, put.head)
        after = replace(store, head=put.head)
        check_complete(after)
        return after, StoredHead(etag=str(self._etag(put.head)))

    def _etag(self, head: Head | None) -> str | None:
        return None if head is None else f"e{self.etags(head)}"

    # --- the moves of one process -----------------------------------------------------------------
    def moves(self, process: Process, store: Store) -> Iterator[Move]:
        if process.phase == "ended":
            return
        yield Move("crash", ended(process, "crashed"), store, crashes=1)
        if process.step is not None:
            yield from self._talk(process, store)
        else:
            yield from getattr(self, f"_{process.phase}")(process, store)

    def _talk(self, process: Process, store: Store) -> Iterator[Move]:
        request = self.rules.request(process.step)
        if not isinstance(request, Put):
            yield Move("get", self._hear(process, self.read(store), store), store)
            if process.phase == "commit" and isinstance(process.step, Reading) and process.step.sent:
                yield Move("give up", replace(process, phase="idle", step=None, known=None), store)
            if process.phase in TOOLS and isinstance(process.step, Reading) and process.step.sent:
                yield Move("give up", ended(process, "gave up"), store)
            return
        after, reply = self.apply(request, store)
        heard = self._hear(process, reply, after)
        yield Move("put", heard, after)
        yield Move("put, to land twice", heard, after, flies=request, faults=1)
        yield Move("put, unanswered", self._hear(process, NoAnswer(), store), store, flies=request, faults=1)
        yield Move("put, 409", self._hear(process, Refused(), store), store, faults=1)
        yield Move("crash, put in the air", ended(process, "crashed"), store, flies=request, crashes=1)

    def _hear(self, process: Process, reply: Reply, store: Store) -> Process:
        nonce = self.rules.nonce(NAMES[process.index], process.bodies)
        try:
            step = self.rules.on(process.step, reply, nonce)
        except RunError as error:
            check_end(process.phase, process.lease, error, store.head)
            return ended(process, type(error).__name__)
        if isinstance(step, Finished):
            return self._finish(process, step, store)
        new = isinstance(step, Writing) and not isinstance(process.step, Writing) and step.body.nonce == nonce
        return replace(process, step=step, bodies=process.bodies + new)

    def _finish(self, process: Process, done: Finished, store: Store) -> Process:
        lease = process.lease
        if process.phase in TOOLS:
            return self._finish_tool(process, done, store)
        if process.phase == "claim":
            if done.head.state is HeadState.DONE:
                return ended(process, "was done")
            lease = Lease(who=self.scenario.people[process.index], term=done.head.term)
        assert lease is not None
        check_finished(process.phase, lease, process.entry, store.head)
        known = Found(head=done.head, etag=done.etag)
        process = replace(process, step=None, known=known, lease=lease, keys=done.dropped)
        if process.phase == "release":
            return ended(process, "released")
        return replace(process, phase="restore" if process.phase == "claim" else "prune", entry=None)

    def _look(self, process: Process, store: Store) -> Iterator[Move]:
        remains = whole(store)
        if not self.scenario.vanish:  # those of HEAD's past change no decision: fewer states
            remains = tuple(beyond(remains, store.head))
        who, policy = self.scenario.people[process.index], self.scenario.policy(process.index)
        yield Move("look", self._walk(process, "claim", self.rules.claiming(who, policy, remains)), store)

    def _walk(self, process: Process, phase: str, intent: Intent) -> Process:
        nonce = self.rules.nonce(NAMES[process.index], process.bodies)
        step = begin(intent, nonce, process.known)
        return replace(
            process, phase=phase, step=step, known=None, bodies=process.bodies + isinstance(step, Writing)
        )

    def _restore(self, process: Process, store: Store) -> Iterator[Move]:
        assert process.known is not None
        entries = process.known.head.resumable
        after = replace(process, phase="sweep" if self.scenario.sweep else "idle")
        for entry in entries[: 2 if self.scenario.fall_back else 1]:
            yield Move(f"restore {entry.step}", replace(after, at_step=entry.step), store)
        if not entries:
            check_start(self.scenario.head, process.known.head, whole(store))
            yield Move("start afresh", after, store)

    def _sweep(self, process: Process, store: Store) -> Iterator[Move]:
        listed = tuple(sorted(store.parts))
        yield Move("sweep: list", replace(process, phase="read", keys=listed), store)

    def _read(self, process: Process, store: Store) -> Iterator[Move]:
        assert process.lease is not None
        try:
            head = present(store.head)
            doomed = tuple(sorted(self.rules.orphans(process.keys, head, process.lease)))
            after = replace(process, phase="delete", keys=doomed)
        except RunError as error:
            after = ended(process, type(error).__name__)
        yield Move("sweep: read HEAD", after, store)

    def _delete(self, process: Process, store: Store) -> Iterator[Move]:
        yield self._deleted("sweep: delete", process, store, process.keys)

    def _prune(self, process: Process, store: Store) -> Iterator[Move]:
        yield self._deleted("prune", process, store, [part for key in process.keys for part in parts_of(key)])

    def _deleted(
        self, label: str, process: Process, store: Store, parts: Iterable[str], then: str = "idle"
    ) -> Move:
        after = replace(store, parts=store.parts.difference(parts))
        check_complete(after)
        return Move(label, replace(process, phase=then, keys=()), after)

    def _idle(self, process: Process, store: Store) -> Iterator[Move]:
        assert process.lease is not None
        if process.saves < self.scenario.commits:
            yield Move("train", self._trained(process, process.lease), store)
            if self.scenario.best:
                yield Move("train, best", self._trained(process, process.lease, BEST), store)
        done = process.saves == self.scenario.commits
        yield Move("stop", self._begin_release(process, False), store)
        if done:
            yield Move("done", self._begin_release(process, True), store)

    def _begin_release(self, process: Process, done: bool) -> Process:
        assert process.lease is not None
        try:
            return self._walk(process, "release", self.rules.releasing(process.lease, done))
        except Superseded:
            return ended(process, "Superseded")

    def _trained(self, process: Process, lease: Lease, kept_as: str = "") -> Process:
        step = process.at_step + 1
        key = checkpoint_key(lease.term, step, f"{NAMES[process.index]}k{process.saves}")
        entry = Entry(key=key, step=step, time=0.0, bytes=1, keptAs=kept_as)
        return replace(process, phase="shard", entry=entry, at_step=step, saves=process.saves + 1)

    def _shard(self, process: Process, store: Store) -> Iterator[Move]:
        yield self._uploaded(process, store, 0, replace(process, phase="manifest"))

    def _manifest(self, process: Process, store: Store) -> Iterator[Move]:
        assert process.entry is not None
        if process.lease is None:
            after = self._walk(process, "copying", self.rules.adopting(process.entry))
        else:
            intent = self.rules.committing(process.lease, process.entry, self.scenario.keep)
            after = self._walk(process, "commit", intent)
        yield self._uploaded(process, store, 1, after)

    def _uploaded(self, process: Process, store: Store, part: int, after: Process) -> Move:
        assert process.entry is not None
        if store.head is not None and process.entry.key in store.head.keys:
            raise Violation(f"{process.entry.key} is written again while HEAD names it")
        parts = store.parts | {parts_of(process.entry.key)[part]}
        return Move(("upload shard", "upload manifest")[part], after, replace(store, parts=parts))

    # --- the moves of a person's commands -----------------------------------------------------------
    def _look_to_prune(self, process: Process, store: Store) -> Iterator[Move]:
        after = ended(process, "nothing to do")
        if store.head is not None and (doomed := prunable(store.head, 1)):
            try:
                require_idle(store.head)
                known = Found(head=store.head, etag=str(self._etag(store.head)))
                intent = self.rules.pruning(store.head, frozenset(entry.key for entry in doomed))
                after = self._walk(replace(process, known=known), "pruning", intent)
            except RunError as error:
                after = ended(process, type(error).__name__)
        yield Move("look at HEAD", after, store)

    def _drop(self, process: Process, store: Store) -> Iterator[Move]:
        parts = [part for key in process.keys for part in parts_of(key)]
        yield self._deleted("drop", process, store, parts, then="tidy")

    def _tidy(self, process: Process, store: Store) -> Iterator[Move]:
        listed = tuple(sorted(store.parts))
        yield Move("tidy: list", replace(process, phase="tidy_read", keys=listed), store)

    def _tidy_read(self, process: Process, store: Store) -> Iterator[Move]:
        after = ended(process, "no HEAD")
        if store.head is not None:
            doomed = tuple(sorted(self.rules.leftovers(process.keys, store.head)))
            after = replace(process, phase="tidy_delete", keys=doomed)
        yield Move("tidy: read HEAD", after, store)

    def _tidy_delete(self, process: Process, store: Store) -> Iterator[Move]:
        yield self._deleted("tidy: delete", process, store, process.keys, then="ended")

    def _look_to_repair(self, process: Process, store: Store) -> Iterator[Move]:
        keys = whole(store)
        if store.head is not None or not keys:
            yield Move("nothing to repair", ended(process, "nothing to do"), store)
            return
        entries = [Entry(key=key, step=step_of_key(key) or 0, time=0.0, bytes=1) for key in keys]
        head = self.rules.repaired(entries, store.parts, NAMES[process.index])
        after = replace(process, phase="repairing", known=Found(head=head, etag=""))
        yield Move("look at what is there", after, store)

    def _repairing(self, process: Process, store: Store) -> Iterator[Move]:
        """One PUT, whose outcome nobody looks for: the command can be called again."""
        assert process.known is not None
        put = Put(head=process.known.head, if_match=None)
        after, _ = self.apply(put, store)
        yield Move("put", ended(process, "repaired"), after)
        yield Move("put, unanswered", ended(process, "gave up"), store, flies=put, faults=1)

    def _look_to_copy(self, process: Process, store: Store) -> Iterator[Move]:
        try:
            key = checkpoint_key(term_for_copy(store.head), 6, f"{NAMES[process.index]}k")
            after = replace(process, phase="shard", entry=Entry(key=key, step=6, time=0.0, bytes=1))
        except RunError as error:
            after = ended(process, type(error).__name__)
        yield Move("look at HEAD", after, store)

    def _finish_tool(self, process: Process, done: Finished, store: Store) -> Process:
        if process.phase == "pruning":
            return replace(process, step=None, phase="drop", keys=done.dropped)
        check_copied(process.entry, store.head)
        return ended(process, "copied")


def whole(store: Store) -> tuple[str, ...]:
    """Keys of the checkpoints that have a manifest, as `owner.whole_checkpoints` finds them."""
    return tuple(sorted(part.removesuffix("manifest") for part in store.parts if part.endswith("manifest")))


def ended(process: Process, how: str) -> Process:
    """Forgets the rest, so that histories that no longer matter are one state."""
    return Process(index=process.index, phase="ended", ended=how)


def check_complete(store: Store) -> None:
    for key in store.head.keys if store.head else ():
        if not store.parts.issuperset(parts_of(key)):
            raise Violation(f"HEAD names {key}, but its objects are not all there")
