"""One's own DataLoader: what was used counts, not what was prefetched."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from itertools import chain, zip_longest
from typing import Any

import numpy
import pytest
import torch
from spottrain.data import BatchSampler, Loader, Sampler, ignore_signals, loader
from spottrain.errors import CheckpointError, ConfigurationError
from spottrain.ranks.world import World
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset[torch.Tensor]):
    """A number and two random ones, as augmentation would draw them."""

    def __init__(self, size: int = 50) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), float(numpy.random.rand())], dtype=torch.float64)


def steps_of(made: Any, sampler: Any, steps: int, accumulation: int = 1) -> list[list[Any]]:
    """So many steps of a loop over epochs, with one batch more that was fetched but not used."""
    taken: list[list[Any]] = []
    while True:
        window: list[Any] = []
        for batch in made:
            if len(taken) == steps:
                return taken
            window.append(batch)
            if len(window) == len(sampler.shares):
                taken.append(window)
                window = []
                sampler.advance()


def world(rank: int, ranks: int) -> World:
    return World(rank=rank, size=ranks, local_rank=rank, local_size=ranks)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [BatchSampler, Sampler])
def test_what_workers_have_prefetched_is_not_skipped(kind: type, workers: int) -> None:
    def make() -> tuple[DataLoader[Any], Any]:
        sampler = kind(Numbers(), batch_size=4, seed=2, world=World())
        how = {"batch_sampler": sampler} if kind is BatchSampler else {"sampler": sampler, "batch_size": 4}
        return DataLoader(Numbers(), num_workers=workers, worker_init_fn=ignore_signals, **how), sampler

    def numbers(taken: list[list[Any]]) -> list[list[int]]:
        return [window[0][:, 0].int().tolist() for window in taken]

    whole = numbers(steps_of(*make(), 30))
    assert sorted(chain(*whole[:13])) == sorted(chain(*whole[13:26])) == list(range(50))
    for stop in (1, 12, 13, 20):
        made, sampler = make()
        early = numbers(steps_of(made, sampler, stop))
        late, resumed = make()
        resumed.load_state_dict(sampler.state_dict())
        assert early + numbers(steps_of(late, resumed, 30 - stop)) == whole


@pytest.mark.parametrize(("workers", "later"), [(0, 2), (2, 0)])
def test_a_loader_goes_on_with_the_same_augmentation_whatever_its_workers(workers: int, later: int) -> None:
    def make(count: int) -> Loader:
        return loader(Numbers(), batch_size=4, accumulation=2, seed=2, num_workers=count, world=World())

    plain = make(0)
    whole = steps_of(plain, plain, 16)
    early = make(workers)
    late = make(later)
    taken = steps_of(early, early, 5)
    late.load_state_dict(early.state_dict())
    taken += steps_of(late, late, 11)
    assert late.position == plain.position
    for a, b in zip(taken, whole, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_change_in_the_middle_of_an_epoch(ranks: int) -> None:
    def gang(count: int, state: dict[str, Any] | None = None) -> list[BatchSampler]:
        made = [BatchSampler(50, batch_size=12 // count, seed=1, world=world(r, count)) for r in range(count)]
        for sampler in made:
            sampler.load_state_dict(state or sampler.state_dict())
        return made

    def rest(samplers: list[BatchSampler]) -> list[list[int]]:
        given = [list(sampler) for sampler in samplers]
        return [list(chain(*parts)) for parts in zip_longest(*given, fillvalue=[])]

    whole = rest(gang(1))
    before = gang(4)
    early = rest(before)[:2]
    for sampler in before:
        sampler.advance(2)
    assert len({str(sampler.state_dict()) for sampler in before}) == 1
    late = rest(gang(ranks, before[0].state_dict()))
    last = late.pop()
    assert early + late == whole[:-1]
    assert set(last) == set(whole[-1]), "a filler repeats samples of this step only"


@pytest.mark.parametrize("drop", [False, True])
def test_the_length_is_what_an_epoch_gives(drop: bool) -> None:
    for size in range(8, 30):
        for rank in range(2):
            batches = BatchSampler(size, batch_size=2, accumulation=2, drop_last=drop, world=world(rank, 2))
            single = Sampler(size, batch_size=2, accumulation=2, drop_last=drop, world=world(rank, 2))
            assert len(list(batches)) == len(batches)
            given = list(single)
            assert len(given) == len(single)
            if drop:
                assert set(Counter(given).values()) == {1}


def test_a_loop_that_never_tells_what_it_used_is_stopped_in_its_second_epoch() -> None:
    made = loader(Numbers(), batch_size=5, world=World())
    assert len(list(made)) == len(made) == 10
    with pytest.raises(
        ConfigurationError, match=r"epoch 0 was given out from sample 0 .* nobody called advance"
    ):
        list(made)


def test_the_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    sampler = BatchSampler(10, batch_size=2, shuffle=False)
    assert list(sampler) == [[2, 3], [6, 7], [8, 9]], "the last is a filler, of rank 0's"
    sampler.advance(2)
    assert sampler.shares == [0.0]


def test_other_data_at_the_resume_is_refused() -> None:
    sampler = BatchSampler(10, batch_size=2, world=World())
    with pytest.raises(CheckpointError, match="made with 10 training samples, and train_set now has 12"):
        BatchSampler(12, batch_size=2, world=World()).load_state_dict(sampler.state_dict())


def test_workers_outlive_a_stop() -> None:
    made = loader(Numbers(), batch_size=2, num_workers=2, world=World())
    batches = iter(made)
    next(batches)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    assert len(list(batches)) == 24
    del batches
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive(), "the end of the pass ends them"


SCRIPT = """
import torch, spottrain.data
from spottrain.ranks.world import World

numbers = torch.utils.data.TensorDataset(torch.arange(100))
sampler = spottrain.data.BatchSampler(numbers, batch_size=2, world=World())
options = dict(num_workers=2, persistent_workers={persistent})
made = {loader}
batches = iter(made)
next(batches)
print("out")
"""
OURS = "spottrain.data.loader(numbers, batch_size=2, world=World(), **options)"
THEIRS = (
    "torch.utils.data.DataLoader(numbers, batch_sampler=sampler, "
    "worker_init_fn=spottrain.data.ignore_signals, **options)"
)


@pytest.mark.parametrize(("made", "persistent"), [(OURS, True), (THEIRS, False)], ids=["ours", "theirs"])
def test_a_script_ends_although_its_workers_ignore_signals(made: str, persistent: bool) -> None:
    script = SCRIPT.format(loader=made, persistent=persistent)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "out\n"), done.stderr
