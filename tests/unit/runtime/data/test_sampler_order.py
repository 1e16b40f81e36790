"""`spottrain.data.loader(sampler=...)`: the order of torch's samplers and of one's own, over a resume."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy
import pytest
import torch
from spottrain.data import loader
from spottrain.distributed.world import World
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from tests.support.sentences import Told
from tests.unit.runtime.data.test_sampler import Numbers, epochs_of, world


def weighted(**options: Any) -> WeightedRandomSampler:
    return WeightedRandomSampler(range(1, 19), 16, **options)


class Shuffled:
    """Draws with another library, or has a state of its own."""

    def __init__(self, draw: Any, size: int = 16) -> None:
        self.draw, self.size = draw, size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return iter(self.draw())


OWN_DICE = random.Random(1)
SAMPLERS: dict[str, Any] = {
    "weighted": weighted,
    "with a generator": lambda: weighted(generator=torch.Generator().manual_seed(5)),
    "numpy": lambda: Shuffled(lambda: numpy.random.permutation(16).tolist()),
    "python": lambda: Shuffled(lambda: random.sample(range(16), 16)),
    "in order": lambda: Shuffled(lambda: range(16)),
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=list(SAMPLERS))
@pytest.mark.parametrize("stop", [1, 4, 6])
def test_the_order_of_a_sampler_of_ones_own_goes_on_where_it_was(sampler: Any, stop: int) -> None:
    """An epoch has four steps."""

    def make() -> Any:
        return loader(Numbers(18), batch_size=4, sampler=sampler(), world=World())

    plain = make()
    whole = [each for epoch in epochs_of(plain, plain, 3) for each in epoch]
    first = make()
    begun: list[list[int]] = []
    while len(begun) < stop:
        for batch in first:
            begun.append(batch[:, 0].int().tolist())
            first.advance()
            if len(begun) == stop:
                break
    torch.rand(3)
    again = make()
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [each for epoch in epochs_of(again, again, 4) for each in epoch]
    assert (begun + rest)[:12] == whole


def test_the_ranks_share_the_order_of_a_sampler() -> None:
    def samples(rank: int, ranks: int) -> list[list[int]]:
        made = loader(Numbers(18), 4 // ranks, sampler=weighted(), seed=1, world=world(rank, ranks))
        return epochs_of(made, made, 1)[0]

    both = [a + b for a, b in zip(samples(0, 2), samples(1, 2), strict=True)]
    assert both == samples(0, 1)


def test_a_sampler_leaves_the_random_state_and_its_generator_as_they_were() -> None:
    generator = torch.Generator().manual_seed(5)
    before = torch.get_rng_state(), generator.get_state()
    next(iter(loader(Numbers(18), 4, sampler=weighted(generator=generator), world=World())))
    assert torch.equal(before[0], torch.get_rng_state()) and torch.equal(before[1], generator.get_state())


REFUSED: dict[str, Any] = {
    "a state of its own": lambda: Shuffled(lambda: OWN_DICE.sample(range(16), 16)),
    "no length": lambda: iter(range(16)),
    "splits": lambda: DistributedSampler(Numbers(18), num_replicas=1, rank=0),
    "lists": lambda: Shuffled(lambda: [[1, 2]] * 16),
    "floats": lambda: Shuffled(lambda: [0.5] * 16),
    "another length": lambda: Shuffled(lambda: range(15)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_sampler_whose_order_would_be_another_one_is_refused(case: str, told: Told) -> None:
    told(lambda: next(iter(loader(Numbers(18), 4, sampler=REFUSED[case](), world=World()))))


def test_a_sampler_beside_shuffle_is_refused(told: Told) -> None:
    told(lambda: loader(Numbers(18), 4, shuffle=True, sampler=weighted(), world=World()))


def test_other_weights_in_the_middle_of_an_epoch_are_refused(told: Told) -> None:
    weights = torch.ones(18)

    def make() -> Any:
        return loader(Numbers(18), 4, sampler=WeightedRandomSampler(weights.tolist(), 16), world=World())

    first = make()
    next(iter(first))
    first.advance()
    weights[3] = 50.0
    again = make()
    again.load_state_dict(first.state_dict())
    told(lambda: next(iter(again)))
