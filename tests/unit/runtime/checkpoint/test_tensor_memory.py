"""The bytes of a tensor without NumPy."""

from __future__ import annotations

import gc

import torch
from spottrain.checkpoint.tensor_memory import byte_view


def test_what_is_written_to_the_view_is_in_the_tensor_and_the_other_way_round() -> None:
    tensor = torch.arange(8, dtype=torch.uint8)
    view = byte_view(tensor[2:6])
    assert view.tobytes() == bytes([2, 3, 4, 5]) and view.format == "B" and view[0] == 2
    view[1:3] = b"xy"
    tensor[5] = 9
    assert tensor.tolist() == [0, 1, 2, ord("x"), ord("y"), 9, 6, 7] and view[3] == 9


def test_the_view_keeps_the_memory() -> None:
    view = byte_view(torch.full((10_000_000,), 7, dtype=torch.uint8))
    gc.collect()
    others = [torch.zeros(10_000_000, dtype=torch.uint8) for _ in range(3)]
    assert view[9_999_999] == 7 and set(view[:1000]) == {7} and len(others) == 3


def test_an_empty_tensor_has_no_bytes() -> None:
    assert byte_view(torch.empty(0, dtype=torch.uint8)).tobytes() == b""
