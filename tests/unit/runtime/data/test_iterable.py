"""Streams: a resumed one gives what an uninterrupted one would have, with torchdata's real loader too."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from spottrain.checkpoint.tree import Flattened, unflatten
from spottrain.data import loader
from spottrain.data.iterable import StreamBatches
from spottrain.data.plan import Plan
from spottrain.data.source import Batches
from spottrain.distributed.world import World
from spottrain.errors import CheckpointError
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.sentences import Told

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's call

Taken = list[tuple[int, list[list[int]]]]
"""Epoch and micro-batches of each step."""


class Numbers(IterableDataset[int]):
    """So many numbers, divided among workers, another order in each pass; its state is two integers."""

    def __init__(self, size: int) -> None:
        self.size, self.at, self.passes = size, 0, 0
        self.loaded = True

    def __iter__(self) -> Iterator[int]:
        if not self.loaded:
            self.at, self.passes = 0, self.passes + 1
        self.loaded = False
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        while self.at < self.size:
            self.at += 1
            if self.at % workers == worker:
                yield (self.at * 7 + self.passes) % self.size

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.passes, self.loaded = state["at"], state["passes"], True


def torchdata(kind: str, workers: int = 0, *, seed: int = 7) -> StatefulDataLoader[Any]:
    torch.manual_seed(seed)
    if kind == "map":
        return StatefulDataLoader(list(range(50)), batch_size=3, num_workers=workers, shuffle=True)
    return StatefulDataLoader(Numbers(50), batch_size=3, num_workers=workers)


def run(source: StreamBatches, steps: int, *, into_the_next: bool = False) -> Taken:
    """So many steps; `into_the_next`: a stop comes inside of one more."""
    taken: Taken = []
    stream = iter(source)
    for _ in range(steps):
        step, parts = next(stream)
        taken.append((step.epoch, [part.tolist() for part, _ in parts]))
        source.done(step)
    if into_the_next:
        next(stream)
    stream.close()
    return taken


@pytest.mark.parametrize(
    ("kind", "workers", "steps_per_epoch"),
    [
        ("map", 0, None),
        ("map", 0, 4),
        ("map", 2, None),
        ("iterable", 0, None),
        ("iterable", 0, 4),
        ("iterable", 2, 4),
    ],
)
def test_torchdata_s_loader_goes_on_exactly(kind: str, workers: int, steps_per_epoch: int | None) -> None:
    def source(seed: int) -> StreamBatches:
        return StreamBatches(
            torchdata(kind, workers, seed=seed), accumulation=4, steps_per_epoch=steps_per_epoch
        )

    steps = 7 if workers else 14
    whole = run(source(7), steps)
    if steps_per_epoch is None:
        first = [sample for epoch, parts in whole if not epoch for part in parts for sample in part]
        assert sorted(first) == list(range(50))
    # 4 and 5 end an epoch; to start workers takes a while
    some = [(4, True)]
    every = [(stop, inside) for stop in range(1, 13) for inside in (False, True)]
    for stop, inside in some if workers else every:
        early = source(7)
        taken = run(early, stop, into_the_next=inside)
        late = source(8)  # nothing of the order comes from the script's seed
        late.load_state_dict(early.state_dict())
        assert taken + run(late, steps - stop) == whole, f"stopped at {stop}, inside: {inside}"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_torchdata_s_state_can_be_kept_in_a_checkpoint(kind: str, workers: int) -> None:
    source = StreamBatches(torchdata(kind, workers))
    whole = run(StreamBatches(torchdata(kind)), 5) if not workers else None
    taken = run(source, 3)
    flat = Flattened(source.state_dict())
    kept = unflatten(json.loads(json.dumps(flat.plain)), lambda number: flat.leaves[number].tensor.clone())
    late = StreamBatches(torchdata(kind, workers, seed=8))
    late.load_state_dict(kept)
    taken += run(late, 2)
    assert whole is None or taken == whole


class Watched:
    """A `Resumable` of numbers that counts how often its state was taken and what was fetched."""

    def __init__(self, size: int | None = None) -> None:
        self.size, self.at, self.states, self.fetched = size, 0, 0, 0
        self.loaded = True

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.loaded:
            self.at = 0
        self.loaded = False
        while self.size is None or self.at < self.size:
            self.at += 1
            self.fetched += 1
            yield torch.tensor([self.at, self.at])

    def state_dict(self) -> dict[str, Any]:
        self.states += 1
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.loaded = state["at"], True


def test_the_loader_s_state_is_taken_when_a_save_is_made_and_not_at_each_step() -> None:
    watched = Watched()
    source = StreamBatches(watched)
    stream = iter(source)
    for number in range(40):
        step, _ = next(stream)
        source.done(step)
        if number in (9, 29):
            source.state_dict()
            source.state_dict()
    assert watched.states == 1 + 2, "the first is that of the beginning"


def test_a_stop_inside_a_step_fetches_again_only_what_came_since_the_last_save() -> None:
    source = StreamBatches(Watched(), accumulation=2)
    stream = iter(source)
    for number in range(20):
        step, _ = next(stream)
        source.done(step)
        if number == 14:
            source.state_dict()
    next(stream)
    watched = Watched()
    late = StreamBatches(watched, accumulation=2)
    late.load_state_dict(source.state_dict())
    assert run(late, 1) == [(0, [[41, 41], [42, 42]])]
    assert watched.fetched == (20 - 15) * 2 + 2
    assert late.state_dict()["steps"] == 21


def test_a_save_while_data_are_awaited_needs_nothing_from_the_loader() -> None:
    waiting, let_go = threading.Event(), threading.Event()

    class Stuck(Watched):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for number, batch in enumerate(super().__iter__()):
                if number == 3:
                    waiting.set()
                    assert let_go.wait(10), "the test lets it go"
                yield batch

    source = StreamBatches(Stuck())
    thread = threading.Thread(target=run, args=(source, 4))
    thread.start()
    assert waiting.wait(10), "the loader is asked for the fourth batch"
    state = source.state_dict()
    let_go.set()
    thread.join(10)
    assert not thread.is_alive()
    late = StreamBatches(Watched())
    late.load_state_dict(state)
    assert run(late, 1) == [(0, [[4, 4]])]


def test_shares_of_a_step_add_up_to_one_over_the_ranks() -> None:
    source = StreamBatches(Watched(), accumulation=3, ranks=4, rank=1)
    step, parts = next(iter(source))
    assert step.shares == [share for _, share in parts] == [pytest.approx(1 / 12)] * 3
    assert step.samples == 3 * 2 * 4


def test_the_end_of_the_loader_is_the_end_of_the_epoch_with_a_smaller_step() -> None:
    source = StreamBatches(Watched(7), accumulation=3)
    taken = run(source, 5)
    assert [(epoch, len(parts)) for epoch, parts in taken] == [(0, 3), (0, 3), (0, 1), (1, 3), (1, 3)]


def test_steps_per_epoch_leave_out_what_a_longer_rank_has_left() -> None:
    taken = run(StreamBatches(Watched(7), accumulation=2, steps_per_epoch=2, ranks=2), 3)
    assert taken == [(0, [[1, 1], [2, 2]]), (0, [[3, 3], [4, 4]]), (1, [[1, 1], [2, 2]])]


def test_calling_the_loader_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    source = StreamBatches(torchdata("map"))
    before = torch.get_rng_state()
    run(source, 20)
    source.state_dict()
    assert torch.equal(before, torch.get_rng_state())


def test_workers_of_a_person_s_own_loader_outlive_a_stop() -> None:
    inner = torchdata("map", 2)
    inner.worker_init_fn = print
    source = StreamBatches(inner)
    stream = iter(source)
    found = [next(stream)]
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    found += islice(stream, 15)
    assert len(found) == 16 and all(worker.is_alive() for worker in workers)
    stream.close()
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive(), "closing the stream ends them"


# --- what is refused, in one sentence ---------------------------------------------------------------
def test_a_rank_whose_loader_ends_before_the_others_says_so(told: Told) -> None:
    promised = StreamBatches(Watched(7), accumulation=2, steps_per_epoch=4, ranks=2, rank=1)
    told(lambda: run(promised, 5))
    endless = StreamBatches(Watched(7), accumulation=2, ranks=2)
    told(lambda: run(endless, 5))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_empty_loader_says_so(ranks: int, told: Told) -> None:
    told(lambda: run(StreamBatches(Watched(0), ranks=ranks), 1))


def test_a_stream_for_each_rank_refuses_another_number_of_ranks(told: Told) -> None:
    source = StreamBatches(Watched(), rank=0, ranks=2)
    run(source, 3)
    for rank, ranks in ((0, 1), (1, 2), (0, 4)):
        with pytest.raises(CheckpointError) as refused:
            StreamBatches(Watched(), rank=rank, ranks=ranks).load_state_dict(source.state_dict())
        told(refused)


def test_an_elastic_stream_goes_on_with_another_number_of_ranks() -> None:
    class Elastic(Watched):
        elastic = True

    source = StreamBatches(Elastic(), accumulation=2, rank=0, ranks=2)
    run(source, 3)
    late = StreamBatches(Elastic(), accumulation=1, rank=3, ranks=4)
    late.load_state_dict(source.state_dict())
    assert run(late, 1) == [(0, [[7, 7]])]


@pytest.mark.parametrize(
    "given",
    [
        DataLoader(torch.utils.data.TensorDataset(torch.arange(4))),
        DataLoader(Numbers(4)),
        7,
        loader(list(range(4)), world=World()),
    ],
    ids=["a loader", "a loader of a stream", "a number", "ours"],
)
def test_what_is_no_stream(given: Any, told: Told) -> None:
    told(lambda: StreamBatches(given))


def test_a_state_that_the_loader_does_not_take(told: Told) -> None:
    source = StreamBatches(torchdata("iterable", 2))
    run(source, 2)
    late = StreamBatches(torchdata("iterable", 0))
    late.load_state_dict(source.state_dict())
    told(lambda: run(late, 1))


def test_a_position_of_the_other_kind_of_data(told: Told) -> None:
    batches = Batches(list(range(9)), Plan(size=9, global_batch_size=3, micro_batch_size=3))
    source = StreamBatches(Watched())
    told(lambda: batches.load_state_dict(source.state_dict()))
    told(lambda: source.load_state_dict(batches.state_dict()))
    told(lambda: batches.load_state_dict(None))
    told(lambda: source.load_state_dict(None))
