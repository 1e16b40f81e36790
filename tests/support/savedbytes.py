"""What a forward pass keeps for the backward pass: the memory that activation checkpointing saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def saved_bytes(forward: Callable[[], Any], model: torch.nn.Module) -> int:
    """Measures what a forward pass keeps for the backward pass, on any device.

    Each storage counts once. A checkpointed block keeps its input.

    Args:
        forward: runs a forward pass only: a backward pass would add what it recomputes.
        model: its weights and buffers do not count.

    Returns:
        Bytes.
    """
    own = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()  # kept alive: a freed address could be reused
    del result
    return sum(kept.values())
