"""The order of a sampler of one's own, such as torch's WeightedRandomSampler, made repeatable.

A sampler draws the order of an epoch from random numbers. Here it draws it under a seed of its own, which
depends on the loader's seed and the epoch only. So an epoch that is resumed has the order that it began with.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from spottrain.contract import Reason
from spottrain.data.dataloader import seeded
from spottrain.data.shuffle import Order, mix
from spottrain.errors import CheckpointError, ConfigurationError


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
