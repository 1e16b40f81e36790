"""When a save is made, what it does when a part fails, and which one is made when time is short."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from spottrain import checkpoint
from spottrain.cadence import AGAIN_SECONDS, Cadence
from spottrain.checkpoint import Checkpointer, seconds_for_running
from spottrain.config import Interval, Run
from spottrain.contract import Env
from spottrain.errors import StoreUnavailable
from spottrain.interruption import Interruption
from spottrain.session import Session
from spottrain.state import Encoded
from spottrain.store import Body
from spottrain.store.folder import FolderStore


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Faulty(FolderStore):
    """Fails the shards of these names, each as often as it says."""

    def __init__(self, root: Path, faults: dict[str, int]) -> None:
        super().__init__(root)
        self.faults = faults
        self.tried: list[str] = []

    def put_if_absent(self, key: str, body: Body) -> str:
        name = key.rpartition("/")[2]
        if key.startswith("checkpoints/"):
            self.tried.append(key)
            if self.faults.get(name, 0) > 0:
                self.faults[name] -= 1
                raise StoreUnavailable(f"no answer for {name}")
        return super().put_if_absent(key, body)


def make(folder: Path, faults: dict[str, int] | None = None) -> tuple[Checkpointer, Faulty]:
    store = Faulty(folder, faults or {})
    session = Session({}, Interruption(grace=30.0))
    session.run = Run.from_env({Env.JOB_UID: "u"}, script="train.py")
    session.attempt = 1
    it = Checkpointer(session, store, watch_seconds=0.01)
    it.claim()
    return it, store


def tree(shards: int = 40) -> dict[str, Any]:
    return {f"t{n}": torch.full((4,), float(n)) for n in range(shards)}


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    def encoded(tree: Any, *, step: int) -> Encoded:
        return Encoded(tree, step=step, shard_bytes=16)

    monkeypatch.setattr(checkpoint, "Encoded", encoded)
    monkeypatch.setattr(checkpoint, "UPLOADS", 1)
    monkeypatch.setattr(checkpoint, "RETRY_SECONDS", 0.01)


@pytest.mark.usefixtures("small_shards")
def test_after_the_first_shard_that_fails_the_others_are_not_begun(tmp_path: Path) -> None:
    it, store = make(tmp_path, {"00001.safetensors": 99})
    with pytest.raises(StoreUnavailable, match="no answer for 00001"):
        it.save_now(tree(), 5)
    assert len(store.tried) < 10
    it.release()


@pytest.mark.usefixtures("small_shards")
def test_a_second_try_before_the_end_repeats_only_what_failed_and_copies_nothing_anew(tmp_path: Path) -> None:
    it, store = make(tmp_path, {"00001.safetensors": 2, "manifest.json": 1})
    taken: list[int] = []

    def take() -> dict[str, Any]:
        taken.append(1)
        return tree(3)

    it.session.interruption._note_signal(15)
    it.save_before_end(take, 5)
    assert it.session.board.facts.durable_step == 5
    assert len(taken) == 1 and len({key.rpartition("/")[0] for key in store.tried}) == 1
    assert [key.rpartition("/")[2][:5] for key in store.tried].count("00000") == 1
    it.release()


def test_the_state_is_copied_only_when_the_upload_under_way_has_settled(tmp_path: Path) -> None:
    it, _ = make(tmp_path)
    gate, seen = threading.Event(), []
    write = it._put_once

    def slow(key: str, body: bytes) -> None:
        gate.wait(10)
        write(key, body)

    it._put_once = slow  # type: ignore[method-assign]
    it.save(tree(1), 4)
    it.session.interruption._note_signal(15)
    threading.Timer(0.1, gate.set).start()
    it.save_before_end(lambda: seen.append(it.busy_with) or tree(1), 5)  # type: ignore[func-returns-value]
    assert seen == [None] and it.session.board.facts.durable_step == 5
    it.release()


def test_of_an_upload_of_this_very_step_no_second_copy_is_made(tmp_path: Path) -> None:
    it, _ = make(tmp_path)
    gate = threading.Event()
    write = it._put_once

    def slow(key: str, body: bytes) -> None:
        gate.wait(10)
        write(key, body)

    it._put_once = slow  # type: ignore[method-assign]
    it.save(tree(1), 5)
    it.session.interruption._note_signal(15)
    threading.Timer(0.1, gate.set).start()
    it.save_before_end(lambda: pytest.fail("it was copied"), 5)
    assert it.session.board.facts.saves == 1
    it.release()


def test_head_is_asked_for_as_long_as_the_notice_lasts(tmp_path: Path) -> None:
    it, _ = make(tmp_path)
    patiences: list[float | None] = []
    commit, release = it._owner.commit, it._owner.release

    def noted_commit(*args: Any, patience: float | None = None, **more: Any) -> Any:
        patiences.append(patience)
        return commit(*args, patience=patience, **more)

    def noted_release(done: bool = False, *, patience: float | None = None) -> None:
        patiences.append(patience)
        release(done, patience=patience)

    it._owner.commit, it._owner.release = noted_commit, noted_release  # type: ignore[method-assign]
    it.save_now(tree(1), 4)
    it.session.interruption._note_signal(15)
    it.save_before_end(lambda: tree(1), 5)
    it.release()
    usual, *before_end = patiences
    assert usual is None
    assert len(before_end) == 2 and all(p is not None and 20 < p < 27 for p in before_end)


@pytest.mark.parametrize(
    ("left", "running", "one_save", "gets"),
    [
        (20, 3, None, 10),  # nothing was measured
        (20, 3, 10, 10),  # 7 for the rest and 10 for a new one
        (12, 3, 8, 0),  # not both; a new one has time to spare
        (10, 3, 8, 10),  # a new one might not do it
        (4, 3, 8, 4),  # neither is sure; this one has the least to do
    ],
)
def test_a_short_notice_is_shared_out_by_what_a_save_took(
    left: float, running: float, one_save: float | None, gets: float
) -> None:
    assert seconds_for_running(left, running=running, one_save=one_save) == gets


def test_a_save_that_was_not_started_is_due_until_it_is() -> None:
    cadence = Cadence(Interval.parse("5steps"))
    assert not cadence.due(4)
    assert cadence.due(5) and cadence.due(6)
    cadence.started(6)
    assert not cadence.due(10) and cadence.due(11)


def test_a_save_that_failed_is_tried_again_long_before_a_long_interval() -> None:
    clock = Clock()
    cadence = Cadence(Interval.parse("1h"), clock)
    cadence.started(7)
    clock.now += AGAIN_SECONDS - 1
    assert not cadence.due(8, failed=True)
    clock.now += 1
    assert cadence.due(8, failed=True) and not cadence.due(8)
