"""A change of the model or of its optimizers that no resume could bring back is refused at the next save."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from spottrain.checkpoint.model_watch import ModelWatch
from spottrain.errors import ConfigurationError
from torch.nn.utils import parametrizations, prune

from tests.support.sentences import Told


class Loop:
    """A model with a head and a temperature of no module, and what watches them."""

    def __init__(self, *, replicas: bool = False, regroups: bool = True) -> None:
        torch.manual_seed(1)
        self.body, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.model = torch.nn.Sequential(self.body, self.head)
        self.body.bias.requires_grad_(False)
        self.heat = torch.nn.Parameter(torch.ones(()))
        groups: list[dict[str, Any]] = [
            {"params": self.body.parameters()},
            {"params": self.head.parameters()},
        ]
        self.optimizer = torch.optim.SGD([*groups, {"params": [self.heat]}], lr=0.1)
        self.over = False
        self.watch = ModelWatch(
            {"model": self.model},
            {"main": self.optimizer},
            replicas=replicas,
            regroups=regroups,
            over=lambda: self.over,
        )

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """As a loop makes it, and what a save looks at."""
        (self.model(torch.ones(1, 2, dtype=next(self.model.parameters()).dtype)).sum() * self.heat).backward()
        (optimizer or self.optimizer).step()
        self.watch.require_unchanged()


def shared(loop: Loop) -> torch.optim.Optimizer:
    wrapper = torch.optim.SGD([*loop.body.parameters()], lr=0.1)
    wrapper.state = loop.optimizer.state
    return wrapper


def pruned(loop: Loop) -> None:
    prune.l1_unstructured(loop.body, "weight", 0.5)  # type: ignore[no-untyped-call]


def doubled(loop: Loop) -> None:
    loop.model.double()
    loop.heat.data = loop.heat.data.double()


def swapped(loop: Loop) -> None:
    """As an evaluation does that needs what is before the head."""
    loop.model[1] = torch.nn.Identity()
    loop.model(torch.ones(1, 2))
    loop.model[1] = loop.head


REFUSED: dict[str, Callable[[Loop], Any]] = {
    "pruned": pruned,
    "normalized": lambda loop: parametrizations.weight_norm(loop.body),
    "replaced": lambda loop: setattr(loop.model, "1", torch.nn.Linear(2, 1)),
    "tied": lambda loop: setattr(loop.body, "bias", loop.heat),
    "more": lambda loop: loop.model.append(torch.nn.Linear(1, 1)),
    "fewer": lambda loop: loop.model.pop(-1),
    "another dtype": doubled,
    "loose": lambda loop: loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]}),
    "loose goes": lambda loop: loop.optimizer.param_groups.pop(),
    "another optimizer": lambda loop: torch.optim.Adam(loop.model.parameters()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_change_that_a_resume_could_not_make_is_refused(case: str, told: Told) -> None:
    loop = Loop()
    loop.step()
    found = REFUSED[case](loop)
    with pytest.raises(ConfigurationError) as refusal:
        loop.step(found if isinstance(found, torch.optim.Optimizer) else None)
    told(refusal)


def test_a_layer_that_ddp_does_not_know_is_refused_when_it_is_trained(told: Told) -> None:
    loop = Loop(replicas=True)
    loop.step()
    loop.body.bias.requires_grad_(True)
    with pytest.raises(ConfigurationError) as refusal:
        loop.step()
    told(refusal)


def test_groups_that_a_resume_does_not_rebuild_are_refused(told: Told) -> None:
    loop = Loop(regroups=False)
    loop.step()
    loop.optimizer.param_groups.pop(0)
    with pytest.raises(ConfigurationError) as refusal:
        loop.step()
    told(refusal)


ALLOWED: dict[str, Callable[[Loop], Any]] = {
    "a layer is trained": lambda loop: loop.body.bias.requires_grad_(True),
    "a layer is replaced for a while": swapped,
    "a layer is compiled": lambda loop: setattr(loop.model, "0", torch.compile(loop.body, backend="eager")),
    "a group goes": lambda loop: loop.optimizer.param_groups.pop(0),
    "an optimizer of something else": lambda loop: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
    "a wrapper of an optimizer": shared,
    "a buffer": lambda loop: loop.body.register_buffer("seen", torch.zeros(1)),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_can_be_saved_may_change(case: str) -> None:
    loop = Loop()
    loop.step()
    found = ALLOWED[case](loop)
    loop.step(found if isinstance(found, torch.optim.Optimizer) else None)


def test_a_model_without_shapes_is_refused(told: Told) -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(2))
    told(lambda: ModelWatch({"model": model}, {}, replicas=False, regroups=True, over=bool))


def test_after_the_training_the_model_is_the_script_s() -> None:
    loop = Loop()
    loop.over = True
    pruned(loop)
    loop.step(torch.optim.Adam(loop.model.parameters()))


def test_a_loop_that_is_gone_watches_nothing() -> None:
    loop = Loop()
    model = loop.model
    del loop
    gc.collect()
    model.append(torch.nn.Linear(1, 1))
    torch.optim.SGD(model.parameters()).step()
