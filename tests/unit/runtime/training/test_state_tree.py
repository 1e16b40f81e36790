"""The one tree of Trainer and Run: that of version 0.3.0 goes on, and a rank reads its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spottrain.checkpoint import plain_state
from spottrain.checkpoint.manifest import StoredTensor
from spottrain.distributed.dtensor import Box
from spottrain.errors import CheckpointError
from spottrain.techniques.ema import EMA
from spottrain.techniques.schedules import Schedule
from spottrain.training.state_tree import AVERAGE, MAIN, SCALER, SCHEDULER, StateTree


def trained(steps: int) -> tuple[Any, torch.optim.Optimizer, Schedule, EMA]:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule, ema = Schedule(optimizer, lambda step: 1 / (1 + step)), EMA(model, decay=0.5)
    for step in range(steps):
        model(torch.ones(2)).sum().backward()
        schedule.before_step(step)
        optimizer.step()
        ema.update(step + 1)
    return model, optimizer, schedule, ema


def tree_of(model: Any, optimizer: Any, schedule: Any, ema: Any) -> StateTree:
    return StateTree(
        "Trainer",
        model,
        {MAIN: optimizer},
        {},
        {SCHEDULER: schedule, SCALER: torch.amp.GradScaler(enabled=False), AVERAGE: ema},
        left_out=(),
        dataset=None,
        replicas=False,
        regroups=False,
        over=lambda: False,
        incompatible=CheckpointError,
    )


def test_a_checkpoint_of_a_trainer_of_0_3_0_goes_on() -> None:
    model, optimizer, _, ema = trained(3)
    saved: dict[str, Any] = {
        "model": {name: each.clone() for name, each in model.state_dict().items()},
        "optimizer": plain_state.optimizer_state(model, optimizer),
        "kind": "SGD",
        "ema": ema.state_dict(),
        "schedule": {"kind": "function", "base": [0.5], "torch": {}},
        "scaler": {},
        "data": {"epoch": 0},
        "progress": {"step": 3},
    }
    fresh = trained(0)
    tree = tree_of(*fresh).load(saved, {}, False)
    assert tree["progress"] == {"step": 3, "data": {"state": {"epoch": 0}}}
    assert torch.equal(fresh[0].weight, model.weight) and fresh[3].updated == 3
    moments = [each.state[next(iter(each.param_groups[0]["params"]))] for each in (optimizer, fresh[1])]
    assert torch.equal(moments[0]["momentum_buffer"], moments[1]["momentum_buffer"])
    with pytest.raises(CheckpointError, match="its optimizer is Adam, and here it is SGD"):
        tree_of(*fresh).load(saved | {"kind": "Adam"}, {}, False)


def test_a_rank_reads_its_part_of_weights_averages_and_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box(start=(0, 0), shape=(1, 1))
    monkeypatch.setattr(plain_state, "boxes", lambda model: {"weight": ((1, 2), box)})
    want = tree_of(*trained(1)).want()

    def part(name: str) -> Box | None:
        return want(StoredTensor(name=name, dtype="float32", shape=(1, 2), pieces=()))

    parts = [
        "model.weight",
        "optimizers.main.state.weight.momentum_buffer",
        "objects.extra.ema.average.weight",
    ]
    old = ["optimizer.state.weight.momentum_buffer", "ema.average.weight"]
    assert [part(name) for name in parts + old] == [box] * 5
    assert part("model.bias") is None and part("objects.other.average.weight") is None
