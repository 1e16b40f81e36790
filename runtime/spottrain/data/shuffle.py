"""Shuffles the samples of an epoch. The order depends on the seed and the epoch only.

Up to `PERMUTED_WHOLE` samples it is `torch.randperm`: 8 bytes per sample and about 0.1 s per million, once
per epoch. Above that, only the requested places are permuted, which needs no memory and no start-up time.
Both algorithms must stay as they are: a checkpoint stores only the position in the order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

PERMUTED_WHOLE: Final = 2**24
"""Samples. The permutation takes 128 MiB and about a second in every rank."""
_STRIDE: Final = 1_000_003
_ROUNDS: Final = 6
_MULTIPLIER: Final = 0x2545F4914F6CDD1D
_MASK: Final = 2**31 - 1

Order = Callable[[int, int], torch.Tensor]
"""(first, end) -> indices of the samples at these places of the epoch, int64."""


def mix(seed: int, number: int) -> int:
    """Derives the seed of part `number` from `seed`. Neighbouring seeds do not share parts."""
    return (seed * _STRIDE + number) % 2**63


def order(size: int, seed: int, *, whole: int = PERMUTED_WHOLE) -> Order:
    """Returns a permutation of `size` indices. Does not touch the global random state."""
    if size > whole:
        return lambda first, end: _scattered(torch.arange(first, end), size, seed)
    permutation = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return lambda first, end: permutation[first:end]


def straight(size: int) -> Order:
    return lambda first, end: torch.arange(first, min(end, size))


def _scattered(places: torch.Tensor, size: int, seed: int) -> torch.Tensor:
    """Permutes 0..4**half-1, the smallest such range that holds `size`; repeats for results >= `size`.

    Each repetition ends, because the cycles of a permutation close. The range is less than four times
    `size`, so at most four rounds are needed on average.
    """
    places = places[places < size]
    half = -(-(size - 1).bit_length() // 2)
    keys = torch.randint(_MASK, (_ROUNDS,), generator=torch.Generator().manual_seed(seed)).tolist()
    found = _feistel(places, half, keys)
    while (outside := found >= size).any():
        found[outside] = _feistel(found[outside], half, keys)
    return found


def _feistel(numbers: torch.Tensor, half: int, keys: list[int]) -> torch.Tensor:
    """A Feistel network: a bijection on numbers of 2 x half bits for any round function."""
    left, right = numbers >> half, numbers & (2**half - 1)
    for key in keys:
        mixed = (right + key) * _MULTIPLIER  # wraps around, the same on every machine
        mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIER
        left, right = right, left ^ ((mixed >> 31) & (2**half - 1))
    joined: torch.Tensor = left * 2**half + right
    return joined
