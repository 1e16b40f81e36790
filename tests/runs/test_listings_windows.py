"""The defects of article 002's accumulation listing, and the same scenes with ours: see docs/techniques.md.

`test_defect_...` shows what goes wrong (tests/support/listings_windows.py), `test_ours_...` that it does not
here.
"""

from __future__ import annotations

import torch
from spottrain.distributed.world import World
from spottrain.techniques import accumulation

from tests.support.listings_windows import (
    Batch,
    Training,
    backward,
    mean_loss,
    micro_batches,
    samples,
    start_training,
    step_of_one_batch,
    steps_of_full_windows,
    weights,
)

WINDOW = 4
EVEN = micro_batches(samples(12), [2] * 6)
"""Six micro-batches: one full window, and two that are left."""
UNEVEN = micro_batches(samples(12), [4, 4, 3, 1])
"""One window, whose last micro-batch is what is left of the data."""


def pass_of_ours(it: Training, loader: list[Batch]) -> int:
    steps = 0
    for part in accumulation.parts(loader, WINDOW, count=lambda batch: len(batch[0]), world=World()):
        with part.sync:
            backward(mean_loss(it.model, part.batch) * part.weight)
        if part.last:
            it.optimizer.step()
            it.optimizer.zero_grad(set_to_none=True)
            steps += 1
    return steps


def joined(batches: list[Batch]) -> Batch:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


# --- the last window ------------------------------------------------------------------------------------
def test_defect_what_is_left_of_the_last_window_is_not_trained_on() -> None:
    it, as_if = start_training(), start_training()
    assert steps_of_full_windows(it, EVEN, WINDOW) == 1
    steps_of_full_windows(as_if, EVEN[:WINDOW], WINDOW)
    assert torch.equal(weights(it), weights(as_if)), "a third of the epoch did nothing"


def test_defect_and_it_is_added_to_the_first_step_of_the_next_epoch() -> None:
    it, clean = start_training(), start_training()
    steps_of_full_windows(it, EVEN, WINDOW)
    left = [p.grad for p in it.model.parameters()]
    assert all(gradient is not None for gradient in left)
    steps_of_full_windows(clean, EVEN, WINDOW)
    clean.optimizer.zero_grad(set_to_none=True)
    for each in (it, clean):
        steps_of_full_windows(each, EVEN, WINDOW)
    assert not torch.allclose(weights(it), weights(clean), rtol=1e-3)


def test_ours_the_last_window_is_a_step_and_nothing_is_left() -> None:
    it, whole = start_training(), start_training()
    assert pass_of_ours(it, EVEN) == 2
    for window in (EVEN[:WINDOW], EVEN[WINDOW:]):
        step_of_one_batch(whole, joined(window))
    torch.testing.assert_close(weights(it), weights(whole), rtol=0, atol=1e-14)
    assert all(p.grad is None for p in it.model.parameters())


# --- divided by the number of micro-batches -------------------------------------------------------------
def test_defect_a_smaller_micro_batch_weighs_as_much_as_a_large_one() -> None:
    it, whole = start_training(), start_training()
    steps_of_full_windows(it, UNEVEN, WINDOW)
    step_of_one_batch(whole, joined(UNEVEN))
    assert not torch.allclose(weights(it), weights(whole), rtol=1e-3)


def test_ours_each_sample_weighs_the_same() -> None:
    it, whole = start_training(), start_training()
    assert pass_of_ours(it, UNEVEN) == 1
    step_of_one_batch(whole, joined(UNEVEN))
    torch.testing.assert_close(weights(it), weights(whole), rtol=0, atol=1e-14)
