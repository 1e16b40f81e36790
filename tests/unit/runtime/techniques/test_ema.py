"""The average of the weights: torch's numbers, swapped in and out exactly, resumed bit by bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from spottrain.checkpoint.tree import Flattened, unflatten
from spottrain.techniques.ema import EMA
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.sentences import Told


class Model(torch.nn.Module):
    """With a buffer, tied weights, and one parameter that is not trained."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(4, 4, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(4, dtype=dtype)
        self.last = torch.nn.Linear(4, 4, bias=False, dtype=dtype)
        self.last.weight = self.first.weight
        self.fixed = torch.nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(self.first(x)).relu()) * self.fixed


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, *averages: Any) -> None:
    for step in steps:
        torch.manual_seed(step)
        dtype = next(model.parameters()).dtype
        model(torch.randn(8, 4).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for average in averages:
            average(step)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_without_warm_up_it_is_torchs_averaged_model() -> None:
    model = Model()
    ema = EMA(model, decay=0.9, warm_up=False)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    theirs.update_parameters(model)  # the first of torch's is a copy
    train(model, sgd(model), range(1, 6), ema.update, lambda _: theirs.update_parameters(model))
    other = dict(theirs.module.named_parameters())
    average = ema.state_dict()["average"]
    assert average.keys() == {"first.weight", "first.bias", "norm.weight", "norm.bias"}
    for name, mean in average.items():
        torch.testing.assert_close(mean, other[name].detach(), rtol=0, atol=1e-7)
        assert not torch.equal(mean, dict(model.named_parameters())[name])


def test_the_warm_up_forgets_the_first_weights() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    ema = EMA(model, decay=0.999)
    torch.nn.init.constant_(model.weight, 0.0)
    means = []
    for step in (1, 2, 3):
        ema.update(step)
        means.append(float(ema.state_dict()["average"]["weight"]))
    kept = [(1 + step) / (10 + step) for step in (1, 2, 3)]
    assert means == pytest.approx([kept[0], kept[0] * kept[1], kept[0] * kept[1] * kept[2]])


def test_a_step_that_is_counted_already_changes_nothing() -> None:
    model = Model()
    ema = EMA(model, decay=0.5)
    train(model, sgd(model), range(1, 3), ema.update)
    before = copy.deepcopy(ema.state_dict())
    train(model, sgd(model), range(1, 3))
    ema.update(2)
    ema.update(1)
    assert same(ema.state_dict()["average"], before["average"])


# --- applied --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inside_the_model_has_the_average_and_afterwards_bit_by_bit_what_it_had(dtype: torch.dtype) -> None:
    model = Model(dtype)
    ema = EMA(model, decay=0.9)
    train(model, sgd(model), range(1, 6), ema.update)
    before, average = weights(model), copy.deepcopy(ema.state_dict()["average"])
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert average["first.weight"].dtype == torch.float32
    assert not average.keys() & buffers.keys(), "buffers are not averaged"
    with ema.applied():
        assert same(dict(model.named_buffers()), buffers)
        inside = weights(model)
        assert all(torch.equal(inside[name], mean.to(dtype)) for name, mean in average.items())
        assert model.last.weight is model.first.weight and float(model.fixed) == 1
        assert not same(inside, before)
    assert same(weights(model), before)
    assert same(ema.state_dict()["average"], average)


def test_inside_nothing_is_averaged_or_saved_and_an_error_there_puts_the_weights_back(told: Told) -> None:
    model = Model()
    ema = EMA(model)
    train(model, sgd(model), range(1, 4), ema.update)
    before = weights(model)
    with pytest.raises(ZeroDivisionError), ema.applied():
        for act in (lambda: ema.update(4), ema.state_dict, lambda: ema.applied().__enter__()):
            with pytest.raises(RuntimeError) as refused:
                act()
            told(refused)
        raise ZeroDivisionError
    assert same(weights(model), before)
    ema.update(4)


def test_weights_of_16_bits_are_averaged_where_they_alone_would_stand_still() -> None:
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.constant_(model.weight, 1.0)
    ema = EMA(model, decay=0.999, warm_up=False)
    torch.nn.init.constant_(model.weight, 0.0)
    alone = torch.ones(1, dtype=torch.bfloat16)
    for step in range(1, 101):
        ema.update(step)
        alone.lerp_(torch.zeros(1, dtype=torch.bfloat16), 0.001)
    assert float(alone) == 1.0
    assert float(ema.state_dict()["average"]["weight"]) == pytest.approx(0.999**100, rel=1e-5)


# --- resumed --------------------------------------------------------------------------------------------
def through_a_checkpoint(state: dict[str, Any]) -> Any:
    """As it is stored: a tree of plain values, and tensors."""
    flat = Flattened(state)
    kept = [leaf.tensor.clone() for leaf in flat.leaves]
    return unflatten(flat.plain, lambda number: kept[number])


@pytest.mark.parametrize("cut", [1, 4])
def test_resumed_it_is_bit_by_bit_the_average_of_an_uninterrupted_run(cut: int) -> None:
    whole = Model()
    ema = EMA(whole, decay=0.9)
    train(whole, sgd(whole), range(1, 11), ema.update)

    first = Model()
    begun, optimizer = EMA(first, decay=0.9), sgd(first)
    train(first, optimizer, range(1, cut + 1), begun.update)
    second = Model()
    second.load_state_dict(first.state_dict())
    after = sgd(second)
    after.load_state_dict(optimizer.state_dict())
    resumed = EMA(second, decay=0.9)
    resumed.load_state_dict(through_a_checkpoint(begun.state_dict()))
    train(second, after, range(cut + 1, 11), resumed.update)
    assert same(resumed.state_dict()["average"], ema.state_dict()["average"])
    assert resumed.state_dict()["updated"] == ema.state_dict()["updated"]


def test_names_are_those_of_the_plain_model() -> None:
    model = Model()
    compiled: Any = torch.compile(model)
    assert EMA(compiled).state_dict()["average"].keys() == EMA(model).state_dict()["average"].keys()


# --- refused --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "words"),
    [(Model(), {"decay": 1.0}), (Model(), {"decay": 0.0}), (torch.nn.ReLU(), {})],
    ids=["decay 1", "decay 0", "nothing to train"],
)
def test_what_cannot_be_averaged_is_refused(
    model: torch.nn.Module, words: dict[str, Any], told: Told
) -> None:
    told(lambda: EMA(model, **words))


def test_an_average_of_another_model_is_refused_with_what_differs(told: Told) -> None:
    state = EMA(torch.nn.Linear(4, 4)).state_dict()
    told(lambda: EMA(torch.nn.Linear(4, 4, bias=False)).load_state_dict(state))
    told(lambda: EMA(torch.nn.Linear(4, 2)).load_state_dict(state))
