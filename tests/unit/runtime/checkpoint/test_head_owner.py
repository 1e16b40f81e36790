"""HeadOwner over a store whose every answer is scripted, with a clock that only sleeping moves."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from spottrain.checkpoint.head.owner import ClaimPolicy, Entry, HeadClient, HeadOwner, Identity
from spottrain.checkpoint.head.state import Head, HeadState
from spottrain.contract import HEAD_KEY, checkpoint_key
from spottrain.errors import StoreDenied, StoreUnavailable, Superseded
from spottrain.storage.base import Body, Object, PreconditionFailed
from spottrain.storage.local import FolderStore

from tests.support.sentences import Told


@dataclass
class Clock:
    now: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Lost(Exception):
    """In a script: the write is applied, the reply lost."""


class ScriptedStore(FolderStore):
    """A FolderStore that meets each request of HEAD with what its script has next (None: as usual)."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.script: deque[Exception | Callable[[], object] | None] = deque()
        self.asked: list[str] = []

    def follow(self, *script: Exception | Callable[[], object] | None) -> None:
        self.script.extend(script)
        self.asked.clear()

    def get(self, key: str) -> Object | None:
        return super().get(key) if self._next(key, "get") is None else None

    def put_if_absent(self, key: str, body: Body) -> str:
        lost = self._next(key, "create")
        etag = super().put_if_absent(key, body)
        return self._reply(etag, lost)

    def put_if_match(self, key: str, body: Body, etag: str) -> str:
        lost = self._next(key, "replace")
        etag = super().put_if_match(key, body, etag)
        return self._reply(etag, lost)

    def _next(self, key: str, name: str) -> Lost | None:
        if key != HEAD_KEY:
            return None
        self.asked.append(name)
        what = self.script.popleft() if self.script else None
        if isinstance(what, Lost) or what is None:
            return what
        if isinstance(what, Exception):
            raise what
        what()
        return None

    def _reply(self, etag: str, lost: Lost | None) -> str:
        if lost is not None:
            raise StoreUnavailable("reply lost")
        return etag


SILENT = StoreUnavailable("no answer")


@pytest.fixture
def store(tmp_path: Path) -> ScriptedStore:
    return ScriptedStore(tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


Make = Callable[..., HeadOwner]


@pytest.fixture
def owner(store: ScriptedStore, clock: Clock) -> Make:
    def make(attempt: int = 1, uid: str = "A", policy: ClaimPolicy | None = None) -> HeadOwner:
        who = Identity(job_uid=uid, job="digits", attempt=attempt)
        client = HeadClient(store, clock=clock.time, sleep=clock.sleep, patience=5.0)
        return HeadOwner(store, who, policy, client)

    return make


def claimed(it: HeadOwner) -> HeadOwner:
    it.claim()
    return it


def save(store: ScriptedStore, it: HeadOwner, step: int, keep: int = 2) -> Sequence[str]:
    key = it.new_key(step)
    store.put_if_absent(f"{key}manifest.json", b"{}")
    return it.commit(Entry(key=key, step=step, time=0.0, bytes=2), keep)


def in_store(store: ScriptedStore) -> Head:
    found = FolderStore.get(store, HEAD_KEY)
    assert found is not None
    return Head.from_json(found.body)


def steps(entries: Iterable[Entry]) -> list[int]:
    return [entry.step for entry in entries]


# --- gate -------------------------------------------------------------------------------------------
def test_the_gate_without_a_time_opens_without_a_look(store: ScriptedStore, owner: Make) -> None:
    assert owner(2).wait_at_gate(0)
    assert store.asked == []


def test_the_gate_opens_when_the_predecessor_releases_or_its_time_has_come(
    store: ScriptedStore, owner: Make, clock: Clock
) -> None:
    first = claimed(owner(1))
    until = clock.now + 3
    assert owner(2).wait_at_gate(until) and clock.now >= until
    clock.slept.clear()
    store.follow(None, SILENT, lambda: first.release())
    assert owner(2).wait_at_gate(clock.now + 100)
    assert len(clock.slept) == 2


def test_a_gated_pod_that_is_told_to_stop_claims_nothing(store: ScriptedStore, owner: Make) -> None:
    claimed(owner(1))
    answers = iter([False, False, True])
    assert not owner(2).wait_at_gate(1e12, lambda: next(answers))
    assert owner(2).claim(stopping=lambda: True) is None
    assert in_store(store).attempt == 1


# --- claim ------------------------------------------------------------------------------------------
def test_a_claim_tells_what_to_resume_newest_first(store: ScriptedStore, owner: Make) -> None:
    first = claimed(owner(1))
    for step in (1, 2, 3):
        save(store, first, step, keep=3)
    claim = owner(2).claim()
    assert claim is not None
    assert (claim.term, claim.done, steps(claim.resume)) == (2, False, [3, 2, 1])


def test_a_job_that_is_done_is_told_so_and_not_claimed(store: ScriptedStore, owner: Make) -> None:
    claimed(owner(1)).release(done=True)
    second = owner(2)
    claim = second.claim()
    assert claim is not None and claim.done
    second.release()
    assert (in_store(store).attempt, in_store(store).state) == (1, HeadState.DONE)


@pytest.mark.parametrize(
    ("trouble", "asked"), [(Lost(), ["get", "create", "get"]), (SILENT, ["get", "create", "get", "create"])]
)
def test_a_claim_whose_reply_was_lost_is_found_by_its_nonce_and_one_that_did_not_arrive_is_sent_again(
    store: ScriptedStore, owner: Make, trouble: Exception, asked: list[str]
) -> None:
    store.follow(None, trouble)
    claim = owner(1).claim()
    assert claim is not None and claim.term == 1
    assert store.asked == asked


def test_a_claim_that_meets_a_late_commit_takes_it_over(store: ScriptedStore, owner: Make) -> None:
    first = claimed(owner(1))
    store.follow(None, lambda: save(store, first, 7))
    claim = owner(2).claim()
    assert claim is not None
    assert steps(claim.resume) == [7]


def test_patience_ends_with_a_sentence(store: ScriptedStore, owner: Make, clock: Clock, told: Told) -> None:
    store.follow(*[SILENT] * 100)
    told(lambda: owner(1).claim())
    assert 5 <= sum(clock.slept) <= 8


def test_a_claim_given_up_is_released_if_it_had_arrived(store: ScriptedStore, owner: Make) -> None:
    it = owner(1)
    store.follow(None, Lost(), *[SILENT] * 10)
    with pytest.raises(StoreUnavailable):
        it.claim()
    store.script.clear()
    it.release()
    assert in_store(store).state is HeadState.RELEASED


def test_a_denied_store_ends_the_claim_at_once(store: ScriptedStore, owner: Make, clock: Clock) -> None:
    store.follow(StoreDenied("403"))
    with pytest.raises(StoreDenied):
        owner(1).claim()
    assert clock.slept == []


def test_a_release_without_a_claim_does_nothing(store: ScriptedStore, owner: Make) -> None:
    owner(1).release()
    assert store.asked == []


# --- commit -----------------------------------------------------------------------------------------
def test_a_commit_is_one_request(store: ScriptedStore, owner: Make) -> None:
    it = claimed(owner(1))
    store.follow()
    save(store, it, 1)
    save(store, it, 2)
    assert store.asked == ["replace", "replace"]


def test_a_commit_answers_what_fell_out_and_prune_deletes_just_that(
    store: ScriptedStore, owner: Make
) -> None:
    it = claimed(owner(1))
    save(store, it, 1)
    save(store, it, 2)
    dropped = save(store, it, 3)
    it.prune(dropped)
    assert [key.split("-")[1] for key in dropped] == ["s000000001"]
    assert len(store.list("checkpoints/")) == 2


@pytest.mark.parametrize("trouble", [SILENT, Lost(), PreconditionFailed("409")])
def test_a_commit_with_an_unclear_answer_is_in_head_in_the_end(
    store: ScriptedStore, owner: Make, trouble: Exception
) -> None:
    it = claimed(owner(1))
    save(store, it, 1)
    save(store, it, 2)
    store.follow(trouble)
    dropped = save(store, it, 3)
    assert steps(in_store(store).checkpoints) == [3, 2]
    assert len(dropped) == 1


def test_a_commit_given_up_that_arrives_later_does_not_supersede_its_own_process(
    store: ScriptedStore, owner: Make
) -> None:
    it = claimed(owner(1))
    store.follow(Lost(), *[SILENT] * 20)
    with pytest.raises(StoreUnavailable):
        save(store, it, 1)
    store.script.clear()
    save(store, it, 2)
    assert steps(in_store(store).checkpoints) == [2, 1]


def test_the_commit_of_a_superseded_attempt_changes_nothing(store: ScriptedStore, owner: Make) -> None:
    first, second = claimed(owner(1)), claimed(owner(2))
    before = in_store(store)
    with pytest.raises(Superseded):
        save(store, first, 1)
    with pytest.raises(Superseded):
        first.release()
    assert in_store(store) == before
    second.check()


def test_a_head_that_vanished_is_not_created_again(store: ScriptedStore, owner: Make, told: Told) -> None:
    it = claimed(owner(1))
    store.delete([HEAD_KEY])
    told(lambda: save(store, it, 1))
    told(it.check)
    assert store.get(HEAD_KEY) is None


def test_commit_before_claim_is_a_programming_error(owner: Make, told: Told) -> None:
    told(lambda: owner(1).new_key(1))


# --- check, sweep, release --------------------------------------------------------------------------
def test_a_ghost_learns_of_its_successor(store: ScriptedStore, owner: Make, told: Told) -> None:
    first = claimed(owner(1))
    first.check()
    claimed(owner(2))
    told(first.check)


def test_commits_from_one_thread_go_with_checks_from_another(store: ScriptedStore, owner: Make) -> None:
    it = claimed(owner(1))
    failures: list[BaseException] = []
    over = threading.Event()

    def watch() -> None:
        try:
            while not over.is_set():
                it.check()
        except BaseException as error:
            failures.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for step in range(20):
        save(store, it, step)
    over.set()
    watcher.join(timeout=30)
    assert failures == []
    assert steps(in_store(store).checkpoints) == [19, 18]


def test_the_sweep_takes_what_earlier_terms_left_unfinished(store: ScriptedStore, owner: Make) -> None:
    first = claimed(owner(1))
    save(store, first, 1)
    abandoned = first.new_key(2)
    store.put(f"{abandoned}shard-0", b"half")
    second = claimed(owner(2))
    running = second.new_key(2)
    store.put(f"{running}shard-0", b"half")
    assert second.sweep_orphans() == [f"{abandoned}shard-0"]
    assert len(store.list("checkpoints/")) == 2


def test_at_the_end_of_a_job_its_own_failed_saves_are_swept_and_a_successors_are_not(
    store: ScriptedStore, owner: Make
) -> None:
    first = claimed(owner(1))
    save(store, first, 1)
    failed = first.new_key(2)
    store.put(f"{failed}shard-0", b"half")
    assert first.sweep_leftovers() == [], "while HEAD is ours a save may be under way"
    first.release(done=True)
    successors = f"{checkpoint_key(2, 1, 'nonce')}shard-0"
    store.put(successors, b"not yet named")
    assert first.sweep_leftovers() == [f"{failed}shard-0"]
    assert len(store.list("checkpoints/")) == 2 and successors in store.list("checkpoints/")


def test_an_owner_whose_head_was_removed_sweeps_nothing_of_the_run_that_began_over(
    store: ScriptedStore, owner: Make
) -> None:
    claimed(owner(1))
    second = claimed(owner(2))
    store.delete([HEAD_KEY])
    again = claimed(owner(3))
    store.put(f"{again.new_key(1)}shard-0", b"half")  # of term 1, as old as can be
    with pytest.raises(Superseded):
        second.sweep_orphans()
    assert len(store.list("checkpoints/")) == 1


def test_a_new_best_takes_the_place_of_the_old_one(store: ScriptedStore, owner: Make) -> None:
    it = claimed(owner(1))

    def commit(step: int, kept_as: str = "") -> Sequence[str]:
        return it.commit(Entry(key=it.new_key(step), step=step, time=0.0, bytes=1, keptAs=kept_as), 2)

    assert [commit(1, "best"), commit(2), commit(3)] == [(), (), ()]
    assert [key.split("-")[1] for key in commit(4)] == ["s000000002"]
    assert [(e.step, e.keptAs) for e in in_store(store).checkpoints] == [(4, ""), (3, ""), (1, "best")]
    assert [key.split("-")[1] for key in commit(5, "best")] == ["s000000001"]
    assert [(e.step, e.keptAs) for e in in_store(store).checkpoints] == [(5, "best"), (4, ""), (3, "")]


@pytest.mark.parametrize(("done", "state"), [(False, HeadState.RELEASED), (True, HeadState.DONE)])
def test_a_release_lets_the_successor_in(
    store: ScriptedStore, owner: Make, done: bool, state: HeadState
) -> None:
    it = claimed(owner(1))
    it.release(done=done)
    it.release(done=done)
    assert in_store(store).state is state


def test_another_jobs_active_head_is_refused_with_its_name(owner: Make, told: Told) -> None:
    claimed(owner(1))
    told(lambda: owner(1, uid="B").claim())
