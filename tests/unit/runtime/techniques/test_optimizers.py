"""Optimizers by name: torch's own, fused where torch can; words that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from spottrain.techniques import optimizers
from spottrain.techniques.optimizers import make, rebuilt

from tests.support.sentences import Told


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))


def stepped(
    net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, skip: int = 0
) -> list[list[float]]:
    for step in range(skip, skip + steps):
        torch.manual_seed(step)
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [parameter.flatten().tolist() for parameter in net.parameters()]


THEIRS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.2, betas=(0.8, 0.9), fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.2, momentum=0.9, nesterov=True, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.2),
}
OURS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.8, 0.9)},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "adafactor": {},
}


@pytest.mark.parametrize("name", sorted(optimizers.KINDS))
def test_it_trains_as_torchs_own_does_bit_by_bit(name: str) -> None:
    ours, theirs = model(), model()
    made = make(name, ours.parameters(), learning_rate=0.01, weight_decay=0.2, **OURS[name])
    assert stepped(ours, made) == stepped(theirs, THEIRS[name](theirs.parameters()))


@pytest.mark.parametrize(("name", "fused"), [("adamw", True), ("sgd", True), ("adafactor", False)])
def test_fused_kernels_are_taken_where_torch_has_them_and_told(
    name: str, fused: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    net = model()
    before, random = [p.clone() for p in net.parameters()], torch.get_rng_state()
    made = make(name, net.parameters(), learning_rate=0.01)
    assert bool(made.param_groups[0].get("fused")) is fused
    assert f"event=optimizer name={name} fused={fused}" in capsys.readouterr().out
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)), "only tried"
    assert torch.equal(random, torch.get_rng_state())


def test_without_fused_the_reason_is_told(capsys: pytest.CaptureFixture[str], told: Told) -> None:
    odd = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    made = make("adamw", [*model().parameters(), odd], learning_rate=0.01)
    assert made.defaults["fused"] is None
    said = capsys.readouterr().out
    assert "fused=False" in said and "(cpu, torch.complex64)" in said
    told(lambda: make("adamw", [odd], learning_rate=0.01, fused=True))
    plain = make("adamw", model().parameters(), learning_rate=0.01, fused=False)
    assert plain.defaults["fused"] is None


def test_groups_keep_their_own_settings() -> None:
    first, second = model().children()
    groups: list[dict[str, Any]] = [
        {"params": first.parameters()},
        {"params": second.parameters(), "lr": 0.5, "weight_decay": 0.0},
    ]
    made = make("adamw", groups, learning_rate=0.01, weight_decay=0.2)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in made.param_groups] == [
        (0.01, 0.2, 2),
        (0.5, 0.0, 2),
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adam", {}),
        ("adamw", {"momentum": 0.9}),
        ("sgd", {"betas": (0.9, 0.95)}),
        ("adafactor", {"momentum": 0.0}),
        ("sgd", {"nesterov": True}),
        ("adamw", {"weight_decay": -1.0}),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_in_a_sentence(name: str, words: dict[str, Any], told: Told) -> None:
    told(lambda: make(name, model().parameters(), learning_rate=0.1, **words))


def test_no_parameters_are_refused(told: Told) -> None:
    told(lambda: make("sgd", [], learning_rate=0.1))


# --- in place of the script's ---------------------------------------------------------------------------
def scripts(net: torch.nn.Module) -> torch.optim.Optimizer:
    """As people write it: another rate for the head, no decay for biases."""
    weights = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.001}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))


def facts(optimizer: torch.optim.Optimizer, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(group[name] for name in names) for group in optimizer.param_groups]


def test_another_kind_goes_over_the_same_groups_with_the_same_ratio_of_rates() -> None:
    net = model()
    old = scripts(net)
    new = rebuilt(old, "sgd", learning_rate=1.0, momentum=0.9, weight_decay=0.3)
    assert type(new) is torch.optim.SGD
    assert facts(new, "weight_decay", "momentum") == [(0.3, 0.9), (0.0, 0.9)]
    assert [group["lr"] for group in new.param_groups] == pytest.approx([1.0, 0.1])
    for mine, theirs in zip(new.param_groups, old.param_groups, strict=True):
        assert [id(p) for p in mine["params"]] == [id(p) for p in theirs["params"]]


def test_the_same_kind_keeps_what_is_not_asked_for() -> None:
    new = rebuilt(scripts(model()), "adamw", weight_decay=0.3)
    assert facts(new, "lr", "weight_decay", "betas") == [(0.01, 0.3, (0.9, 0.95)), (0.001, 0.0, (0.9, 0.95))]


SCRIPTS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5, maximize=True, foreach=True),
        {"momentum": 0.9, "dampening": 0.5, "maximize": True, "foreach": True, "weight_decay": 0.3},
    ),
    "adamw": (
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, differentiable=True, eps=1e-6),
        {"amsgrad": True, "differentiable": True, "eps": 1e-6, "weight_decay": 0.3},
    ),
    "adafactor": (
        lambda p: torch.optim.Adafactor(p, lr=0.01, eps=(1e-5, 1e-2), d=2.0, beta2_decay=-0.7, maximize=True),
        {"eps": (1e-5, 1e-2), "d": 2.0, "beta2_decay": -0.7, "maximize": True, "weight_decay": 0.3},
    ),
}


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_the_same_kind_keeps_every_option_that_is_not_said_again(name: str) -> None:
    script, expected = SCRIPTS[name]
    net = model()
    groups: list[dict[str, Any]] = [
        {"params": net[0].parameters(), "called": "trunk"},  # type: ignore[index]
        {"params": net[1].parameters(), "maximize": False},  # type: ignore[index]
    ]
    old = script(groups)
    new = rebuilt(old, name, weight_decay=0.3)
    assert {key: new.defaults[key] for key in expected} == expected
    plain = {"params", "weight_decay", "fused"}
    for mine, theirs in zip(new.param_groups, old.param_groups, strict=True):
        assert {key: mine[key] for key in theirs.keys() - plain} == {
            key: theirs[key] for key in theirs.keys() - plain
        }
    assert new.defaults.keys() == old.defaults.keys()
    if name != "adamw":  # a differentiable one steps inside of a graph
        stepped(net, new, 1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"foreach": True}, "foreach is set"),
        ({"differentiable": True}, "differentiable is set"),
        ({"fused": False}, "fused=False is set"),
    ],
)
def test_what_rules_out_fused_kernels_in_the_script_s_does_in_its_place(
    options: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    new = rebuilt(torch.optim.AdamW(model().parameters(), lr=0.01, **options), "adamw", weight_decay=0.3)
    assert not new.defaults["fused"] and why in capsys.readouterr().out
    assert {key: new.defaults[key] for key in options if key != "fused"} == {
        key: value for key, value in options.items() if key != "fused"
    }
    by_group = torch.optim.AdamW([{"params": model().parameters(), **options}], lr=0.01)
    if "fused" not in options:
        assert not rebuilt(by_group, "adamw").defaults["fused"]


def test_of_another_kind_maximize_stays_and_the_rate_must_be_given(told: Told) -> None:
    old = torch.optim.SGD(model().parameters(), lr=0.1, maximize=True)
    assert rebuilt(old, "adamw", learning_rate=0.01).defaults["maximize"] is True
    told(lambda: rebuilt(old, "adamw"))


def test_an_optimizer_with_steps_or_with_a_torch_schedule_is_not_replaced(told: Told) -> None:
    net = model()
    used = scripts(net)
    stepped(net, used, 1)
    told(lambda: rebuilt(used, "sgd", learning_rate=0.1))
    scheduled = scripts(model())
    torch.optim.lr_scheduler.StepLR(scheduled, 3)
    told(lambda: rebuilt(scheduled, "sgd", learning_rate=0.1))


def test_a_state_of_the_rebuilt_one_resumes_bit_for_bit() -> None:
    def built(net: torch.nn.Module) -> torch.optim.Optimizer:
        return rebuilt(scripts(net), "adafactor", learning_rate=0.01)

    whole, first = model(), model()
    expected = stepped(whole, built(whole), 3)
    begun, resumed = built(first), built(first)
    stepped(first, begun, 2)
    resumed.load_state_dict(begun.state_dict())
    assert stepped(first, resumed, 1, skip=2) == expected
