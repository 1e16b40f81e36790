"""The learning rate over the steps: the usual shapes, a person's own function, a torch scheduler; resumed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from spottrain.techniques.schedules import FLOOR, Schedule, lr_schedule, shape
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR

from tests.support.sentences import Told


def optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (0.1,)]
    return torch.optim.SGD(groups, lr=1.0)


def scheduled(name: str, *rates: float) -> Schedule:
    own = optimizer(*rates)
    match name:
        case "function":
            return Schedule(own, lambda step: 0.5)
        case "StepLR":
            return Schedule(own, StepLR(own, 3))
        case "ExponentialLR":
            return Schedule(own, ExponentialLR(own, 0.9))
    return Schedule(own, shape(name, warmup_steps=2, total_steps=10))


KINDS = ("constant", "cosine", "function", "StepLR", "ExponentialLR")


@pytest.mark.parametrize(("name", "last"), [("constant", 1.0), ("cosine", FLOOR)])
def test_the_usual_ones_rise_and_then_stay_or_fall(name: str, last: float) -> None:
    it = shape(name, warmup_steps=2, total_steps=10)
    assert [it(0), it(1), it(2)] == [0.5, 1.0, 1.0]
    assert it(10) == it(11) == pytest.approx(last)


# --- a function of the script -------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "0.5", [1.0], 1j, 10**400, torch.ones(2)])
def test_a_function_that_returns_no_finite_number_is_named_with_the_step(bad: Any, told: Told) -> None:
    own = optimizer(0.1)
    it = Schedule(own, lambda step: 0.5 if step < 7 else bad)
    it.before_step(6)
    told(lambda: it.before_step(7))
    assert it.rate == 0.05, "the rate is left as it was"


@pytest.mark.parametrize("good", [1, True, 0, torch.tensor(0.5)])
def test_whatever_is_a_number_is_taken(good: Any) -> None:
    it = Schedule(optimizer(0.1), lambda step: good)
    it.before_step(0)
    assert it.rate == pytest.approx(0.1 * float(good))


def test_what_is_no_schedule_is_refused_before_the_first_step(told: Told) -> None:
    bad: Any = 5
    told(lambda: Schedule(optimizer(), bad))
    told(lambda: shape("cosine", warmup_steps=5, total_steps=5))


# --- resumed ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("script", KINDS)
def test_only_a_schedule_of_the_same_kind_goes_on(saved: str, script: str, told: Told) -> None:
    state = scheduled(saved).state_dict()
    if saved == script:
        scheduled(script).load_state_dict(state)
        return
    told(lambda: scheduled(script).load_state_dict(state))


@pytest.mark.parametrize("name", KINDS)
def test_the_same_schedule_and_rate_is_no_override_also_of_a_state_without_kind(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = scheduled(name, 0.3).state_dict()
    scheduled(name, 0.3).load_state_dict(state)
    del state["kind"]  # as older ones
    scheduled(name, 0.3).load_state_dict(state)
    assert capsys.readouterr().out == ""


def test_a_longer_training_with_the_same_schedule_goes_on() -> None:
    state = Schedule(optimizer(), shape("cosine", warmup_steps=2, total_steps=10)).state_dict()
    longer = shape("cosine", warmup_steps=0, total_steps=20)
    it = Schedule(optimizer(0.1), longer)
    it.load_state_dict(state)
    it.before_step(12)
    assert it.rate == pytest.approx(0.1 * longer(12))


def test_a_rate_changed_in_the_script_is_overridden_and_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    state = scheduled("constant", 0.0003, 0.1).state_dict()
    it = scheduled("constant", 0.0001, 0.1)
    it.load_state_dict(state)
    it.load_state_dict(state)
    told = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert told == ["event=override setting=lr holds=checkpoint checkpoint=0.0003,0.1 now=0.0001,0.1"]
    it.before_step(5)
    assert it.rate == 0.0003


def test_a_torch_scheduler_goes_on_with_its_own_state() -> None:
    first = optimizer(0.1)
    before = Schedule(first, StepLR(first, 3))
    for _ in range(4):
        first.step()
        before.after_step()
    own = optimizer(0.1)
    kind: LRScheduler = StepLR(own, 3)
    Schedule(own, kind).load_state_dict(before.state_dict())
    assert kind.last_epoch == 4


@pytest.mark.parametrize("name", ["cosine", "constant"])
def test_a_loop_of_ones_own_has_the_rates_of_trainer(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    made = lr_schedule(optimizer, name, warmup_steps=3, total_steps=10)
    wanted = shape(name, warmup_steps=3, total_steps=10)
    for step in range(10):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * wanted(step))
        optimizer.step()
        made.step()
    again = lr_schedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5), name, total_steps=10)
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert again.last_epoch == 10, "its state is plain values, as a checkpoint has them"


def test_a_schedule_that_wants_a_measure_is_refused(told: Told) -> None:
    own = optimizer()
    told(lambda: Schedule(own, torch.optim.lr_scheduler.ReduceLROnPlateau(own)))
