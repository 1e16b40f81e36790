"""Model weights by themselves: what a finished run leaves in `final/`. Used by `keeper` and people."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from spottrain.checkpoint import dtensor
from spottrain.checkpoint.layout import SAFETENSORS, header_bytes
from spottrain.contract import Reason
from spottrain.errors import CheckpointError


def final_weights(state: Mapping[str, Any], *, keep: bool) -> tuple[memoryview, str]:
    """A safetensors file of the model's tensors, and their digest. All ranks must call it. Raises
    CheckpointError.

    One tensor is whole at a time. `keep`: whether this rank wants the file; the others get an empty one.
    `load_weights` reads it, `Module.load_state_dict` takes it. Tied weights are there under each name.
    """
    tensors = {name: state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)}
    _require_storable(tensors)
    header, starts, size = _header(tensors)
    file = torch.empty(len(header) + size if keep else 0, dtype=torch.uint8)
    if keep:
        file[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        flat = _add(total, name, dtensor.whole(tensor))
        if keep:
            start = len(header) + starts[name]
            file[start : start + flat.numel()] = flat
    return file.numpy().data, total.hexdigest()


def _require_storable(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in SAFETENSORS:
            raise CheckpointError(
                f"the model's {name} is of type {tensor.dtype}, which a safetensors file cannot hold; the "
                "weights were not stored. Keep it in a type that it can (complex64, float64), or out of "
                "state_dict()",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        _add(total, name, tensors[name])
    return total.hexdigest()


def _add(total: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes."""
    tensor = tensor.detach().cpu().contiguous()
    total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    total.update(flat.numpy().data if flat.numel() else b"")
    return flat


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The file's header, where each tensor begins after it, and bytes of all of them."""
    entries: dict[str, Any] = {}
    starts: dict[str, int] = {}
    at = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        shape, offsets = list(tensor.shape), [at, at + size]
        entries[name] = {"dtype": SAFETENSORS[tensor.dtype], "shape": shape, "data_offsets": offsets}
        starts[name] = at
        at += size
    return header_bytes(entries), starts, at


def load_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """The weights that a finished run left in `<checkpoint URI>/final/model.safetensors`, by name."""
    return safetensors.torch.load(Path(path).read_bytes())
