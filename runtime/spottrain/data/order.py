"""The order of the samples of an epoch: it depends on the seed and the epoch only.

A shuffled order of up to `PERMUTED_WHOLE` samples is `torch.randperm`: 8 bytes per sample and about 0.1 s per
million, once per epoch. Above that, only the requested places are permuted, which needs no memory and no
start-up time. Both algorithms must stay as they are: a checkpoint stores only the position in the order.

`SamplerOrder` is the order of a sampler of one's own, such as torch's WeightedRandomSampler, which draws it
from random numbers: here under a seed of its own.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils.data import DistributedSampler

from spottrain.contract import Reason
from spottrain.core import numpy_random
from spottrain.errors import CheckpointError, ConfigurationError

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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds `random`, torch (CPU) and numpy inside the block; restores their random states after it."""
    before = random.getstate(), torch.get_rng_state()
    numpy, numpy_before = sys.modules.get("numpy"), numpy_random.copied()
    random.seed(seed)
    # Not torch.manual_seed: it also seeds CUDA.
    torch.default_generator.manual_seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        numpy_random.restore(numpy_before)


def order(size: int, seed: int, *, whole: int = PERMUTED_WHOLE) -> Order:
    """Returns a permutation of `size` indices. Does not touch the global random state."""
    if size > whole:
        return lambda first, end: _scattered(torch.arange(first, end), size, seed)
    permutation = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return lambda first, end: permutation[first:end]


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


class SamplerOrder:
    """Orders of epochs by `sampler`, which yields the indices of all ranks' samples.

    Args:
        sampler: has a length and yields whole numbers. `set_epoch(epoch)` is called if it has it, and its
            `generator` is seeded, if it has one.

    Raises:
        ConfigurationError: it has no length, or splits the samples among ranks itself.
    """

    def __init__(self, sampler: Any) -> None:
        self._name = type(sampler).__name__
        if not hasattr(sampler, "__len__") or not hasattr(sampler, "__iter__"):
            raise ConfigurationError(
                f"spottrain.data.loader(sampler=...) is a {self._name} without len() or iter(), so its epoch "
                "has no end: give it both, or leave sampler out"
            )
        if isinstance(sampler, DistributedSampler) or hasattr(sampler, "num_replicas"):
            raise ConfigurationError(
                f"spottrain.data.loader(sampler=...) is a {self._name}, which splits the samples among the "
                "ranks, and so does the loader: leave it out; shuffle= and seed= set the order"
            )
        self._sampler = sampler
        self._tried = False
        self._drawn: tuple[int, int] | None = None
        """The last epoch that was drawn, and the checksum of its order."""
        self._saved: tuple[int, int] | None = None
        """The same of the checkpoint."""

    def __len__(self) -> int:
        return len(self._sampler)

    def __call__(self, seed: int, epoch: int) -> Order:
        """Draws the order of an epoch.

        Raises:
            ConfigurationError: the sampler does not draw the same twice, or no whole numbers.
            CheckpointError: the checkpoint's epoch had another order.
        """
        indices = self._draw(seed, epoch)
        if not self._tried and not torch.equal(indices, self._draw(seed, epoch)):
            raise ConfigurationError(
                f"spottrain.data.loader(sampler=...) is a {self._name} that yields another order each time, "
                "from a state that no checkpoint holds, so an epoch cannot be resumed: have it draw from "
                "torch's, Python's or NumPy's global random numbers, from a torch.Generator in its attribute "
                "`generator`, or from what set_epoch(epoch) sets"
            )
        self._tried = True
        self._drawn = epoch, zlib.crc32(indices.numpy().tobytes())
        if self._saved is not None and self._saved[0] == epoch and self._saved != self._drawn:
            raise CheckpointError(
                f"the {self._name} of spottrain.data.loader(sampler=...) now yields another order of epoch "
                f"{epoch} than when the checkpoint was made, so its position would be at other samples: give "
                "it the same data and weights, or use another checkpoint URI",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )
        return lambda first, end: indices[first:end]

    def _draw(self, seed: int, epoch: int) -> torch.Tensor:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        generator = getattr(self._sampler, "generator", None)
        own = generator if isinstance(generator, torch.Generator) else torch.Generator()
        before = own.get_state()
        with seeded(mix(seed, epoch)):
            own.manual_seed(mix(seed, epoch))
            drawn = list(self._sampler)
        own.set_state(before)
        try:
            indices = torch.tensor(drawn, dtype=None if drawn else torch.int64)
        except (TypeError, ValueError, RuntimeError):
            indices = torch.empty(0, 0)
        if indices.dtype is not torch.int64 or indices.dim() != 1 or len(indices) != len(self):
            raise ConfigurationError(
                f"spottrain.data.loader(sampler=...) is a {self._name} of length {len(self)} that yields "
                f"{len(drawn)} values such as {drawn[:1]!r:.60}: it must yield as many whole numbers as its "
                "length, one for each sample"
            )
        return indices

    def state(self) -> list[int] | None:
        """Returns the last epoch that was drawn and the checksum of its order; None before the first."""
        return None if self._drawn is None else list(self._drawn)

    def load(self, saved: Any) -> None:
        """Has the order of the saved epoch compared when it is drawn again."""
        self._saved = None if saved is None else (int(saved[0]), int(saved[1]))
        self._drawn = self._saved
