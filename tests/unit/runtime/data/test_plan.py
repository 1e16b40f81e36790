"""Every sample once per epoch, from wherever the run goes on."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spottrain.data.plan import Plan, Position
from spottrain.data.source import Batches

plans = st.builds(
    lambda micro, times, extra, seed, drop: Plan(
        size=micro * times + extra,
        global_batch_size=micro * times,
        micro_batch_size=micro,
        seed=seed,
        drop_last=drop,
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 40),
    st.integers(0, 2**40),
    st.booleans(),
)


@settings(deadline=None)
@given(plans, st.integers(0, 3))
def test_an_epoch_visits_each_sample_once(plan: Plan, epoch: int) -> None:
    steps = list(islice(plan.steps(Position(epoch, 0)), plan.steps_per_epoch))
    seen = Counter(sample for step in steps for part in step.micro_batches for sample in part)
    assert len(seen) == plan.samples_per_epoch and set(seen.values()) == {1}
    assert steps[-1].after == Position(epoch + 1, 0)
    assert all(step.samples == plan.global_batch_size for step in steps[:-1])


@settings(deadline=None)
@given(plans, st.integers(0, 12))
def test_whatever_the_step_of_the_resume_the_rest_is_the_same(plan: Plan, done: int) -> None:
    whole = list(islice(plan.steps(Position()), done + 8))
    position = whole[done - 1].after if done else Position()
    assert list(islice(plan.steps(position), 8)) == whole[done:]


@settings(deadline=None)
@given(plans)
def test_the_order_leaves_the_random_state_alone_and_depends_on_seed_and_epoch(plan: Plan) -> None:
    before = torch.get_rng_state()
    orders = [plan.order(epoch)(0, plan.size) for epoch in (3, 3, 0, 1)]
    assert torch.equal(orders[0], orders[1])
    assert torch.equal(before, torch.get_rng_state())
    if plan.size > 20:
        assert not torch.equal(orders[2], orders[3])


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), float(numpy.random.rand())])


def first(batches: Batches, count: int) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for step, parts in batches:
        found += [batch for batch, _ in parts]
        batches.done(step)
        if len(found) >= count:
            return found
    raise AssertionError("the stream has no end")


def make(workers: int = 0) -> Batches:
    return Batches(
        Augmented(), Plan(size=13, global_batch_size=4, micro_batch_size=2, seed=5), num_workers=workers
    )


def test_random_augmentation_depends_on_the_position_alone() -> None:
    whole = first(make(), 16)
    resumed = make(workers=2)
    early = first(resumed, 6)
    late = make()
    late.load_state_dict(resumed.state_dict())
    both = early + first(late, 10)
    assert all(torch.equal(a, b) for a, b in zip(whole, both, strict=False))
    assert not torch.equal(whole[0], whole[7]), "epochs differ"


def test_fetching_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state(), str(numpy.random.get_state())
    first(make(), 3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == str(numpy.random.get_state())


def test_the_shares_of_a_step_add_up_to_one_though_its_last_part_is_smaller() -> None:
    batches = Batches(Augmented(), Plan(size=13, global_batch_size=8, micro_batch_size=4))
    steps = [[(len(batch), share) for batch, share in parts] for _, parts in islice(batches, 2)]
    assert steps == [[(4, 0.5), (4, 0.5)], [(4, 0.8), (1, 0.2)]]


def masked(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) * (torch.rand(len(samples), 3) > 0.5)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_random_collate_depends_on_the_position_alone(workers: int) -> None:
    def batches() -> Batches:
        plan = Plan(size=13, global_batch_size=4, micro_batch_size=2, seed=5)
        return Batches(Augmented(), plan, num_workers=workers, collate_fn=masked)

    torch.manual_seed(1)
    whole = first(batches(), 12)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    early = batches()
    head = first(early, 6)
    late = batches()
    late.load_state_dict(early.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(whole, head + first(late, 6), strict=False))
    assert torch.equal(before, torch.get_rng_state())


def test_a_resume_with_another_seed_goes_on_in_the_saved_order_and_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    saved = Plan(size=8, global_batch_size=4, micro_batch_size=4, seed=1, shuffle=True)
    state = saved.state(Position(2, 4))
    for here in (saved, Plan(size=8, global_batch_size=4, micro_batch_size=4, seed=2, shuffle=False)):
        plan, position = here.resumed(state)
        assert (plan.seed, plan.shuffle, position) == (1, True, Position(2, 4))
    said = [line.split(" ", 1)[1] for line in capfd.readouterr().out.splitlines()]
    assert said == [
        "event=override setting=seed checkpoint=1 script=2",
        "event=override setting=shuffle checkpoint=True script=False",
    ]
