"""Saves of two ranks, in two threads over real connections: one checkpoint or none, the same for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from spottrain.checkpoint import manager
from spottrain.checkpoint.manager import CheckpointManager, Restored
from spottrain.checkpoint.saver import Save, TornCopy
from spottrain.contract import Env
from spottrain.core.preemption import Preemption
from spottrain.core.run_config import RunConfig
from spottrain.distributed.control_channel import ControlChannel
from spottrain.errors import CheckpointError, StoreUnavailable, TrainingFailed
from spottrain.lifecycle.session import Session
from spottrain.storage.base import Cancelled, never
from spottrain.storage.local import FolderStore

from tests.support.sentences import Told
from tests.support.snapshots import InProcessTransfer
from tests.unit.runtime.distributed.test_control_channel import SECONDS, gang, vanish, wait_for


class Failing(FolderStore):
    """Fails so many uploads; what it reads of keys with `wrong` in them is wrong.

    `stuck`: uploads go on until they are given up.
    """

    fails = 0
    stuck = False
    wrong = "none"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.tried: list[str] = []

    def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
        self.tried.append(key.rpartition("/")[2])
        if self.fails:
            self.fails -= 1
            raise StoreUnavailable("no answer")
        if self.stuck:
            wait_for(cancelled)
            raise Cancelled(key)
        return super().upload(key, body, cancelled=cancelled)

    def read_into(self, key: str, offset: int, *buffers: memoryview, hashed: bool = False) -> str:
        digest = super().read_into(key, offset, *buffers, hashed=hashed)
        return "" if self.wrong in key else digest


class Pair:
    """Two ranks. What one attempt does, both do at once."""

    def __init__(self, controls: list[ControlChannel], root: Path, attempt: int = 1) -> None:
        self.root, self.attempt = root, attempt
        self.stores = [Failing(root) for _ in controls]
        self.ranks = [self._rank(*each, attempt) for each in zip(controls, self.stores, strict=True)]
        self.claims = self.both(lambda it: it.claim())

    def _rank(self, control: ControlChannel, store: Failing, attempt: int) -> CheckpointManager:
        session = Session({}, Preemption(grace=30.0))
        session.world = control.world
        session.run = RunConfig.from_env({Env.JOB_UID: "u"}, script="train.py")
        session.attempt = attempt
        return CheckpointManager(session, store, transfer=lambda: InProcessTransfer(store), control=control)

    def both(self, act: Callable[[CheckpointManager], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return [future.result(SECONDS) for future in [pool.submit(act, it) for it in self.ranks]]

    def fail(self, act: Callable[[CheckpointManager], Any], *errors: tuple[type[Exception], str]) -> None:
        """Both act; each rank raises its error."""
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(act, it) for it in self.ranks]
            for future, (kind, words) in zip(futures, errors, strict=True):
                with pytest.raises(kind, match=words):
                    future.result(SECONDS)

    @contextmanager
    def successor(self) -> Iterator[Pair]:
        self.ranks[0].release()
        with gang(2) as controls:
            again = Pair(controls, self.root, self.attempt + 1)
            yield again
            again.ranks[0].release()

    def save(self, step: int) -> None:
        self.both(lambda it: it.save_now(taking(it, step)))

    def restore(self) -> list[Restored]:
        return self.both(lambda it: it.restore(self.claims[it.context.world.rank]))

    def shards(self, step: int) -> dict[str, Path]:
        return {path.name: path for path in self.root.glob(f"checkpoints/*-s{step:09d}-*/*.safetensors")}


def taking(it: CheckpointManager, step: int) -> Callable[[], Save]:
    def take() -> Save:
        shared = {"a": torch.full((40,), float(step)), "b": torch.ones(39), "step": step}
        own = {"random": torch.full((3,), it.context.world.rank)}
        return it.saver.snapshot(shared, own, step)

    return take


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(manager, "RETRY_SECONDS", 0.01)
    with gang(2) as controls:
        pair = Pair(controls, tmp_path)
        yield pair
        pair.ranks[0].release()


def durable(pair: Pair) -> list[int | None]:
    return [it.context.board.facts.durable_step for it in pair.ranks]


def test_each_rank_stores_its_share_and_gets_all_of_it_back_and_its_own(pair: Pair) -> None:
    pair.save(5)
    assert durable(pair) == [5, 5]
    sizes = {name: path.stat().st_size for name, path in pair.shards(5).items()}
    assert sorted(sizes) == ["r00000-00.safetensors", "r00001-00.safetensors"]
    assert abs(sizes["r00000-00.safetensors"] - sizes["r00001-00.safetensors"]) < 100, "about half each"
    with pair.successor() as again:
        for rank, found in enumerate(again.restore()):
            assert found.entry.step == found.shared["step"] == 5 and not found.new_rank
            assert found.shared["a"].tolist() == [5.0] * 40 and found.shared["b"].tolist() == [1.0] * 39
            assert found.own["random"].tolist() == [rank] * 3


@pytest.mark.parametrize(
    ("failing", "says"),
    [
        (1, ("rank 1 could not save: StoreUnavailable: no answer", "no answer")),
        (0, ("no answer", "rank 0 did not commit step 5: StoreUnavailable")),
    ],
)
def test_when_one_rank_cannot_save_none_has_and_both_say_so(
    pair: Pair, failing: int, says: tuple[str, str]
) -> None:
    pair.stores[failing].fails = 1
    pair.fail(lambda it: it.save_now(taking(it, 5)), *((StoreUnavailable, words) for words in says))
    assert durable(pair) == [None, None]
    pair.save(6)
    assert durable(pair) == [6, 6], "the next one is none the worse"


@pytest.mark.parametrize("failing", [0, 1])
def test_before_the_end_both_try_again_and_only_what_failed_is_sent_again(pair: Pair, failing: int) -> None:
    pair.stores[failing].fails = 2
    for it in pair.ranks:
        it.context.preemption._note_signal(15)
    pair.both(lambda it: it.save_before_end(taking(it, 5), 5))
    assert durable(pair) == [5, 5]
    names = ["r00000-00.safetensors", "r00001-00.safetensors"]
    assert pair.stores[failing].tried == [names[failing]] * 3
    assert pair.stores[1 - failing].tried == [names[1 - failing]]


@pytest.mark.parametrize("torn", [0, 1])
def test_when_one_rank_has_copied_half_changed_weights_no_rank_saves_and_none_waits(
    pair: Pair, torn: int
) -> None:
    states = [{"model": {"a": torch.ones(40), "b": torch.ones(39)}} for _ in range(2)]

    def take(it: CheckpointManager, step: int) -> Save:
        state = states[it.context.world.rank]
        return it.saver.snapshot(state, {}, step, stepped=list(state["model"].values()))

    def save(it: CheckpointManager, step: int) -> None:
        made = take(it, step)
        if step == 2 and it.context.world.rank == torn:
            for each in states[torn]["model"].values():
                each.add_(1)
        it.save_now(lambda: made)
        it.saver.before_step()

    pair.both(lambda it: save(it, 1))
    says = ["rank 0 did not commit step 2: TornCopy", "rank 1 could not save: TornCopy"][torn]
    errors: list[tuple[type[Exception], str]] = [(StoreUnavailable, says)] * 2
    errors[torn] = (TornCopy, "weights were changed between step 2")
    pair.fail(lambda it: save(it, 2), *errors)
    assert durable(pair) == [1, 1]
    pair.save(3)
    assert durable(pair) == [3, 3]


def test_a_rank_that_is_gone_ends_the_save_at_once(pair: Pair, told: Told) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(pair.ranks[0].save_now, taking(pair.ranks[0], 5))
        vanish(pair.ranks[1]._control)
        told(lambda: first.result(SECONDS))
    assert durable(pair) == [None, None]


@pytest.mark.parametrize("reader", [0, 1])
def test_what_only_one_rank_finds_damaged_all_pass_over(pair: Pair, reader: int) -> None:
    pair.save(5)
    pair.save(6)
    with pair.successor() as again:
        again.stores[reader].wrong = "-s000000006-"
        assert [found.entry.step for found in again.restore()] == [5, 5]


def test_when_all_are_damaged_for_one_rank_all_ranks_say_so(pair: Pair) -> None:
    pair.save(5)
    with pair.successor() as again:
        again.stores[1].wrong = "-s000000005-"
        error = (CheckpointError, r"step 5: r0000\d-00.safetensors has a wrong")
        again.fail(lambda it: it.restore(again.claims[it.context.world.rank]), error, error)


def test_a_save_that_rank_0_gives_up_is_sent_on_by_nobody_and_the_newer_one_is_made(pair: Pair) -> None:
    def begun(it: CheckpointManager) -> Save:
        save = taking(it, 5)()
        it.start(save)
        return save

    pair.stores[1].stuck = True
    saves = pair.both(begun)
    wait_for(lambda: pair.stores[1].tried)
    pair.ranks[0].wait_for_upload(0.1)
    assert all(save.finished.wait(SECONDS) for save in saves)
    assert not any(save.failed or save.committed for save in saves), "given up, and not failed"
    assert not list(pair.root.glob("checkpoints/*/manifest.json"))
    pair.stores[1].stuck = False
    pair.save(6)
    assert durable(pair) == [6, 6]


def test_ranks_with_other_tensors_make_no_checkpoint_together(pair: Pair) -> None:
    others: dict[str, dict[str, torch.Tensor]] = {
        "one more": {"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(1)},
        "another name": {"a": torch.ones(3), "c": torch.ones(4)},
        "another shape": {"a": torch.ones(3), "b": torch.ones(2, 2)},
        "another type": {"a": torch.ones(3), "b": torch.ones(4, dtype=torch.int32)},
        "another order": {"b": torch.ones(4), "a": torch.ones(3)},
    }
    for difference, other in others.items():
        states = [{"a": torch.ones(3), "b": torch.ones(4)}, other]
        pair.fail(
            lambda it, states=states: it.save_now(  # type: ignore[misc]
                lambda: it.saver.snapshot(states[it.context.world.rank], {}, 5)
            ),
            (CheckpointError, "the state of rank 1 has other tensors than that of rank 0"),
            (StoreUnavailable, "rank 0 did not commit step 5: CheckpointError"),
        )
        assert durable(pair) == [None, None], difference
        assert not list(pair.root.glob("checkpoints/*/manifest.json")), difference


def test_weights_of_one_rank_that_are_no_numbers_are_saved_by_none(pair: Pair) -> None:
    state = {"model": {"first": torch.ones(40), "second": torch.full((39,), float("nan"))}}
    error = (TrainingFailed, "second holds NaN after step 5")
    pair.fail(lambda it: it.save_now(lambda: it.saver.snapshot(state, {}, 5)), error, error)
    assert durable(pair) == [None, None]


def test_each_rank_measures_its_bandwidth_and_leaves_nothing_behind(pair: Pair) -> None:
    pair.both(lambda it: it.saver.prepare({"a": torch.ones(40), "b": torch.ones(40)}, {}))
    pair.both(lambda it: it.measure_bandwidth())
    assert all(it.saver.bandwidth for it in pair.ranks)
    assert [store.tried for store in pair.stores] == [["r00000-probe"], ["r00001-probe"]]
    assert pair.stores[0].list("checkpoints/") == []
