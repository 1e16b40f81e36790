"""A training state of some size, and how figures are told. For bench/checkpoint.py and bench/clients.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from spottrain.checkpoint.plain_state import model_state, optimizer_state


class Training:
    """A model and its optimizer, of about `gib` GiB in all: as many numbers for AdamW twice over."""

    def __init__(self, gib: float) -> None:
        torch.manual_seed(0)
        layers = max(1, round(gib * 2**30 / (12 * 1024 * 1024)))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tree(self) -> dict[str, Any]:
        return {
            "model": model_state(self.model),
            "optimizer": optimizer_state(self.model, self.optimizer),
        }

    def tensors(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for value in self.tree()["optimizer"]["state"].values():
            found += value.values()
        return found + list(self.tree()["model"].values())

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 5),
        "least": round(min(values), 5),
        "greatest": round(max(values), 5),
        "n": len(values),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Of the pairs."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])
