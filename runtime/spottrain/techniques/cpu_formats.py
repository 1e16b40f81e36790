"""How much longer a CPU computes in bf16 or fp16 than in fp32, measured.

The CPU's flags do not tell it: torch has fast kernels for some CPUs and formats, for the others plain loops.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Final

import torch
from torch.nn.functional import linear

FORMATS: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
SLOWER: Final = 1.5
"""From this ratio on a format counts as slow. Measurements of one machine differ by less."""
SIZE: Final = 256
"""Rows and columns of the matrices: 2 ms in fp32, tens of ms in a format without fast kernels."""
MAX_SECONDS: Final = 0.06
"""Seconds after which a format is not tried again."""


@cache
def slowdown(name: str) -> float:
    """Returns how many times as long as in fp32 a matrix product with its gradients takes in this format.

    It counts processor time on one core, so that other processes do not change the result. With more cores
    the true ratio is as large or larger.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _step(torch.float32, 1)  # torch's own preparations, for any format
        return _seconds(FORMATS[name]) / _seconds(torch.float32)
    finally:
        torch.set_num_threads(threads)


def _seconds(dtype: torch.dtype) -> float:
    """Returns the shortest time of up to four."""
    found: list[float] = []
    while len(found) < 4 and sum(found) < MAX_SECONDS:
        found.append(_step(dtype, SIZE))
    return min(found)


def _step(dtype: torch.dtype, size: int) -> float:
    """Returns the processor seconds of one product with its gradients."""
    one, other = (torch.ones(size, size, dtype=dtype, requires_grad=True) for _ in range(2))
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        began = time.thread_time()
        linear(one, other).sum().backward()  # type: ignore[no-untyped-call]
        return time.thread_time() - began


def slow_words(name: str, ratio: float, remedy: str) -> str | None:
    """Returns the sentence for a format that is so many times slower than fp32; None if it is not slow."""
    if ratio < SLOWER:
        return None
    shown = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
    return (
        f"matrix products in {name} take {shown} times as long as in fp32 on this CPU (measured on one "
        f"core): {remedy}"
    )
