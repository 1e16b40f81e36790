"""What `loss_fn`, `metrics` and `loss_weight` may return, and the sentence for anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spottrain.errors import ConfigurationError
from spottrain.training.script_functions import checked_loss, checked_metrics, checked_weight

X = torch.ones(3, requires_grad=True)


def test_one_number_with_a_gradient_is_a_loss_whatever_its_shape() -> None:
    losses = iter((X.mean(), X.mean().reshape(1), X.mean().reshape(1, 1).bfloat16()))
    for _ in range(3):
        loss = checked_loss(lambda model, batch: next(losses))(None, None)
        assert loss.shape == () and loss.requires_grad
    with torch.no_grad():
        assert float(checked_loss(lambda model, batch: X.mean())(None, None)) == 1.0


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "returned None (is a `return` missing?)"),
        (0.5, "returned a float: return a tensor with one number"),
        ((X.mean(), X), "returned a tuple"),
        ({"loss": X.mean()}, "returned a dict"),
        (X, "returned a tensor of shape (3,) (float32): return one number"),
        (torch.tensor(1), "(int64)"),
        (X.detach().mean(), "without a gradient"),
    ],
)
def test_anything_else_is_refused_with_what_to_return(found: Any, says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        checked_loss(lambda model, batch: found)(None, None)
    assert says in str(refused.value) and str(refused.value).startswith("Trainer(loss_fn=...) returned ")


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "returned None"),
        ([1.0], "returned a list"),
        ({"loss": 1.0}, "returned a 'loss', which an evaluation has already"),
        ({"accuracy": X}, "returned for 'accuracy' shape (3,)"),
        ({"accuracy": "high"}, "returned for 'accuracy' a str"),
        ({"accuracy": None}, "returned for 'accuracy' None"),
    ],
)
def test_metrics_are_numbers_by_name(found: Any, says: str) -> None:
    right = checked_metrics(lambda model, batch: {"accuracy": 0.5, "hits": torch.ones(1)})(None, None)
    assert {name: float(value) for name, value in right.items()} == {"accuracy": 0.5, "hits": 1.0}
    with pytest.raises(ConfigurationError) as refused:
        checked_metrics(lambda model, batch: found)(None, None)
    assert says in str(refused.value)


@pytest.mark.parametrize(("found", "says"), [(None, "None"), (X, "a tensor of shape (3,)"), ([1], "a list")])
def test_a_weight_is_a_number(found: Any, says: str) -> None:
    assert checked_weight(lambda batch: torch.tensor(3))(None) == 3.0
    with pytest.raises(ConfigurationError) as refused:
        checked_weight(lambda batch: found)(None)
    assert f"Trainer(loss_weight=...) returned {says}" in str(refused.value)
