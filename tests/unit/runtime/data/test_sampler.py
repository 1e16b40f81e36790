"""One's own DataLoader: what was used counts, not what was prefetched."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
from collections import Counter
from itertools import chain, zip_longest
from typing import Any

import numpy
import pytest
import torch
from spottrain.core import device as devices
from spottrain.data import BatchSampler, Loader, ignore_signals, loader
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.techniques.accumulation import parts
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.support.fresh import Fresh
from tests.support.sentences import Told


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
def test_what_workers_have_prefetched_is_not_skipped(workers: int) -> None:
    def make(workers: int = workers) -> tuple[DataLoader[Any], Any]:
        sampler = BatchSampler(Numbers(), batch_size=4, seed=2, world=World(), shuffle=True)
        made = DataLoader(
            Numbers(), batch_sampler=sampler, num_workers=workers, worker_init_fn=ignore_signals
        )
        return made, sampler

    def numbers(taken: list[list[Any]]) -> list[list[int]]:
        return [window[0][:, 0].int().tolist() for window in taken]

    whole = numbers(steps_of(*make(0), 30))
    assert sorted(chain(*whole[:13])) == sorted(chain(*whole[13:26])) == list(range(50))
    for stop, steps in [(12, 14)] if workers else [(1, 30), (12, 30), (13, 30), (20, 30)]:
        made, sampler = make()
        early = numbers(steps_of(made, sampler, stop))
        late, resumed = make()
        resumed.load_state_dict(sampler.state_dict())
        assert early + numbers(steps_of(late, resumed, steps - stop)) == whole[:steps]


@pytest.mark.parametrize(("workers", "later"), [(0, 2), (2, 0)])
def test_a_loader_goes_on_with_the_same_augmentation_whatever_its_workers(workers: int, later: int) -> None:
    def make(count: int) -> Loader:
        return loader(
            Numbers(), batch_size=4, accumulation=2, seed=2, num_workers=count, world=World(), shuffle=True
        )

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
        made = [
            BatchSampler(50, batch_size=12 // count, seed=1, world=world(r, count), shuffle=True)
            for r in range(count)
        ]
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
            batches = BatchSampler(
                size, batch_size=2, accumulation=2, drop_last=drop, world=world(rank, 2), shuffle=True
            )
            given = list(batches)
            assert len(given) == len(batches)
            if drop:
                assert set(Counter(chain(*given)).values()) == {1}


def test_a_loop_that_never_tells_what_it_used_is_stopped_in_its_second_epoch(told: Told) -> None:
    made = loader(Numbers(), batch_size=5, world=World(), shuffle=True)
    assert len(list(made)) == len(made) == 10
    told(lambda: list(made))


def test_the_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    sampler = BatchSampler(10, batch_size=2, shuffle=False)
    assert list(sampler) == [[2, 3], [6, 7], [8, 9]], "the last is a filler, of rank 0's"
    sampler.advance(2)
    assert sampler.shares == [0.0]


def test_set_epoch_of_a_script_that_had_a_distributed_sampler_takes_the_epoch_that_comes_next(
    told: Told,
) -> None:
    sampler = BatchSampler(8, batch_size=4, world=World(), shuffle=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == 2
        sampler.advance(2)
    again = BatchSampler(8, batch_size=4, world=World(), shuffle=True)
    again.load_state_dict(sampler.state_dict())
    again.set_epoch(2)  # the work after epoch 2 may not be done
    assert list(again) == []
    told(lambda: again.set_epoch(0))


def test_other_data_at_the_resume_is_refused(told: Told) -> None:
    sampler = BatchSampler(10, batch_size=2, world=World(), shuffle=True)
    told(
        lambda: BatchSampler(12, batch_size=2, world=World(), shuffle=True).load_state_dict(
            sampler.state_dict()
        )
    )


def test_workers_outlive_a_stop() -> None:
    made = loader(Numbers(), batch_size=2, num_workers=2, world=World(), shuffle=True)
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
from spottrain.distributed.world import World

numbers = torch.utils.data.TensorDataset(torch.arange(100))
sampler = spottrain.data.BatchSampler(numbers, batch_size=2, world=World(), shuffle=True)
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
def test_a_script_ends_although_its_workers_ignore_signals(made: str, persistent: bool, fresh: Fresh) -> None:
    assert fresh.run(SCRIPT.format(loader=made, persistent=persistent)) == "out\n"


def test_without_workers_what_is_about_them_is_left_out_and_told(capfd: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {
        "prefetch_factor": 4,
        "persistent_workers": True,
        "multiprocessing_context": "fork",
        "timeout": 30,
    }
    made = loader(list(range(8)), batch_size=2, world=World(), **options, shuffle=True)
    assert len(list(made)) == 4
    out = capfd.readouterr().out
    assert (
        "prefetch_factor, persistent_workers, multiprocessing_context, timeout cannot act: num_workers is 0"
        in out
    )


def test_auto_has_workers_by_the_cores_and_the_samples_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spottrain.data.dataloader.cores", lambda local_ranks: 3.0)
    options: dict[str, Any] = {"batch_size": 4, "seed": 2, "world": World(), "shuffle": True}
    plain = loader(Numbers(), **options)
    made = loader(Numbers(), num_workers="auto", prefetch_factor=3, timeout=30, **options)
    assert made.num_workers == 2
    for a, b in zip(steps_of(made, made, 8), steps_of(plain, plain, 8), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), "the same samples and augmentation"


def test_another_word_for_the_workers_is_refused(told: Told) -> None:
    told(lambda: loader(Numbers(), num_workers="many", world=World(), shuffle=True))  # type: ignore[arg-type]


# --- accumulation -------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_misses_the_smaller_last_step_of_an_epoch_is_told_so(workers: int, told: Told) -> None:
    made = loader(Numbers(18), batch_size=4, accumulation=2, world=World(), num_workers=workers, shuffle=True)
    taken = 0
    with pytest.raises(ConfigurationError) as refused:
        while True:
            for _ in made:
                taken += 1
                if taken % 2 == 0:
                    made.advance()
    told(refused)
    assert taken == 5, "it is said before a sample comes twice"


def test_a_pass_that_was_left_before_its_end_goes_on() -> None:
    made = loader(Numbers(18), batch_size=4, world=World(), num_workers=2, shuffle=True)
    given = []
    for count in (1, 2, 2):
        for batch in made:
            given += [int(sample) for sample in batch[:, 0]]
            made.advance()
            count -= 1
            if not count:
                break
    assert sorted(given) == list(range(18))


def test_parts_of_a_loader_advance_over_every_step_of_every_epoch() -> None:
    made = loader(Numbers(18), batch_size=4, accumulation=2, world=World(), shuffle=True)
    for _ in range(3):
        for part in parts(made, 2, count=len):
            if part.last:
                made.advance()
    assert made.position == (2, 18), "the end of the third, until the fourth begins"


# --- the end of an epoch ------------------------------------------------------------------------------
def epochs_of(made: Any, sampler: Any, count: int) -> list[list[list[int]]]:
    """The samples of so many epochs, or of what is left of the first of them."""
    taken: list[list[list[int]]] = []
    for _ in range(count):
        taken.append([])
        for batch in made:
            taken[-1].append(batch[:, 0].int().tolist())
            sampler.advance()
    return taken


@pytest.mark.parametrize(
    ("kind", "workers", "drop"),
    [
        ("ours", 0, False),
        ("ours", 0, True),
        ("ours", 1, False),
        ("theirs", 0, False),
        ("theirs", 0, True),
        ("theirs", 1, True),
    ],
)
def test_a_position_at_the_end_of_an_epoch_gives_one_empty_pass_and_then_the_next_epoch(
    kind: str, workers: int, drop: bool
) -> None:
    def make(workers: int = 0) -> tuple[Any, Any]:
        more: dict[str, Any] = {"batch_size": 4, "seed": 2, "drop_last": drop, "world": World()}
        if kind == "ours":
            made = loader(Numbers(18), num_workers=workers, **more, shuffle=True)
            return made, made.requests
        sampler = BatchSampler(Numbers(18), **more, shuffle=True)
        options: dict[str, Any] = {"num_workers": workers, "worker_init_fn": ignore_signals}
        return DataLoader(Numbers(18), batch_sampler=sampler, **options), sampler

    made, sampler = make()
    first, second = epochs_of(made, sampler, 2)
    assert sampler.position == (1, 18)
    third, fourth = epochs_of(*make(), 4)[2:]
    again, resumed = make(workers)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.position.epoch == 1
    assert epochs_of(again, resumed, 3) == [[], third, fourth]
    assert resumed.position == (3, 18)
    assert len({str(each) for each in (first, second, third, fourth)}) == 4


def test_the_next_epoch_counts_from_its_first_batch_on_and_not_from_the_call_of_iter() -> None:
    made = loader(Numbers(18), batch_size=6, world=World(), shuffle=True)
    epochs_of(made, made, 1)
    batches = iter(made)
    assert made.position == (0, 18)
    next(batches)
    assert made.position == (1, 0)


def test_a_position_that_is_restored_after_the_call_of_iter_counts() -> None:
    plain = loader(Numbers(18), batch_size=6, seed=3, world=World(), num_workers=2, shuffle=True)
    (first,) = epochs_of(plain, plain, 1)
    state = loader(Numbers(18), batch_size=6, seed=3, world=World(), shuffle=True)
    state.advance()
    made = loader(Numbers(18), batch_size=6, seed=3, world=World(), num_workers=2, shuffle=True)
    batches = iter(made)
    made.load_state_dict(state.state_dict())
    assert [batch[:, 0].int().tolist() for batch in batches] == first[1:]


def test_another_batch_size_at_the_end_of_an_epoch_does_not_open_it_again() -> None:
    state = loader(Numbers(18), batch_size=4, drop_last=True, world=World(), shuffle=True)
    state.advance(4)
    made = loader(Numbers(18), batch_size=6, drop_last=True, world=World(), shuffle=True)
    made.load_state_dict(state.state_dict())
    assert [len(each) for each in epochs_of(made, made, 2)] == [0, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_a_loop_is_gone_on_with_in_its_middle(workers: int) -> None:
    """With workers torch makes two iterators of the sampler and uses the second: no second pass has begun."""
    first = loader(Numbers(), batch_size=16, num_workers=0, shuffle=True)
    wanted = [
        batch[:, 0].tolist() for batch in loader(Numbers(), batch_size=16, num_workers=0, shuffle=True)
    ][2:]
    first.advance(2)
    resumed = loader(Numbers(), batch_size=16, num_workers=workers, shuffle=True)
    resumed.load_state_dict(first.state_dict())
    resumed.requests.epoch_of_loop = 0
    assert [batch[:, 0].tolist() for batch in resumed] == wanted


def test_a_pass_of_another_epoch_than_the_loops_is_refused(told: Told) -> None:
    made = loader(Numbers(18), batch_size=6, world=World(), shuffle=True)
    made.requests.epoch_of_loop = 0
    epochs_of(made, made, 1)
    told(lambda: next(iter(made)))


# --- steps and batches ----------------------------------------------------------------------------------
def taking(made: Any, batches: int, steps: int) -> None:
    stream = iter(made)
    for _ in range(batches):
        next(stream)
    made.advance(steps)


@pytest.mark.parametrize(
    ("accumulation", "batches", "steps"), [(1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 3, 1), (1, 3, 4)]
)
def test_steps_that_do_not_use_the_batches_that_were_taken_are_refused(
    accumulation: int, batches: int, steps: int
) -> None:
    made = loader(Numbers(18), batch_size=6, accumulation=accumulation, world=World(), shuffle=True)
    with pytest.raises(ConfigurationError, match="a resume"):
        taking(made, batches, steps)


@pytest.mark.parametrize(
    ("accumulation", "drop", "batches", "steps"),
    [(1, False, 2, 2), (2, False, 2, 1), (2, False, 5, 3), (2, True, 4, 2)],
)
def test_steps_that_use_the_batches_that_were_taken_are_counted(
    accumulation: int, drop: bool, batches: int, steps: int
) -> None:
    made = loader(Numbers(18), batch_size=4, accumulation=accumulation, drop_last=drop, world=World())
    taking(made, batches, steps)


def test_a_batch_that_is_drawn_ahead_is_taken_for_the_next_step() -> None:
    made = loader(Numbers(18), batch_size=6, world=World(), shuffle=True)
    made.requests.ahead = True
    taking(made, 2, 1)


# --- in place of torch's DataLoader ----------------------------------------------------------------------
def test_it_takes_the_arguments_of_torchs_loader_with_the_same_defaults() -> None:
    def arguments(made: Any) -> dict[str, Any]:
        found = inspect.signature(made).parameters.values()
        return {each.name: (each.kind, each.default) for each in found if each.name != "self"}

    ours, theirs = arguments(loader), arguments(DataLoader.__init__)
    assert theirs.pop("shuffle")[1] is None and ours["shuffle"][1] is False, "None means False"
    theirs.pop("pin_memory_device")  # deprecated; it goes into **options
    assert {name: ours[name] for name in theirs} == theirs
    assert list(ours)[: len(POSITIONAL)] == list(POSITIONAL)


POSITIONAL = list(inspect.signature(DataLoader.__init__).parameters)[1:14]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_without_more_arguments_it_yields_what_torchs_loader_yields(workers: int, drop: bool) -> None:
    data = [torch.tensor([i, i + 1]) for i in range(10)]
    options: dict[str, Any] = {"num_workers": workers, "drop_last": drop, "collate_fn": torch.stack}
    ours = list(loader(data, 4, world=World(), **options))
    theirs = list(DataLoader(data, 4, **options))  # type: ignore[arg-type]
    assert len(ours) == len(theirs) == len(loader(data, 4, world=World(), **options))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "given",
    [
        {"batch_sampler": [[1], [0]]},
        {"generator": torch.Generator()},
        {"batch_size": None},
        {"batch_size": 0},
        {"in_order": False},
    ],
    ids=lambda given: f"{next(iter(given))} {given.get('batch_size', '')}".strip(),
)
def test_what_cannot_be_resumed_bit_for_bit_is_refused(given: dict[str, Any], told: Told) -> None:
    told(lambda: loader(Numbers(), world=World(), **given))


def test_a_stream_is_refused_with_what_takes_it(told: Told) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter([1, 2, 3])

        def __len__(self) -> int:
            return 3

    for stream in (Stream(), iter([1])):
        with pytest.raises(ConfigurationError) as refused:
            loader(stream, world=World())  # type: ignore[arg-type]
        told(refused)


def numbered(worker: int) -> None:
    os.environ["OF_WORKER"] = str(worker)


class Tagged(Numbers):
    """Each sample is the number that `worker_init_fn` has left, and whether SIGTERM is ignored."""

    def __getitem__(self, index: int) -> torch.Tensor:
        ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        return torch.tensor([int(os.environ["OF_WORKER"]), ignored])


def test_a_worker_init_fn_runs_in_each_worker_which_ignores_signals_all_the_same() -> None:
    made = loader(
        Tagged(4), num_workers=2, world=World(), worker_init_fn=numbered, multiprocessing_context="fork"
    )
    for _ in range(2):
        assert [batch[0].tolist() for batch in made] == [[number % 2, 1] for number in range(4)]
        made.advance(4)
        # As a worker that is spawned gets it.
        made.worker_init_fn = pickle.loads(pickle.dumps(made.worker_init_fn))


def test_in_a_gang_the_batch_size_is_that_of_one_rank() -> None:
    first, second = (next(iter(loader(list(range(12)), 3, world=world(rank, 2)))) for rank in range(2))
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [3, 4, 5])


# --- the seed -----------------------------------------------------------------------------------------
def test_the_order_is_by_the_seed_that_was_set_and_a_checkpoints_own_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first(made: Any) -> list[int]:
        return next(iter(made))[:, 0].tolist()  # type: ignore[no-any-return]

    monkeypatch.setattr(devices, "_seeded", None)
    monkeypatch.setattr(devices, "seed_of_script", lambda: None)
    plain = loader(Numbers(), batch_size=9, world=World(), shuffle=True)
    assert first(plain) == first(loader(Numbers(), batch_size=9, seed=0, world=World(), shuffle=True))
    monkeypatch.setattr(devices, "_seeded", 7)
    seeded = loader(Numbers(), batch_size=9, world=World(), shuffle=True)
    assert (
        first(seeded)
        == first(loader(Numbers(), batch_size=9, seed=7, world=World(), shuffle=True))
        != first(plain)
    )
    seeded.load_state_dict(plain.state_dict())
    assert first(seeded) == first(plain)
