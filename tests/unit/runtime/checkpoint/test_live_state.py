"""What a training changes beside weights and optimizer state is there after a resume, whatever it is."""

from __future__ import annotations

import enum
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from spottrain.checkpoint import plain_state
from spottrain.checkpoint.live_state import LiveState

from tests.support.snapshots import pack, same, unpack

EPOCH = 3
STEPS = 3 * EPOCH


class Phase(enum.Enum):
    FIRST = 1.0
    SECOND = 2.0


class Net(torch.nn.Module):
    """What its forward pass does in training is `changes`."""

    def __init__(self, changes: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.drop, self.last = torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(3))
        self.register_buffer("windows", torch.ones(6).unfold(0, 3, 1))
        self.register_buffer("mean", None)
        self.register_buffer("one", torch.ones(2))
        self.register_buffer("two", self.get_buffer("one"))
        self.register_buffer("queue", torch.ones(2))
        self.tau, self.seen, self.hidden = 1.0, Counter({"steps": 0}), torch.zeros(1)
        self.kept: Any = deque([1.0], maxlen=2)
        self.python, self.numpy = random.Random(1), numpy.random.default_rng(1)
        self.torch = torch.Generator().manual_seed(1)
        self.phase = Phase.FIRST
        self.changes = changes

    def forward(self, x: torch.Tensor) -> Any:
        y = self.last(self.drop(self.norm(self.first(x)).relu()))
        if self.training:
            self.changes(self, y.detach())
        seen: list[Any] = [self.scale, self.wide, self.windows, self.one, self.two, self.queue, self.hidden]
        seen += [torch.tensor(float(each)) for each in (*self.kept, self.tau, self.seen["steps"])]
        seen += [torch.tensor(self.phase.value)]
        seen += [self.mean] if self.mean is not None else []
        seen += [self.late] if hasattr(self, "late") else []
        return y * (1 + 0.1 * sum(each.mean() * (n + 1) for n, each in enumerate(seen)))


def late(net: Any, y: torch.Tensor) -> None:
    if not hasattr(net, "late"):
        net.register_buffer("late", torch.zeros(4))
    net.late += y.mean()


def untied(net: Any, y: torch.Tensor) -> None:
    net.one = net.one + y.mean()


def tied(net: Any, y: torch.Tensor) -> None:
    net.queue = net.one
    net.one += y.mean()


def stretched(net: Any, y: torch.Tensor) -> None:
    with torch.no_grad():
        net.wide[:1].add_(y.mean())  # of all elements, for they are one


def count(net: Any, y: torch.Tensor) -> None:
    net.seen["steps"] += 1
    net.kept.append(float(y.mean()))


def emptied(net: Any, y: torch.Tensor) -> None:
    net.mean = None if net.mean is not None else y.mean()


IN_FORWARD: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "a buffer that is not persistent": lambda net, y: net.scale.add_(y.mean()),
    "its data": lambda net, y: net.scale.data.add_(y.mean()),
    "it is replaced": lambda net, y: setattr(net, "scale", net.scale + y.mean()),
    "a buffer that was None": lambda net, y: setattr(net, "mean", y.mean()),
    "a buffer that is None at times": emptied,
    "a buffer that comes later": late,
    "a buffer that grows": lambda net, y: setattr(net, "queue", torch.cat([net.queue, y.mean()[None]])),
    "buffers that were one": untied,
    "buffers that become one": tied,
    "a buffer made by expand": stretched,
    "which is replaced": lambda net, y: setattr(net, "wide", net.wide + y[:3, 0]),
    "a number": lambda net, y: setattr(net, "tau", net.tau * 0.9),
    "containers": count,
    "an enum": lambda net, y: setattr(net, "phase", Phase.SECOND),
    "a tensor": lambda net, y: setattr(net, "hidden", net.hidden * 0.5 + y.mean()),
    "a tensor in place": lambda net, y: net.hidden.add_(y.mean()),
    "Python's generator": lambda net, y: setattr(net, "kept", [net.python.random()]),
    "NumPy's generator": lambda net, y: setattr(net, "kept", [net.numpy.random()]),
    "torch's generator": lambda net, y: setattr(net, "hidden", torch.rand(1, generator=net.torch)),
}


def freeze(net: Any) -> None:
    net.first.requires_grad_(False)


def unfreeze(net: Any, optimizer: Any) -> None:
    net.first.requires_grad_(True)


def unfreeze_group(net: Any, optimizer: Any) -> None:
    net.first.requires_grad_(True)
    optimizer.add_param_group({"params": net.first.parameters(), "lr": 0.3})


def regroup(net: Any, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    first["params"].append(second["params"].pop())
    first["lr"], first["new"] = 0.3, {"a": 1}


def set_layers(net: Any, optimizer: Any) -> None:
    net.drop.p, net.norm.momentum = 0.6, 0.5


def no_momentum(net: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state.pop("momentum_buffer", None)


AT_EPOCH: dict[str, Callable[[Any, Any], object]] = {
    "a frozen layer is trained": unfreeze,
    "in a group of its own": unfreeze_group,
    "a group goes": lambda net, optimizer: optimizer.param_groups.pop(),
    "parameters change their group": regroup,
    "a layer is frozen": lambda net, optimizer: net.last.requires_grad_(False),
    "the mode of a layer": lambda net, optimizer: net.norm.eval(),
    "a setting of a layer": set_layers,
    "a rate": lambda net, optimizer: optimizer.param_groups[0].update(lr=0.5, momentum=0.1),
    "the momentum goes": no_momentum,
}
"""What the loop does when its second epoch begins."""


class Training:
    """Steps of a loop over epochs. `at`: the step at which it resumes."""

    def __init__(self, case: str, at: int = 0) -> None:
        torch.manual_seed(1)
        self.net = Net(IN_FORWARD.get(case, lambda net, y: None))
        if "trained" in case or "own" in case:
            freeze(self.net)
        groups = [list(self.net.last.parameters()), list(self.net.norm.parameters())]
        if "own" not in case:
            groups[0] += self.net.first.parameters()
        self.optimizer = torch.optim.SGD([{"params": each} for each in groups], lr=0.1, momentum=0.9)
        self.at_epoch, self.step = AT_EPOCH.get(case), at
        self.made = plain_state.group_names(self.net, self.optimizer)
        self.live = LiveState({"model": self.net}, {"main": self.optimizer})

    def run(self, until: int) -> Training:
        begins = self.at_epoch in (unfreeze, unfreeze_group)  # what begins an epoch runs again in a resume
        while self.step < until:
            if (begins or self.step % EPOCH == 0) and self.step // EPOCH == 1 and self.at_epoch:
                self.at_epoch(self.net, self.optimizer)
            begins = False
            torch.manual_seed(self.step)
            x = torch.randn(4, 4, dtype=torch.float32)
            (self.net(x).float().square().mean() * (1 + torch.rand(()).float())).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.live.note()
        return self

    def state(self) -> Any:
        return {
            "model": plain_state.model_state(self.net),
            "optimizer": plain_state.optimizer_state(self.net, self.optimizer, self.made),
            "live": self.live.state(),
        }

    def load(self, saved: Any) -> Training:
        self.live.load(saved["live"])
        assert plain_state.load_model(self.net, saved["model"]) is None
        assert plain_state.load_optimizer(self.net, self.optimizer, saved["optimizer"]) is None
        return self


def again(case: str, at: int, saved: Any) -> Training:
    return Training(case, at).load(saved)


@pytest.mark.parametrize("case", [*IN_FORWARD, *AT_EPOCH])
def test_what_training_changes_goes_on_in_an_epoch_and_after_it(case: str) -> None:
    whole = unpack(pack(Training(case).run(STEPS).state()))
    plain = unpack(pack(Training("none").run(STEPS).state()))
    assert not same(whole["model"], plain["model"]), "the case makes a difference"
    for at in (EPOCH + 1, 2 * EPOCH + 1):
        saved = unpack(pack(Training(case).run(at).state()))
        saved = unpack(pack(again(case, at, saved).state()))  # a resume that is stopped at once loses nothing
        found = unpack(pack(again(case, at, saved).run(STEPS).state()))
        assert same(found["model"], whole["model"]) and same(found["optimizer"], whole["optimizer"]), at


def test_what_has_not_changed_is_left_to_the_script() -> None:
    training = Training("none").run(EPOCH)
    assert not training.live.state()
    changed = Training("none")
    changed.net.drop.p, changed.net.tau = 0.5, 3.0
    changed.net.eval()
    LiveState({"model": changed.net}, {}).load(training.live.state())
    assert changed.net.drop.p == 0.5 and changed.net.tau == 3.0 and not changed.net.training


def test_an_evaluation_or_a_dropped_step_after_the_last_one_is_not_in_a_save() -> None:
    training = Training("a number").run(EPOCH)
    before = training.live.state()
    training.net(torch.ones(2, 4))
    training.net.eval()
    training.net.first.requires_grad_(False)
    assert training.live.state() == before


def test_a_module_that_gets_an_object_keeps_its_attributes_for_itself(capsys: Any) -> None:
    def lazy(net: Any, y: torch.Tensor) -> None:
        net.tau, net.cache = 0.5, object()
        net.norm.cache = object()

    training = Training("none")
    training.net.changes = lazy
    training.run(1)
    training.net.norm.eval()
    training.live.note()
    assert set(training.live.state()["attributes"]) == {("model.norm", "training")}
    said = capsys.readouterr().out
    assert said.count("event=advice") == 1 and "model has got a object as its attribute cache" in said


def test_numbers_of_a_dataset_go_on_and_its_samples_are_not_looked_at() -> None:
    class Images:
        def __init__(self) -> None:
            self.size, self.samples, self.mode = 32, [1, 2], "plain"

    images = Images()
    live = LiveState({}, {}, torch.utils.data.Subset(images, [0]))  # type: ignore[arg-type]
    images.size, images.mode = 64, "mixed"
    images.samples.append(3)
    live.note()
    saved = unpack(pack(live.state()))
    other = Images()
    LiveState({}, {}, torch.utils.data.Subset(other, [0])).load(saved)  # type: ignore[arg-type]
    assert (other.size, other.mode, other.samples) == (64, "mixed", [1, 2])
    images.file = object()  # type: ignore[attr-defined]
    assert not live.state(), "a number may say that the file is open"


def test_a_group_that_the_checkpoint_has_is_added_again_once() -> None:
    case = "in a group of its own"
    resumed = again(case, EPOCH + 1, Training(case).run(EPOCH + 1).state())
    add = resumed.optimizer.add_param_group
    add({"params": resumed.net.first.parameters()})
    assert len(resumed.optimizer.param_groups) == 3
    with pytest.raises(ValueError, match="more than one parameter group"):
        add({"params": resumed.net.first.parameters()})


def test_an_optimizer_that_the_script_makes_otherwise_is_refused_as_before() -> None:
    saved = Training("in a group of its own").run(STEPS).state()["optimizer"]
    other = Training("none")
    assert plain_state.load_optimizer(other.net, other.optimizer, saved) == (
        "its optimizer's parameter group 0 differs from the one here in first.bias"
    )
