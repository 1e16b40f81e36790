"""What the accumulation listing of article 002 does, told again in as few lines as show it. Used by
tests/runs/test_listings_windows.py alone.

docs/techniques.md has a row for it. Only the behaviour is the article's, none of the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

Batch = tuple[torch.Tensor, torch.Tensor]


class Training(NamedTuple):
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer


def start_training() -> Training:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1))


def mean_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def samples(count: int) -> Batch:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1)


def micro_batches(of: Batch, sizes: Iterable[int]) -> list[Batch]:
    sizes = list(sizes)
    return list(zip(torch.split(of[0], sizes), torch.split(of[1], sizes), strict=True))


def steps_of_full_windows(it: Training, loader: Iterable[Batch], window: int) -> int:
    """One pass: divides by the window's size, and steps only where a window is full. Answers its steps."""
    steps = 0
    for number, batch in enumerate(loader):
        backward(mean_loss(it.model, batch) / window)
        if (number + 1) % window == 0:
            it.optimizer.step()
            it.optimizer.zero_grad(set_to_none=True)
            steps += 1
    return steps


def step_of_one_batch(it: Training, batch: Batch) -> None:
    backward(mean_loss(it.model, batch))
    it.optimizer.step()
    it.optimizer.zero_grad(set_to_none=True)


def weights(it: Training) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in it.model.parameters()])
