"""`find_batch_size`: micro-batch and recomputation by trial, for a loop of one's own, in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.techniques import find_batch_size
from spottrain.techniques.activation_checkpointing import Policy, Recomputed

DATASET = [torch.full((4,), float(number)) for number in range(64)]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


def built() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*(Block() for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def recomputed(model: torch.nn.Module) -> int:
    return sum(isinstance(vars(module).get("forward"), Recomputed) for module in model.modules())


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """As if eight samples took all memory, or sixteen where all blocks are recomputed."""
    if len(batch) > (16 if recomputed(model) == 4 else 8):
        raise torch.OutOfMemoryError("CUDA out of memory (as a test says it)")
    found: torch.Tensor = model(batch).square().mean()
    return found


def fit(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Any:
    return find_batch_size(model, optimizer, DATASET, loss, global_batch_size=32, world=World(), **more)


def test_the_largest_micro_batch_that_fits_is_found_and_the_trials_leave_no_trace() -> None:
    model, optimizer = built()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    found = fit(model, optimizer)
    assert (found.micro_batch_size, found.accumulation, found.policy) == (8, 4, Policy())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state and all(p.grad is None for p in model.parameters())


def test_the_least_recomputation_that_a_given_size_takes_is_found_and_applied() -> None:
    model, optimizer = built()
    found = fit(model, optimizer, micro_batch_size=16, checkpointing="auto")
    assert (found.micro_batch_size, found.accumulation, found.policy) == (16, 2, Policy(every=1))
    assert recomputed(model) == 4
    model, optimizer = built()
    assert fit(model, optimizer, micro_batch_size=8, checkpointing="auto").policy == Policy()
    assert recomputed(model) == 0


def test_no_size_is_the_whole_share_at_once_and_no_policy_is_none() -> None:
    model, optimizer = built()
    found = fit(model, optimizer, micro_batch_size=None, checkpointing=None)
    assert (found.micro_batch_size, found.accumulation, found.policy) == (32, 1, Policy())


def test_a_policy_of_the_arguments_is_taken_as_it_is() -> None:
    model, optimizer = built()
    policy = Policy(every=2, classes=("Block",))
    assert fit(model, optimizer, checkpointing=policy).policy == policy
    assert recomputed(model) == 2


def test_where_nothing_fits_it_is_one_sentence() -> None:
    model, optimizer = built()
    with pytest.raises(
        ConfigurationError, match="micro-batches of 32 samples do not fit into memory even if all blocks"
    ):
        fit(model, optimizer, micro_batch_size=32, checkpointing="auto")
