"""When the last finished step of a loop can still be saved by another thread, and what is then saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from spottrain.distributed.world import World
from spottrain.errors import CheckpointError
from spottrain.techniques.ema import EMA
from spottrain.training.finished_step import FinishedSteps
from spottrain.training.position import LoopPosition
from spottrain.training.state_tree import StateTree


class Clock:
    now = 0.0


def position() -> LoopPosition:
    return LoopPosition(None, World(), None)


def tree(model: torch.nn.Module, optimizer: torch.optim.Optimizer, objects: dict[str, Any]) -> StateTree:
    return StateTree(
        "Run",
        model,
        {"main": optimizer},
        {},
        objects,
        left_out=(),
        dataset=None,
        replicas=False,
        regroups=True,
        over=lambda: False,
        incompatible=CheckpointError,
    )


class Loop:
    """A model, an optimizer and what the loop has beside them."""

    def __init__(self) -> None:
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        self.loose = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([*self.model.parameters(), self.loose], lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.average = EMA(self.model, decay=0.5)
        self.clock = Clock()
        objects = {"scheduler": self.scheduler, "average": self.average}
        self.state = tree(self.model, self.optimizer, objects)
        self.steps = FinishedSteps(self.state, clock=lambda: self.clock.now)

    def keep(self) -> None:
        self.steps.keep(position())


def validate(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.model(torch.randn(4, 2))
    loop.model.train()


def moves_on(loop: Loop) -> None:
    validate(loop)
    loop.optimizer.step()
    loop.scheduler.step()
    torch.rand(3)


def test_what_is_kept_is_of_the_step_whatever_the_script_does_then() -> None:
    loop = Loop()
    torch.manual_seed(3)
    loop.keep()
    before = torch.get_rng_state()
    moves_on(loop)
    assert loop.steps.unchanged and loop.steps.last is not None
    kept = loop.steps.last
    assert torch.equal(kept.own_place["random"]["torch"], before) and not torch.equal(
        torch.get_rng_state(), before
    )
    saved = loop.state.shared(kept)
    assert saved["objects"]["scheduler"]["last_epoch"] == 0 and loop.scheduler.last_epoch == 1
    (group,) = saved["optimizers"]["main"]["param_groups"]
    assert group["lr"] == 1.0 and loop.optimizer.param_groups[0]["lr"] == 0.5
    assert group["params"] == loop.state.shared()["optimizers"]["main"]["param_groups"][0]["params"]


def replace_buffer(loop: Loop) -> None:
    loop.model[1].running_mean = torch.ones(3)


def average_in_place(loop: Loop) -> None:
    for mine in loop.model.parameters():
        mine.data.add_(1.0)  # leaves the versions as they are


def point_elsewhere(loop: Loop) -> None:
    loop.model[0].weight.data = loop.model[0].weight.detach().clone()


def add_by_hand(loop: Loop) -> None:
    with torch.no_grad():
        loop.model[0].weight[0, 0].add_(1.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda loop: loop.model(torch.randn(4, 2)),  # the running means
        replace_buffer,
        average_in_place,
        point_elsewhere,
        add_by_hand,
        lambda loop: loop.loose.data.add_(1),
        lambda loop: loop.average.update(1),
        lambda loop: loop.optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]}),
    ],
)
def test_a_state_that_the_script_has_changed_is_not_that_of_the_step(change: Callable[[Loop], Any]) -> None:
    loop = Loop()
    loop.keep()
    assert loop.steps.unchanged
    change(loop)
    assert not loop.steps.unchanged
    loop.clock.now += 2.0
    loop.keep()
    assert loop.steps.unchanged, "the next step is kept again"
    assert loop.steps.unmoved() and loop.steps.saved is not None
    loop.steps.forget()
    assert not loop.steps.unchanged and loop.steps.saved is None, "a save that failed does not come back"


def test_while_the_average_is_in_the_weights_place_nothing_is_saved_from_outside() -> None:
    loop = Loop()
    loop.keep()
    with loop.average.applied():
        assert not loop.steps.unmoved()


def test_buffers_that_were_made_for_inference_do_no_harm() -> None:
    loop = Loop()
    with torch.inference_mode():
        loop.model.register_buffer("cache", torch.zeros(2))
    loop.keep()
    assert loop.steps.unchanged


def test_what_is_too_large_to_be_copied_after_each_step_is_not_kept() -> None:
    class Extra:
        def state_dict(self) -> dict[str, Any]:
            return {"it": torch.zeros(2**19)}

    model = torch.nn.Linear(2, 2)
    steps = FinishedSteps(tree(model, torch.optim.SGD(model.parameters()), {"extra": Extra()}))
    steps.keep(position())
    assert steps.last is None and not steps.unchanged


def test_copies_that_take_long_are_made_so_rarely_that_they_take_two_percent_of_the_time() -> None:
    clock, copies = Clock(), 0

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            nonlocal copies
            copies += 1
            clock.now += 0.1
            return {}

    model = torch.nn.Linear(2, 2)
    state = tree(model, torch.optim.SGD(model.parameters()), {"slow": Slow()})
    steps = FinishedSteps(state, clock=lambda: clock.now)
    for _ in range(1000):
        steps.forget()
        steps.keep(position())
        clock.now += 0.1
    assert 20 <= copies <= 40
