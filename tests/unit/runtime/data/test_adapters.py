"""Loaders without a state of the right kind: replayed, or counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from spottrain.data import Skipping
from spottrain.data.iterable import StreamBatches
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.sentences import Told
from tests.unit.runtime.data.test_iterable import run


class Plain(IterableDataset[float]):
    """Without a state, and with a shuffle of its own."""

    def __iter__(self) -> Iterator[float]:
        for number in range(20):
            yield number + random.random() / 2 + float(torch.rand(())) / 2


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_replays_a_loader_without_a_state(workers: int) -> None:
    def source() -> StreamBatches:
        return StreamBatches(Skipping(DataLoader(Plain(), batch_size=3, num_workers=workers)), accumulation=2)

    torch.manual_seed(1)
    steps = 7 if workers else 11
    whole = run(source(), steps)
    torch.manual_seed(2)
    for stop in (5,) if workers else (1, 4, 5, 8, 9):
        for inside in (True,) if workers else (False, True):
            early = source()
            taken = run(early, stop, into_the_next=inside)
            late = source()
            late.load_state_dict(early.state_dict())
            assert taken + run(late, steps - stop) == whole


def test_skipping_with_another_number_of_workers_is_refused(told: Told) -> None:
    source = StreamBatches(Skipping(DataLoader(Plain(), num_workers=2)))
    run(source, 2)
    late = StreamBatches(Skipping(DataLoader(Plain())))
    late.load_state_dict(source.state_dict())
    told(lambda: run(late, 1))


def numbers(sampler: Any, generator: torch.Generator | None = None) -> Skipping:
    return Skipping(DataLoader(list(range(20)), batch_size=4, sampler=sampler, generator=generator))  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_skipping_seeds_the_generators_of_a_loader_and_its_sampler(stop: int) -> None:
    def source() -> StreamBatches:
        dice, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        return StreamBatches(numbers(WeightedRandomSampler(range(1, 21), 20, generator=dice), other))

    whole = run(source(), 12)
    early, late = source(), source()
    taken = run(early, stop)
    late.load_state_dict(early.state_dict())
    assert taken + run(late, 12 - stop) == whole


class Turning(Sampler[int]):
    """Has a state of its own: each order begins one further."""

    turn = 0

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        yield from ((i + self.turn) % 20 for i in range(20))


def test_skipping_over_a_sampler_with_a_state_of_its_own_is_refused(told: Told) -> None:
    told(lambda: run(StreamBatches(numbers(Turning())), 1))


UNSAVED: dict[str, dict[str, Any]] = {
    "torch": {"sampler": WeightedRandomSampler(range(1, 21), 20)},
    "own": {"sampler": Turning()},
    "generator": {"shuffle": True, "generator": torch.Generator()},
}


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize("case", UNSAVED)
def test_a_stateful_loader_in_an_order_that_it_does_not_save_is_refused(case: str, told: Told) -> None:
    made = StatefulDataLoader(list(range(20)), batch_size=4, **UNSAVED[case])
    told(lambda: StreamBatches(made))


@pytest.mark.filterwarnings("ignore:'set_vital'")
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"sampler": SequentialSampler(range(20))}])
def test_a_stateful_loader_in_an_order_that_it_saves_is_taken(options: dict[str, Any]) -> None:
    StreamBatches(StatefulDataLoader(list(range(20)), batch_size=4, **options))


class Mosaic(IterableDataset[int]):
    """Behaves as MosaicML's StreamingDataset, which is not installed: one global state, counted outside."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.next_epoch = rank, ranks, 0
        self.resume: dict[str, Any] | None = None

    def _begin(self, epoch: int) -> tuple[int, int]:
        if self.resume is None or self.resume["epoch"] < epoch:
            return epoch, 0
        return self.resume["epoch"], self.resume["sample_in_epoch"]

    def __iter__(self) -> Iterator[int]:
        epoch, start = self._begin(self.next_epoch)
        self.next_epoch = epoch + 1
        for place in range(start, 48):
            if (place - start) // 2 % self.ranks == self.rank:
                yield (place * 5 + epoch) % 48

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        epoch, start = self._begin(self.next_epoch - 1)
        return {"epoch": epoch, "sample_in_epoch": num_samples + (0 if from_beginning else start)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume = state


class MosaicLoader(DataLoader[Any]):
    """Behaves as its StreamingDataLoader, which counts the samples that it has yielded on one rank."""

    dataset: Mosaic
    elastic = True
    yielded = 0

    def __iter__(self) -> Any:
        self.yielded = 0
        for batch in super().__iter__():
            self.yielded += len(batch)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict(self.yielded * self.dataset.ranks, from_beginning=False)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state)


def mosaic(rank: int, ranks: int) -> StreamBatches:
    inner = MosaicLoader(Mosaic(rank, ranks), batch_size=2)
    return StreamBatches(inner, accumulation=4 // ranks, rank=rank, ranks=ranks, steps_per_epoch=6)


def gang(
    ranks: int, steps: int, state: dict[str, Any] | None = None
) -> tuple[list[set[int]], dict[str, Any]]:
    """The samples of each step of all ranks together, and rank 0's state."""
    sources = [mosaic(rank, ranks) for rank in range(ranks)]
    for source in sources:
        if state is not None:
            source.load_state_dict(state)
    taken = [run(source, steps) for source in sources]
    together = [
        {sample for _, parts in of_step for part in parts for sample in part}
        for of_step in zip(*taken, strict=True)
    ]
    return together, sources[0].state_dict()


@pytest.mark.parametrize("stop", [1, 5, 6, 7, 12, 13])
def test_an_elastic_loader_has_one_state_for_any_number_of_ranks(stop: int) -> None:
    whole, _ = gang(1, 15)
    assert all(len(samples) == 8 for samples in whole)
    for before, after in ((1, 1), (4, 4), (4, 2), (1, 2)):
        early, state = gang(before, stop)
        late, _ = gang(after, 15 - stop, state)
        assert early + late == whole
