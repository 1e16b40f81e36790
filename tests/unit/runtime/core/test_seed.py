"""Which seed a training has whose script has called spottrain.seed, torch.manual_seed, or neither."""

from __future__ import annotations

import random

import pytest
import torch
from spottrain.contract import Env
from spottrain.core import device as devices
from spottrain.data import BatchSampler
from spottrain.distributed.world import World


def test_the_seed_that_a_script_has_given_torch_is_the_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(Env.TRAINING, raising=False)
    with torch.random.fork_rng():
        torch.manual_seed(123)
        random.seed(9)
        drawn = random.getstate()
        monkeypatch.setattr(devices, "_seeded", None)
        assert BatchSampler(8, shuffle=True).plan.seed == 123
        assert BatchSampler(8, shuffle=True, world=World(rank=1, size=2)).plan.seed == 0
        assert devices.seed_in_use() == torch.initial_seed() == 123 and random.getstate() == drawn
        monkeypatch.setattr(devices, "_seeded", None)
        monkeypatch.setenv(Env.TRAINING, '{"seed": 7}')
        assert devices.seed_in_use() == torch.initial_seed() == 7, "the manifest's"
        monkeypatch.setattr(devices, "_seeded", None)
        monkeypatch.delenv(Env.TRAINING)
        torch.manual_seed(2**40)  # as torch's own
        assert devices.seed_in_use() == torch.initial_seed() == 0
