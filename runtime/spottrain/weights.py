"""Model weights by themselves: what a finished run leaves in `final/`. Used by `trainer` and people."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return total.hexdigest()


def weights_file(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A safetensors file that `load_weights` reads and `Module.load_state_dict` takes as it is.

    Tied weights are written under each of their names.
    """
    return safetensors.torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})


def load_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """The weights that a finished run left in `<checkpoint URI>/final/model.safetensors`, by name."""
    return safetensors.torch.load(Path(path).read_bytes())
