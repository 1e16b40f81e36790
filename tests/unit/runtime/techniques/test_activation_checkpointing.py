"""Activation checkpointing keeps less and changes nothing else: not names, numbers or random state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from spottrain.techniques.activation_checkpointing import (
    STEPS,
    Recomputed,
    apply,
    blocks,
    remove,
)

from tests.support.savedbytes import saved_bytes
from tests.support.sentences import Told


class Block(torch.nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(width, 4 * width)
        self.drop = torch.nn.Dropout(0.5)
        self.narrow = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        inside: torch.Tensor = self.narrow(self.drop(self.wide(x).relu()))
        return x + scale * inside


class Net(torch.nn.Module):
    def __init__(self, depth: int = 6, width: int = 8) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.layers = torch.nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


def net(**sizes: int) -> Net:
    torch.manual_seed(1)
    return Net(**sizes)


def gradients(model: torch.nn.Module, seed: int = 7) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    model(torch.ones(5, 8)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


# --- the blocks -----------------------------------------------------------------------------------------
def stages() -> torch.nn.Module:
    """Two stages of a network, and a wider block beside them."""
    of = [torch.nn.Sequential(Block(), Block()) for _ in range(2)]
    return torch.nn.ModuleDict({"a": of[0], "b": of[1], "c": torch.nn.Sequential(Block(16), torch.nn.ReLU())})


@pytest.mark.parametrize(
    ("make", "classes", "names"),
    [
        (lambda: net(depth=3), [], ["layers.0", "layers.1", "layers.2"]),
        (stages, [], ["a.0", "a.1", "b.0", "b.1"]),
        (lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), [], []),
        (lambda: net(depth=2), ["Dropout"], ["layers.0.drop", "layers.1.drop"]),
        (lambda: net(depth=2), ["Block", "Dropout"], ["layers.0", "layers.1"]),
    ],
    ids=["repeated", "stages together", "no plain layers", "by class", "none inside another"],
)
def test_which_modules_are_blocks(
    make: Callable[[], torch.nn.Module], classes: list[str], names: list[str]
) -> None:
    assert list(blocks(make(), classes)) == names


def test_an_unknown_class_is_refused_with_those_that_there_are(told: Told) -> None:
    told(lambda: apply(net(), ["Blok"]))


def test_a_model_without_blocks_is_left_alone_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert apply(torch.nn.Linear(2, 2), "all") == ()
    assert "event=advice about=activations" in capsys.readouterr().out


@pytest.mark.parametrize(("wanted", "which"), [("all", "012345"), (2, "024"), (3, "03")])
def test_every_so_many_th_block_is_taken_from_the_first_on(
    wanted: Any, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert apply(net(), wanted) == tuple(f"layers.{number}" for number in which)
    assert f"blocks={len(which)} of=6 by=spottrain" in capsys.readouterr().out


# --- what changes, and what does not --------------------------------------------------------------------
@pytest.mark.parametrize("wanted", ["all", 2, ["Block"], [torch.nn.Dropout]])
def test_names_gradients_and_random_state_are_the_same(wanted: Any) -> None:
    usual, model = net(), net()
    apply(model, wanted)
    assert list(model.state_dict()) == list(usual.state_dict())
    assert [type(module) for module in model.modules()] == [type(module) for module in usual.modules()]
    expected = gradients(usual)
    after = torch.get_rng_state()
    assert same(gradients(model), expected), "dropout draws the same again"
    assert torch.equal(torch.get_rng_state(), after)


def test_the_more_blocks_the_less_is_kept() -> None:
    kept = []
    for policy in STEPS:
        model = net()
        apply(model, policy)
        kept.append(saved_bytes(partial(model, torch.ones(50, 8)), model))
    none, third, second, every = kept
    assert none > third > second > every > 0
    inputs_only = 7 * 50 * 8 * 4
    assert every <= inputs_only + 6 * 5100, "the input of each block, and its random state"


def test_only_with_gradients_a_block_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(depth=2)
    apply(model, "all")
    inside: list[int] = []
    outside: list[int] = []
    model.get_submodule("layers.0.wide").register_forward_hook(lambda *_: inside.append(1))
    model.layers[0].register_forward_hook(lambda *_: outside.append(1))
    gradients(model)
    assert len(inside) == 2, "in the forward pass, and for the backward pass"
    assert len(outside) == 1, "hooks of the block itself run once"
    monkeypatch.setattr("spottrain.techniques.activation_checkpointing.checkpoint", None)
    with torch.no_grad():
        model(torch.ones(1, 8))  # does not even copy the random state
    assert len(inside) == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_recomputes_its_own_blocks(copied: Callable[[Net], Net]) -> None:
    model = net()
    apply(model, "all")
    other = copied(model)
    inside = other.layers[0].forward
    assert isinstance(inside, Recomputed) and inside.block is other.layers[0] is not model.layers[0]
    expected = gradients(net())
    model.zero_grad(set_to_none=True)
    assert same(gradients(other), expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_last_policy_counts_and_none_undoes_it() -> None:
    model = net()
    apply(model, "all")
    apply(model, 3)
    assert [isinstance(layer.forward, Recomputed) for layer in model.layers] == [True, False, False] * 2
    apply(model, "none")
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_somebody_else_put_there_is_kept_and_given_back() -> None:
    model = net(depth=2)
    seen: list[int] = []
    usual = model.layers[0].forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return usual(*args, **kwargs)

    model.layers[0].forward = watched
    apply(model, "all")
    gradients(model)
    assert len(seen) == 2
    remove(model)
    assert model.layers[0].forward is watched


# --- running statistics ---------------------------------------------------------------------------------
class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.norms = torch.nn.Sequential(
            torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(4, momentum=None)
        )
        self.each = torch.nn.InstanceNorm1d(4, track_running_stats=True)
        self.last = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(
            self.each(self.norms(self.first(x)).unsqueeze(-1).expand(-1, -1, 3))[..., 0]
        )
        return found


def normed(policy: Any) -> torch.nn.Sequential:
    torch.manual_seed(1)
    model = torch.nn.Sequential(Normed(), Normed(), Normed())
    apply(model, policy)
    return model


def trained(model: torch.nn.Module, steps: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(8, 4) + 3).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("policy", ["all", 2])
@pytest.mark.parametrize(
    "copied", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_running_statistics_are_updated_once_in_a_step(policy: Any, copied: Callable[[Any], Any]) -> None:
    usual, model = trained(normed("none")), copied(normed(policy))
    kept = dict(model.named_buffers())
    found = trained(model)
    assert found["0.last.num_batches_tracked"] == 5
    for name, value in usual.items():
        assert torch.equal(found[name], value), name
    assert all(kept[name] is buffer for name, buffer in model.named_buffers()), "as DDP holds them"


# --- a model of transformers ----------------------------------------------------------------------------
class Layer(torch.nn.Module):
    gradient_checkpointing = False


class Theirs(torch.nn.Module):
    """As of transformers 5."""

    supports_gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList(Layer() for _ in range(4))
        self.given: list[Any] = []

    def activation_checkpointing_enable(self, options: Any = None) -> None:
        self.given.append(options)
        for layer in self.h:
            layer.gradient_checkpointing = True  # type: ignore[assignment]

    def activation_checkpointing_disable(self) -> None:
        for layer in self.h:
            layer.gradient_checkpointing = False  # type: ignore[assignment]


def test_a_model_with_a_switch_of_its_own_is_switched_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    model = Theirs()
    assert apply(model, "all") == ("h.0", "h.1", "h.2", "h.3")
    assert "by=transformers" in capsys.readouterr().out and model.given == [{"use_reentrant": False}]
    assert not any("forward" in vars(module) for module in model.modules())
    apply(model, 2)
    assert [layer.gradient_checkpointing for layer in model.h] == [True, False, True, False]
    apply(model, "none")
    assert not any(layer.gradient_checkpointing for layer in model.h)


def test_with_batch_norm_or_named_classes_ours_is_used_and_theirs_stays_as_it_was() -> None:
    """The model's own checkpointing would update running statistics twice in a step."""
    model, named, by_script = Theirs(), Theirs(), Theirs()
    model.h.append(torch.nn.BatchNorm1d(2))
    assert len(apply(model, "all")) == 4 and model.given == []
    assert [isinstance(layer.forward, Recomputed) for layer in model.h] == [True] * 4 + [False]
    assert len(apply(named, ["Layer"])) == 4 and named.given == []
    by_script.activation_checkpointing_enable()
    apply(by_script, "none")
    assert all(layer.gradient_checkpointing for layer in by_script.h), "the script switched it on itself"


def test_auto_is_refused_without_a_trial(told: Told) -> None:
    told(lambda: apply(net(), "auto"))
