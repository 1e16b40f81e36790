"""When a save is made, what it does when a part fails, and which one is made when time is short."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from spottrain.checkpoint import manager, saver, upload
from spottrain.checkpoint.final_weights import FinalWeights, digest
from spottrain.checkpoint.layout import plan
from spottrain.checkpoint.manager import CheckpointManager, seconds_for_running
from spottrain.checkpoint.reader import read_manifest, read_trees
from spottrain.checkpoint.saver import Save, TornCopy
from spottrain.checkpoint.weights_files import load_weights
from spottrain.contract import Env
from spottrain.core.preemption import Preemption
from spottrain.core.run_config import RunConfig
from spottrain.errors import StoreUnavailable
from spottrain.lifecycle.session import Session
from spottrain.storage.base import Body, never
from spottrain.storage.local import FolderStore

from tests.support.sentences import Told
from tests.support.snapshots import InProcessTransfer
from tests.unit.runtime.distributed.test_control_channel import wait_for


class Faulty(FolderStore):
    """Fails the objects of these names, each as often as it says; uploads wait for `gate`.

    The answers to so many uploads are lost: the object is there, and it says that it failed.
    """

    lost_answers = 0

    def __init__(self, root: Path, faults: dict[str, int]) -> None:
        super().__init__(root)
        self.faults = faults
        self.tried: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def upload(self, key: str, body: memoryview, *, cancelled: Callable[[], bool] = never) -> list[str]:
        self._try(key)
        assert self.gate.wait(10), "nobody opened the gate"
        digests = super().upload(key, body, cancelled=cancelled)
        if self.lost_answers:
            self.lost_answers -= 1
            raise StoreUnavailable(f"the answer for {key} was lost")
        return digests

    def put_if_absent(self, key: str, body: Body) -> str:
        if key.startswith("checkpoints/"):
            self._try(key)
        return super().put_if_absent(key, body)

    def _try(self, key: str) -> None:
        self.tried.append(key)
        name = key.rpartition("/")[2]
        if self.faults.get(name, 0) > 0:
            self.faults[name] -= 1
            raise StoreUnavailable(f"no answer for {name}")


def make(folder: Path, faults: dict[str, int] | None = None) -> tuple[CheckpointManager, Faulty]:
    store = Faulty(folder, faults or {})
    it = attempt(store, 1)
    it.claim()
    return it, store


def attempt(store: Faulty, number: int) -> CheckpointManager:
    session = Session({}, Preemption(grace=30.0))
    session.run = RunConfig.from_env({Env.JOB_UID: "u"}, script="train.py")
    session.attempt = number
    return CheckpointManager(session, store, transfer=lambda: InProcessTransfer(store), watch_seconds=0.01)


def taking(it: CheckpointManager, step: int, tensors: int = 1) -> Callable[[], Save]:
    def take() -> Save:
        tree = {f"t{n}": torch.full((4,), float(n)) for n in range(tensors)}
        return it.saver.snapshot(tree, {"random": [1, 2]}, step)

    return take


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "plan", partial(plan, shard_bytes=16))
    monkeypatch.setattr(manager, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(upload, "SMALL_AT_ONCE", 1)


@pytest.mark.usefixtures("small_shards")
def test_a_second_try_before_the_end_repeats_only_what_failed_and_copies_nothing_twice(
    tmp_path: Path,
) -> None:
    it, store = make(tmp_path, {"r00000-01.safetensors": 2, "manifest.json": 1})
    taken: list[int] = []

    def take() -> Save:
        taken.append(1)
        return taking(it, 5, tensors=3)()

    it.context.preemption._note_signal(15)
    it.save_before_end(take, 5)
    assert it.context.board.facts.durable_step == 5
    assert len(taken) == 1 and len({key.rpartition("/")[0] for key in store.tried}) == 1
    assert [key.rpartition("/")[2][:9] for key in store.tried].count("r00000-00") == 1
    it.release()


@pytest.mark.usefixtures("small_shards")
def test_what_is_there_although_the_store_said_that_it_failed_is_not_in_the_way_of_a_second_try(
    tmp_path: Path,
) -> None:
    it, store = make(tmp_path)
    store.lost_answers = 2
    it.context.preemption._note_signal(15)
    it.save_before_end(taking(it, 5, tensors=3), 5)
    assert it.context.board.facts.durable_step == 5
    key = it.context.board.facts.key
    shared, _ = read_trees(store, key, read_manifest(store, key))
    assert [t.tolist() for t in shared.values()] == [[0] * 4, [1] * 4, [2] * 4]
    it.release()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, ()), (torch.bfloat16, (3, 5)), (torch.float16, ()), (torch.float64, (3, 5))],
)
def test_weights_that_are_no_numbers_are_not_saved(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], told: Told
) -> None:
    it, store = make(tmp_path)
    it.save_now(lambda: it.saver.snapshot({"model": {"last.bias": torch.ones(shape, dtype=dtype)}}, {}, 4))
    before = len(store.tried)
    bias = torch.ones(shape, dtype=dtype)
    bias.view(-1)[-1] = float("nan")
    told(lambda: it.save_now(lambda: it.saver.snapshot({"model": {"last.bias": bias}}, {}, 5)))
    assert len(store.tried) == before and it.context.board.facts.durable_step == 4
    it.release()


def test_what_is_no_number_on_purpose_or_is_no_weight_is_saved(tmp_path: Path) -> None:
    it, _ = make(tmp_path)
    state = {
        "model": {
            "mask": torch.tensor([0.0, -torch.inf]),
            "top": torch.tensor(torch.inf),
            "none": torch.ones(0),
        },
        "optimizer": {"exp_avg": torch.tensor([torch.nan])},
        "models": {"w": torch.tensor([torch.nan])},
    }
    it.save_now(lambda: it.saver.snapshot(state, {"own": torch.tensor(torch.nan)}, 5))
    assert it.context.board.facts.durable_step == 5
    it.release()


def beside(it: CheckpointManager, weights: torch.Tensor, step: int) -> Save:
    return it.saver.snapshot({"model": {"w": weights}, "step": step}, {}, step, stepped=[weights])


def saved_weights(it: CheckpointManager, store: Faulty) -> Any:
    key = it.context.board.facts.key
    return read_trees(store, key, read_manifest(store, key))[0]["model"]["w"].tolist()


def test_weights_are_copied_until_the_next_optimizer_step_and_are_saved_as_they_were_before(
    tmp_path: Path,
) -> None:
    it, store = make(tmp_path)
    weights = torch.zeros(4)
    it.save_now(lambda: beside(it, weights, 1))
    it.saver.before_step()
    save = beside(it, weights, 2)
    assert it.saver.copying, "nothing of them is copied yet"
    it.saver.before_step()
    weights.add_(1)
    it.save_now(lambda: save)
    assert it.context.board.facts.durable_step == 2 and saved_weights(it, store) == [0] * 4
    it.release()


def test_weights_that_the_forward_pass_changes_are_never_saved_half_changed_and_then_copied_at_once(
    tmp_path: Path,
) -> None:
    it, store = make(tmp_path)
    weights = torch.zeros(4)
    it.save_now(lambda: beside(it, weights, 1))
    it.saver.before_step()
    save = beside(it, weights, 2)
    weights.add_(1)
    with pytest.raises(TornCopy, match="weights were changed between step 2 and the next optimizer step"):
        it.save_now(lambda: save)
    assert it.context.board.facts.durable_step == 1
    save = beside(it, weights, 3)
    assert not it.saver.copying
    weights.add_(1)
    it.save_now(lambda: save)
    assert saved_weights(it, store) == [1] * 4
    it.release()


def test_a_forward_pass_that_changes_weights_unseen_by_torch_is_found_at_the_first_save(
    tmp_path: Path,
) -> None:
    it, _ = make(tmp_path)
    weights = torch.zeros(4)
    it.save_now(lambda: beside(it, weights, 1))
    weights.data.add_(1)
    it.saver.before_step()
    beside(it, weights, 2)
    assert not it.saver.copying
    it.release()


def test_final_weights_go_the_way_of_large_files_and_over_those_of_one_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, store = make(tmp_path)
    it.save_now(taking(it, 5))
    put, name = store.put, "final/model.safetensors"
    put(name, b"of one that died")

    def one_request(key: str, body: Body) -> None:
        assert len(body) <= 2000, "too much for one request"
        put(key, body)

    monkeypatch.setattr(store, "put", one_request)
    weights = {"a": torch.arange(8000.0), "b": torch.ones(3)}
    it.write_final(FinalWeights(weights), 5)
    body = (tmp_path / name).read_bytes()
    assert load_weights(tmp_path / "final").keys() == weights.keys()
    facts = json.loads((tmp_path / "final" / "manifest.json").read_text())
    file = {"name": "model.safetensors", "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    assert facts["files"] == [file]
    assert facts["digest"] == digest(weights) and facts["step"] == 5
    it.release()


def test_weights_that_do_not_fit_into_memory_are_left_a_file_at_a_time(tmp_path: Path) -> None:
    it, _ = make(tmp_path)
    it.save_now(taking(it, 5))
    weights = {f"layer.{n}": torch.full((1000,), float(n)) for n in range(5)} | {"large": torch.ones(9000)}
    gathered: list[str] = []

    class Seen(FinalWeights):
        def files(self, *, first: bool, keep: bool) -> Iterator[tuple[str, memoryview]]:
            for name, body in super().files(first=first, keep=keep):
                assert len(body) < 4 * 9000 + 1000, "the largest tensor has a file of its own"
                yield name, body
                gathered.append(name)
                assert (tmp_path / "final" / name).exists(), "before the next one is gathered"

    it.write_final(Seen(weights, most=9000), 5)
    assert sorted(gathered) == [f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)]
    index = json.loads((tmp_path / "final" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys() and set(index["weight_map"].values()) == set(gathered)
    assert index["metadata"]["total_size"] == 4 * 14000
    found = load_weights(tmp_path / "final" / "model.safetensors")
    assert digest(found) == digest(weights)

    it.write_final(FinalWeights(weights), 5)
    left = {path.name for path in (tmp_path / "final").iterdir()}
    assert left == {"model.safetensors", "manifest.json"}, "what a predecessor left in other files is gone"
    it.release()


@pytest.mark.parametrize("uploading", [4, 5])
def test_the_state_is_copied_only_when_the_upload_under_way_has_settled_and_not_again_if_it_is_of_this_step(
    tmp_path: Path, uploading: int
) -> None:
    it, store = make(tmp_path)
    seen: list[int | None] = []

    def take() -> Save:
        seen.append(it.busy_with)
        return taking(it, 5)()

    store.gate.clear()
    it.start(taking(it, uploading)())
    it.context.preemption._note_signal(15)
    threading.Timer(0.1, store.gate.set).start()
    it.save_before_end(take, 5)
    assert seen == ([None] if uploading == 4 else []) and it.context.board.facts.durable_step == 5
    it.release()


def test_a_save_that_was_given_up_is_never_committed_after_the_one_that_took_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "RETRY_SECONDS", 0.01)
    it, store = make(tmp_path)
    store.gate.clear()
    save = taking(it, 4)()
    it.start(save)
    it.wait_for_upload(0.05)
    assert save.abandoned
    store.gate.set()
    assert save.finished.wait(10)
    assert it.context.board.facts.durable_step is None and not it.last_save_failed
    assert not [key for key in store.list("checkpoints/") if key.endswith("manifest.json")]
    it.save_now(taking(it, 5))
    assert it.context.board.facts.durable_step == 5
    it.release()


def test_what_is_saved_is_restored_by_the_next_attempt(tmp_path: Path, told: Told) -> None:
    it, store = make(tmp_path)
    it.save_now(taking(it, 5, tensors=3))
    it.release()
    successor = attempt(store, 2)
    claim = successor.claim()
    found = successor.restore(claim)
    assert found is not None
    assert found.entry.step == 5 and found.own == {"random": [1, 2]} and not found.new_rank
    assert [tensor.tolist() for tensor in found.shared.values()] == [[0] * 4, [1] * 4, [2] * 4]
    told(lambda: successor.restore(claim, folder=lambda step: tmp_path / "here"))
    successor.release()


def test_a_folder_of_a_library_is_saved_and_restored(tmp_path: Path) -> None:
    it, store = make(tmp_path / "store")
    written = tmp_path / "written"
    (written / "deep").mkdir(parents=True)
    (written / "a.bin").write_bytes(b"a" * 1000)
    (written / "deep" / "b").write_bytes(b"")
    it.save_now(lambda: it.saver.folder(written, {"step": 5}, {"mine": 1}, 5))
    it.release()
    successor = attempt(store, 2)
    found = successor.restore(successor.claim(), folder=lambda step: tmp_path / f"read-{step}")
    assert found is not None and found.shared == {"step": 5} and found.own == {"mine": 1}
    assert (tmp_path / "read-5" / "a.bin").read_bytes() == b"a" * 1000
    assert (tmp_path / "read-5" / "deep" / "b").read_bytes() == b""
    successor.release()


def test_measuring_the_bandwidth_leaves_nothing_behind(tmp_path: Path) -> None:
    it, store = make(tmp_path)
    it.measure_bandwidth()
    assert it.saver.bandwidth is None and it.expected_seconds is None, "there is no memory to send from yet"
    it.saver.prepare({"t": torch.ones(1000)}, {})
    it.measure_bandwidth()
    assert it.saver.bandwidth and it.expected_seconds
    assert [key.rpartition("/")[2] for key in store.tried] == ["r00000-probe"]
    assert store.list("checkpoints/") == []
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
    it.save_now(taking(it, 4))
    it.context.preemption._note_signal(15)
    it.save_before_end(taking(it, 5), 5)
    it.release()
    usual, *before_end = patiences
    assert usual is None
    assert len(before_end) == 2 and all(p is not None and 20 < p < 27 for p in before_end)


@pytest.mark.usefixtures("small_shards")
def test_a_save_at_a_notice_that_fails_again_and_again_for_one_reason_says_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    it, _ = make(tmp_path, {"r00000-00.safetensors": 20, "manifest.json": 20})
    it.context.preemption._note_signal(15)
    it.save_before_end(taking(it, 5), 5)
    it.release()
    assert it.context.board.facts.durable_step == 5
    failed = [line for line in capfd.readouterr().out.splitlines() if "event=save-failed" in line]
    assert ["safetensors" in line for line in failed] == [True, False]


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


def test_a_committed_save_is_over_before_what_it_replaces_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, store = make(tmp_path)
    deleting, may = threading.Event(), threading.Event()
    delete = store.delete

    def slow(keys: Sequence[str]) -> None:
        deleting.set()
        assert may.wait(30), "nobody let it delete"
        delete(keys)

    monkeypatch.setattr(store, "delete", slow)
    for step in (1, 2, 3):
        it.save_now(taking(it, step))
    save = taking(it, 4)()
    it.start(save)
    assert deleting.wait(30), "step 1 falls out of HEAD"
    assert save.finished.wait(30) and it.busy_with is None, "it is durable, and uses no notice up any more"
    it.context.preemption._note_signal(15)
    it.save_before_end(taking(it, 5), 5)
    assert it.context.board.facts.durable_step == 5, "nor does the one at the end wait for a deletion"
    it.release()
    may.set()


def test_what_a_commit_in_a_notice_replaces_is_deleted_by_the_successor(tmp_path: Path) -> None:
    it, store = make(tmp_path)
    for step in (1, 2, 3):
        it.save_now(taking(it, step))
    it.context.preemption._note_signal(15)
    it.save_before_end(taking(it, 4), 4)
    it.release()
    steps = {key.split("-")[1] for key in store.list("checkpoints/")}
    assert steps == {f"s00000000{n}" for n in (1, 2, 3, 4)}
    successor = attempt(store, 2)
    successor.restore(successor.claim())
    wait_for(lambda: len({key.split("-")[1] for key in store.list("checkpoints/")}) == 3)
    successor.release()
