"""A step is the same samples for any number of ranks, and a position goes on with another number of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain.data.order import order
from spottrain.data.plan import Plan, Position, Step
from spottrain.data.source import Batches

from tests.support.sentences import Told

splits = st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 3), st.integers(1, 3))
"""Ranks, micro-batch size, accumulation."""


def plans(ranks: int, micro: int, accumulation: int, extra: int, **more: Any) -> list[Plan]:
    """One for each rank."""
    batch = ranks * micro * accumulation
    return [
        Plan(
            size=batch + extra,
            global_batch_size=batch,
            micro_batch_size=micro,
            seed=4,
            rank=rank,
            ranks=ranks,
            **more,
        )
        for rank in range(ranks)
    ]


def together(steps: tuple[Step, ...]) -> list[int]:
    """All ranks' samples of one step, in the step's order, without the fillers."""
    rounds = zip(*(zip(step.micro_batches, step.shares, strict=True) for step in steps), strict=True)
    return [sample for parts in rounds for part, share in parts if share for sample in part]


@settings(deadline=None)
@given(splits, st.integers(0, 40), st.booleans())
def test_the_ranks_together_have_each_sample_of_an_epoch_once(
    split: tuple[int, int, int], extra: int, drop: bool
) -> None:
    of_ranks = plans(*split, extra, drop_last=drop)
    seen: Counter[int] = Counter()
    for steps in islice(
        zip(*(plan.steps(Position()) for plan in of_ranks), strict=True), of_ranks[0].steps_per_epoch
    ):
        seen.update(together(steps))
        assert len({len(step.micro_batches) for step in steps}) == 1, "as many passes on every rank"
        assert all(step.micro_batches for step in steps)
        assert sum(share for step in steps for share in step.shares) == pytest.approx(1)
        assert len({(step.after, step.samples) for step in steps}) == 1
    assert len(seen) == of_ranks[0].samples_per_epoch and set(seen.values()) == {1}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 30), st.integers(0, 6))
def test_a_step_is_the_same_samples_for_any_ranks_and_micro_batches(extra: int, number: int) -> None:
    found = []
    for ranks, micro in ((1, 12), (1, 1), (2, 2), (2, 6), (3, 4), (4, 3), (4, 1), (12, 1)):
        of_ranks = [
            Plan(
                size=12 + extra, global_batch_size=12, micro_batch_size=micro, seed=9, rank=rank, ranks=ranks
            )
            for rank in range(ranks)
        ]
        steps = tuple(next(islice(plan.steps(Position()), number, None)) for plan in of_ranks)
        found.append(together(steps))
    assert all(samples == found[0] for samples in found)


@settings(deadline=None)
@given(splits, st.integers(0, 20))
def test_the_weighted_mean_over_ranks_is_the_mean_over_the_step(
    split: tuple[int, int, int], extra: int
) -> None:
    of_ranks = plans(*split, extra)
    values = torch.rand(of_ranks[0].size, dtype=torch.float64)
    for steps in islice(zip(*(plan.steps(Position()) for plan in of_ranks), strict=True), 4):
        mean = sum(
            float(values[part].mean()) * share
            for step in steps
            for part, share in zip(step.micro_batches, step.shares, strict=True)
        )
        assert mean == pytest.approx(float(values[together(steps)].mean()))


def test_the_micro_batches_of_an_epoch_are_those_that_are_given() -> None:
    for split in ((1, 3, 2), (2, 2, 2), (4, 1, 3), (3, 3, 1)):
        for extra in range(20):
            for plan in plans(*split, extra):
                steps = list(islice(plan.steps(Position()), plan.steps_per_epoch))
                given = sum(len(step.micro_batches) for step in steps)
                assert given == plan.micro_batches(plan.samples_per_epoch)


class Counting:
    """Gives sample numbers, and counts how often it was asked."""

    def __init__(self, size: int) -> None:
        self.size, self.asked = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        self.asked += 1
        return index


def take(of_ranks: list[Batches], count: int) -> Iterator[list[int]]:
    """So many steps with all ranks, each with its samples in order."""
    streams = [iter(batches) for batches in of_ranks]
    for _ in range(count):
        taken = [next(stream) for stream in streams]
        parts = [list(parts) for _, parts in taken]
        yield [
            int(sample)
            for turn in zip(*parts, strict=True)
            for batch, share in turn
            if share
            for sample in batch
        ]
        for batches, (step, _) in zip(of_ranks, taken, strict=True):
            batches.done(step)
    for stream in streams:
        next(stream)  # prefetched, and a step begun: neither is state
        stream.close()


def gang(ranks: int, workers: int, state: dict[str, object] | None = None) -> list[Batches]:
    plan = Plan(size=83, global_batch_size=8, micro_batch_size=2, seed=5, ranks=ranks)
    of_ranks = [Batches(Counting(83), replace(plan, rank=rank), num_workers=workers) for rank in range(ranks)]
    for batches in of_ranks:
        if state is not None:
            batches.load_state_dict(state)
    return of_ranks


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(("workers", "stops"), [(0, 20), (2, 2), (3, 1)])
def test_no_sample_is_repeated_or_skipped_whatever_the_stops_and_the_ranks(workers: int, stops: int) -> None:
    whole = list(take(gang(1, 0), 33))
    draw = random.Random(workers)
    found: list[list[int]] = []
    state: dict[str, object] | None = None
    rest = 33
    for stop in [*sorted(draw.sample(range(1, 33), stops)), 33]:
        of_ranks = gang(draw.choice([1, 2] if workers else [1, 2, 4]), workers, state)
        found += take(of_ranks, stop - (33 - rest))
        rest = 33 - stop
        states = [batches.state_dict() for batches in of_ranks]
        assert all(other == states[0] for other in states), "the same on all ranks"
        state = states[0]
    assert found == whole
    for epoch in range(3):
        seen = Counter(sample for step in whole[epoch * 11 : epoch * 11 + 11] for sample in step)
        assert seen == Counter(range(83))


@pytest.mark.parametrize("shuffle", [True, False])
def test_to_reach_a_position_takes_no_sample_of_those_before(shuffle: bool) -> None:
    for sample in (0, 8 * 5_000, 8 * 120_000):
        dataset = Counting(1_000_000)
        batches = Batches(
            dataset, Plan(size=1_000_000, global_batch_size=8, micro_batch_size=8, shuffle=shuffle)
        )
        batches.load_state_dict(batches.state_dict() | {"epoch": 3, "sample": sample})
        step, parts = next(iter(batches))
        list(parts)
        assert dataset.asked == 8 and step.after == Position(3, sample + 8)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 500), st.integers(0, 2**62))
def test_a_huge_set_is_permuted_piece_by_piece(size: int, seed: int) -> None:
    pieces = order(size, seed, whole=0)
    numbers = torch.cat([pieces(first, min(first + 97, size)) for first in range(0, size, 97)])
    assert sorted(numbers.tolist()) == list(range(size))
    assert torch.equal(pieces(0, size), numbers)


def test_a_huge_set_is_well_mixed_and_needs_no_memory() -> None:
    size = 10**12
    numbers = order(size, 1)(size // 2, size // 2 + 20_000).double() / size
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(numbers.std()) == pytest.approx(12**-0.5, abs=0.01)
    neighbours = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
    assert abs(float(neighbours)) < 0.03
    other = order(size, 2)(size // 2, size // 2 + 20_000).double() / size
    assert abs(float(torch.corrcoef(torch.stack([numbers, other]))[0, 1])) < 0.03


def test_the_order_of_a_checkpoint_stays_what_it_was() -> None:
    """Positions in checkpoints mean nothing in another order: these numbers must never change."""
    assert order(20, 1234)(0, 6).tolist() == [15, 16, 14, 17, 1, 9]
    assert order(10**9, 1234)(0, 4).tolist() == [142538789, 476570966, 159532737, 423232898]


@pytest.mark.parametrize(
    "numbers",
    [
        {"global_batch_size": 10, "ranks": 4},
        {"global_batch_size": 4, "ranks": 4},
        {"global_batch_size": 8, "ranks": 2, "rank": 2},
        {"global_batch_size": 8, "size": 0},
        {"global_batch_size": 8, "size": 7},
        {"global_batch_size": 8, "size": 7, "drop_last": True},  # would be an epoch without a step
        {"global_batch_size": 8, "micro_batch_size": 3},
    ],
    ids=str,
)
def test_bad_sizes_and_ranks(numbers: dict[str, Any], told: Told) -> None:
    told(lambda: Plan(**{"size": 40, "micro_batch_size": 2} | numbers))


def test_ranks_without_samples_of_their_own_repeat_the_first_with_no_weight() -> None:
    of_ranks = [
        Plan(size=11, global_batch_size=8, micro_batch_size=2, shuffle=False, rank=rank, ranks=4)
        for rank in range(4)
    ]
    last = [next(plan.steps(Position(0, 8))) for plan in of_ranks]
    assert [step.micro_batches for step in last] == [[[8, 9]], [[10]], [[8, 9]], [[8, 9]]]
    assert [step.shares for step in last] == [[2 / 3], [1 / 3], [0.0], [0.0]]
