"""The defects of the articles' checkpoint listings, and the same scenes with ours: see docs/techniques.md.

`test_defect_...` shows what goes wrong (tests/support/listings.py), `test_ours_...` that it does not here.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from spottrain.checkpoint.head.owner import Entry, HeadOwner, Identity
from spottrain.checkpoint.reader import read_manifest, read_trees
from spottrain.contract import ExitCode, Outcome
from spottrain.core.run_config import Interval
from spottrain.data import Batches, Plan
from spottrain.errors import CheckpointError, StoreDenied, Superseded
from spottrain.lifecycle.save_interval import SaveInterval
from spottrain.storage.local import FolderStore

from tests.runs.conftest import Lab
from tests.runs.launched import Run
from tests.support import listings
from tests.support.listings import (
    SCRIPT,
    Cut,
    Denied,
    Gated,
    Halfway,
    Killed,
    Mount,
    SavedWhenQueued,
    SavesInHandler,
    TwoKinds,
    attempt,
    claimed,
    restored_step,
    state_at,
)
from tests.support.zygote import Zygote


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A run that was told to stop in the middle of its third optimizer step, and the one that went on."""

    first: Run
    second: Run
    store: FolderStore


@pytest.fixture(scope="module")
def pair(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    lab = Lab(zygote, tmp_path_factory.mktemp("listings"))
    try:
        first = lab.run(SCRIPT, attempt=1, interval="1h", env={"STOP_IN": "3"})
        first.end()
        second = lab.run(SCRIPT, attempt=2, interval="1h")
        second.end()
        yield Pair(first=first, second=second, store=FolderStore(lab.folder / "store"))
    finally:
        lab.close()


def told(run: Run, what: str) -> list[dict[str, Any]]:
    lines = [line.partition(" ") for line in run.log.splitlines()]
    return [json.loads(rest) for word, _, rest in lines if word == what]


# --- exit 0 on SIGTERM (001) ----------------------------------------------------------------------------
def test_defect_an_interruption_ends_with_0_like_the_end_of_the_work() -> None:
    command = [sys.executable, "-c", listings.LEAVES_WITH_0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == ExitCode.DONE


def test_ours_an_interruption_ends_with_75_and_only_the_end_of_the_work_with_0(pair: Pair) -> None:
    assert pair.first.code == ExitCode.INTERRUPTED, pair.first.log
    assert pair.first.message.outcome is Outcome.INTERRUPTED and pair.first.message.step == 3
    assert pair.second.code == ExitCode.DONE, pair.second.log
    assert pair.second.message.outcome is Outcome.DONE and pair.second.message.step == 8


# --- save inside the handler (001) ----------------------------------------------------------------------
def test_defect_a_save_in_the_handler_mixes_two_steps() -> None:
    before, after = SavesInHandler(), SavesInHandler()
    for it, steps in ((before, 2), (after, 3)):
        for _ in range(steps):
            it.train_step()
    it = SavesInHandler()
    it.train_step()
    it.train_step()
    usual = signal.signal(signal.SIGTERM, it.handle)
    try:
        with pytest.raises(SystemExit), Halfway(lambda: signal.raise_signal(signal.SIGTERM)):
            it.train_step()
    finally:
        signal.signal(signal.SIGTERM, usual)

    saved, two, three = it.saved, before.state(), after.state()
    assert saved["step"] == 2, "says the file, but:"
    assert torch.equal(saved["model"]["weight"], three["model"]["weight"])
    assert torch.equal(saved["model"]["bias"], two["model"]["bias"])
    assert torch.equal(saved["adam"]["state"][1]["exp_avg"], three["adam"]["state"][1]["exp_avg"])
    assert not torch.equal(two["model"]["weight"], three["model"]["weight"])


def test_ours_a_stop_in_the_middle_of_an_optimizer_step_saves_the_whole_step(pair: Pair) -> None:
    assert pair.first.message.durableStep == 3
    key = pair.first.message.key
    saved, _ = read_trees(pair.store, key, read_manifest(pair.store, key))
    assert told(pair.first, "whole")[-1] == {
        "step": 3,
        "weights": [saved["model"][name].tolist() for name in ("1.weight", "1.bias")],
    }
    assert saved["progress"]["step"] == 3
    assert [float(each["step"]) for each in saved["optimizer"]["state"].values()] == [3, 3]


# --- a stale emergency file preferred over a newer step (001) -------------------------------------------
def test_defect_an_emergency_file_wins_over_every_later_step(tmp_path: Path) -> None:
    files = TwoKinds(tmp_path)
    files.write(500)
    files.write(700, urgent=True)
    assert files.read() == 700
    files.write(1000)
    files.write(1500)
    assert files.read() == 700, "and again at each later start"


def test_defect_half_of_an_emergency_file_hides_the_whole_ones(tmp_path: Path) -> None:
    files = TwoKinds(tmp_path)
    files.write(500)
    files.write(700, urgent=True)
    files.urgent.write_bytes(files.urgent.read_bytes()[:100])  # SIGKILL at the end of the notice
    with pytest.raises(RuntimeError, match="zip archive"):
        files.read()


def test_ours_the_last_commit_wins_whatever_it_was_made_for(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    first = claimed(store, 1)
    first.save_now(state_at(first, 500))
    first.context.preemption._note_signal(signal.SIGTERM)
    first.save_before_end(state_at(first, 700), 700)
    first.release()
    second = claimed(store, 2)
    for step in (1000, 1500):
        second.save_now(state_at(second, step))
    assert restored_step(store, 3) == 1500


def test_ours_a_save_at_a_notice_that_was_cut_off_leaves_the_one_before(tmp_path: Path) -> None:
    store = Cut(tmp_path)
    first = claimed(store, 1)
    first.save_now(state_at(first, 500))
    first.context.preemption._note_signal(signal.SIGTERM)
    store.cutting = True
    with pytest.raises(Killed):
        first.save_before_end(state_at(first, 700), 700)
    assert restored_step(store, 2) == 500


# --- no scaler or RNG state (001, 002) ------------------------------------------------------------------
def test_defect_without_loss_scale_and_random_state_a_resumed_run_is_another_one() -> None:
    whole = listings.start_training()
    kept = listings.train(whole, 5)
    first = listings.start_training()
    assert listings.train(first, 3) == kept[:3]
    second = listings.start_training()
    listings.load_weights_and_optimizer(second, listings.save_weights_and_optimizer(first))
    assert (first.scaler.get_scale(), second.scaler.get_scale()) == (128.0, 64.0)
    assert listings.train(second, 2) == kept[:2] != kept[3:], "the masks of the first steps once more"


def test_ours_loss_scale_and_random_state_go_on_where_they_were(pair: Pair) -> None:
    (left,), begun = told(pair.first, "left"), told(pair.second, "begin")[0]
    assert {name: begun[name] for name in left} == left
    assert left["scale"] == 128.0 and left["step"] == 3
    assert told(pair.first, "begin")[0]["random"] != left["random"]


# --- `except Exception: return 0` (002) -----------------------------------------------------------------
def test_defect_what_cannot_be_read_counts_as_not_there(tmp_path: Path) -> None:
    place = Mount(tmp_path / "only")
    listings.save(place, 4500)
    assert listings.load_or_0(listings.Shut(tmp_path / "only")) == 0
    place.path.write_bytes(place.read()[:-200])
    assert listings.load_or_0(place) == 0


def test_ours_what_cannot_be_read_ends_the_run_and_is_left_as_it_was(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    first = claimed(store, 1)
    first.save_now(state_at(first, 4500))
    first.release()
    with pytest.raises(StoreDenied, match="403"):
        attempt(Denied(tmp_path), 2).claim()
    (shard,) = tmp_path.glob("checkpoints/*/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="Nothing was overwritten"):
        restored_step(store, 2)
    assert len(list(tmp_path.glob("checkpoints/*/manifest.json"))) == 1


# --- `enumerate(start=)` (002) --------------------------------------------------------------------------
def test_defect_the_count_goes_on_and_the_data_begin_again() -> None:
    batches = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    seen = [samples for _, samples in list(listings.go_on_counting(batches, 0))[:3]]
    again = list(listings.go_on_counting(batches, 3))
    assert again[0] == (3, [0, 1]) and again[-1][0] == 7, "five more steps where two were left"
    assert [samples for _, samples in again[:3]] == seen


def test_ours_each_sample_of_the_epoch_is_used_once_over_both_attempts(pair: Pair) -> None:
    begun = told(pair.first, "begin") + told(pair.second, "begin")
    assert [step["step"] for step in begun] == list(range(8))
    assert sorted(number for step in begun[:5] for number in step["samples"]) == list(range(10))


def test_ours_a_position_in_the_data_is_reached_without_reading_what_came_before(tmp_path: Path) -> None:
    fetched: list[int] = []

    class Noting(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            fetched.append(index)
            return index

    def used(batches: Batches, steps: int) -> list[int]:
        found: list[int] = []
        for step, parts in batches:
            found += [number for part, _ in parts for number in part.tolist()]
            batches.done(step)
            if (steps := steps - 1) == 0:
                return found
        raise AssertionError("the stream has no end")

    plan = Plan(size=10, global_batch_size=2, micro_batch_size=2, seed=3)
    early, late = Batches(Noting(), plan), Batches(Noting(), plan)
    before = used(early, 3)
    late.load_state_dict(early.state_dict())
    fetched.clear()
    assert sorted(before + used(late, 2)) == list(range(10))
    assert not set(before) & set(fetched)


# --- upload over the only key (002) ---------------------------------------------------------------------
def test_defect_a_kill_while_the_only_file_is_written_leaves_none(tmp_path: Path) -> None:
    place = Mount(tmp_path / "only")
    listings.save(place, 4500)
    place.killed_at = 300
    listings.save(place, 5000)
    assert listings.load_or_0(place) == 0


def test_defect_a_predecessor_that_is_still_uploading_undoes_its_successor(tmp_path: Path) -> None:
    place = Mount(tmp_path / "only")  # as true of S3, where a PUT is whole or nothing
    listings.save(place, 9)
    listings.save(place, 6)
    assert listings.load_or_0(place) == 6


def test_ours_a_kill_during_an_upload_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    store = Cut(tmp_path)
    first = claimed(store, 1)
    first.save_now(state_at(first, 4500))
    store.cutting = True
    with pytest.raises(Killed):
        first.save_now(state_at(first, 5000))
    assert restored_step(store, 2) == 4500


def test_ours_a_predecessor_that_is_still_uploading_commits_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    ghost, owner = (HeadOwner(store, Identity(job_uid="u", job="j", attempt=n)) for n in (1, 2))
    ghost.claim()
    late = ghost.new_key(6)
    owner.claim()
    owner.commit(Entry(key=owner.new_key(9), step=9, time=2.0, bytes=1), 3)
    with pytest.raises(Superseded):
        ghost.commit(Entry(key=late, step=6, time=3.0, bytes=1), 3)
    successor = HeadOwner(store, Identity(job_uid="u", job="j", attempt=3)).claim()
    assert successor is not None and [entry.step for entry in successor.resume] == [9]


# --- save at step 0 (002) -------------------------------------------------------------------------------
def test_defect_the_first_act_of_a_run_is_to_overwrite_what_it_could_not_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "only"
    listings.save(Mount(path), 4500)
    run = listings.train_one_key(listings.Shut(path), steps=10, every=500)
    assert [next(run), next(run)] == [0, 1]
    assert torch.load(path) == {"step": 0}
    assert next(listings.train_one_key(Mount(path), steps=1, every=500)) == 0, "a step that is in the file"


def test_ours_nothing_is_saved_at_the_start_nor_right_after_a_resume(pair: Pair) -> None:
    cadence = SaveInterval(Interval(steps=500))
    assert not cadence.due(0) and not cadence.due(499) and cadence.due(500)
    cadence.started(4500)
    assert not cadence.due(4500) and not cadence.due(4501) and cadence.due(5000)
    commits = [
        line for run in (pair.first, pair.second) for line in run.log.splitlines() if "committed" in line
    ]
    assert [line.split(" step=")[1].split()[0] for line in commits] == ["3", "8"]


# --- durable, or on its way? (002) ----------------------------------------------------------------------
def test_defect_a_step_counts_as_saved_while_its_upload_is_only_queued(tmp_path: Path) -> None:
    place = Mount(tmp_path / "only")
    queue = SavedWhenQueued(place)
    queue.save(500)
    queue.upload()
    queue.save(1000)
    assert (queue.saved_step, listings.load_or_0(place)) == (1000, 500), "killed here, 500 steps are lost"


def steps_in_head(store: FolderStore) -> list[int]:
    found = store.get("HEAD")
    assert found is not None
    return [entry["step"] for entry in json.loads(found.body)["checkpoints"]]


def test_ours_training_goes_on_at_once_and_a_step_is_durable_when_head_names_it(tmp_path: Path) -> None:
    store = Gated(tmp_path)
    it = claimed(store, 1)
    board = it.context.board
    save = state_at(it, 500)()
    it.start(save)  # returns while nothing is uploaded yet
    board.update(step=520)
    assert it.busy_with == 500 and board.facts.lost_steps == 520 and steps_in_head(store) == []
    assert "durable" not in board.metrics() and board.progress().durableStep is None
    store.gate.set()
    assert save.finished.wait(30)
    assert steps_in_head(store) == [500] and board.facts.lost_steps == 20
    progress = board.progress()
    assert progress.durableStep == 500 and progress.durableTime
    assert "spottrain_durable_step 500" in board.metrics()
    it.release()


def test_ours_a_commit_that_fails_makes_nothing_durable(tmp_path: Path) -> None:
    it = claimed(FolderStore(tmp_path), 1)

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise Superseded("attempt 2 owns HEAD")

    it._owner.commit = fail  # type: ignore[method-assign]
    with pytest.raises(Superseded):
        it.save_now(state_at(it, 500))
    assert list(tmp_path.glob("checkpoints/*/manifest.json")), "all of it is there but for the commit"
    assert it.context.board.facts.durable_step in (None, 0)


def test_ours_the_age_of_what_is_durable_is_shown(tmp_path: Path) -> None:
    it = claimed(FolderStore(tmp_path), 1)
    it.save_now(state_at(it, 500))
    board = it.context.board
    assert board.facts.durable_time is not None
    board.update(durable_time=board.facts.durable_time - 90)
    shown = board.metrics().split("\nspottrain_durable_age_seconds ")[1].split()[0]
    assert float(shown) >= 90
