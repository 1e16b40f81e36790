"""A training that is slow for a known reason is told that reason. Each is real, in processes of its own."""

from __future__ import annotations

import pytest
import torch
from spottrain.diagnosis.compiling import compilations
from spottrain.diagnosis.flops import counted
from spottrain.diagnosis.verdict import Name

from tests.support.hooked import gradients
from tests.support.slowtrainings import ALONE, TOGETHER, play


def test_there_is_a_training_for_every_verdict() -> None:
    assert {*ALONE, *TOGETHER} == set(Name)


@pytest.mark.parametrize("name", Name)
def test_a_slow_training_is_told_why(name: Name) -> None:
    verdict, facts = play(name, seed=7)
    assert verdict is not None and verdict.name is name, f"{verdict} of {facts}"
    assert sum(facts.shares.shares.values()) == pytest.approx(1)
    assert facts.shares.unread == 0


def test_a_timed_hook_changes_no_bit_of_ddps_gradients_and_sees_the_exchange() -> None:
    """Three ranks: to divide by three, and to multiply by its reciprocal, is not the same."""
    plain, hooked, seconds = gradients(3)
    assert torch.equal(plain, hooked)
    assert seconds.communication > 0 and seconds.compute > 0


def test_a_compiled_model_is_counted_uncompiled_and_stays_compiled() -> None:
    model = torch.nn.Linear(8, 8)
    compiled = torch.compile(model, backend="eager")
    batch = torch.randn(4, 8)
    before = compilations()
    compiled(batch)
    after = compilations()
    assert after.since(before).count == 1 and after.since(before).seconds > 0
    with counted() as work:
        compiled(batch)
    assert work.flops == 2 * 4 * 8 * 8
    compiled(batch)
    assert compilations() == after
