"""The memory of a tensor as bytes. `Tensor.numpy` needs NumPy for that, which torch does not bring."""

from __future__ import annotations

import ctypes

import torch


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Returns the writable bytes of a contiguous CPU tensor of dtype uint8, which they keep alive."""
    if not tensor.numel():
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
