"""Assigns samples to optimizer steps, micro-batches and ranks.

The order of an epoch depends on the seed and the epoch only. A step has the same samples for any number of
ranks and any micro-batch size. So a position is two integers, the same on all ranks, and seeking is O(1).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from spottrain.contract import Reason
from spottrain.core import log
from spottrain.data.order import Order, mix, order
from spottrain.errors import CheckpointError, ConfigurationError


class Dataset(Protocol):
    """A map-style dataset: `dataset[i]` returns sample i, for i from 0 to `len(dataset)` - 1."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Position(NamedTuple):
    """Where the next optimizer step begins."""

    epoch: int = 0
    sample: int = 0
    """Samples of this epoch already used by all ranks together. For a stream: optimizer steps."""


class Step(NamedTuple):
    """One optimizer step as one rank sees it."""

    epoch: int
    micro_batches: list[list[int]]
    """Indices of this rank's samples; the same number of micro-batches on every rank. Empty for a stream."""
    after: Position
    shares: list[float]
    """Weight of each micro-batch in the step; they add up to 1 over all ranks. 0: a filler, which repeats
    the samples of another micro-batch."""
    samples: int
    """Samples of the step on all ranks together."""


Stream = Generator[tuple[Step, Iterator[tuple[Any, float]]], None, None]
"""Generator of (step, iterator of (batch, share of the step))."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Assigns `size` samples to optimizer steps. The last step of an epoch may be smaller.

    Raises:
        ConfigurationError: the dataset is empty or smaller than a batch, or the sizes do not divide evenly.
    """

    size: int
    global_batch_size: int
    """Samples of one optimizer step over all ranks."""
    micro_batch_size: int
    """Samples of one forward pass on one rank."""
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    """Leave out the last step of an epoch if it is smaller."""
    rank: int = 0
    ranks: int = 1
    sampler: Callable[[int, int], Order] | None = None
    """(seed, epoch) -> order of the epoch, in place of `shuffle`."""

    def __post_init__(self) -> None:
        if self.size == 0:
            raise ConfigurationError("the dataset is empty; give it at least one batch of samples")
        if self.global_batch_size < 1 or self.micro_batch_size < 1:
            raise ConfigurationError(
                f"global batch size {self.global_batch_size}, micro-batch size {self.micro_batch_size}: "
                "both must be at least 1"
            )
        if not 0 <= self.rank < self.ranks:
            raise ConfigurationError(f"rank {self.rank} of {self.ranks}: must be from 0 to {self.ranks - 1}")
        if self.size < self.global_batch_size:
            raise ConfigurationError(
                f"the dataset has {self.size} sample(s), fewer than a global batch of "
                f"{self.global_batch_size}: lower global_batch_size (globalBatchSize in the manifest) "
                "or add data"
            )
        accumulation_of(self.global_batch_size, self.micro_batch_size, self.ranks)

    @property
    def _at_once(self) -> int:
        """Samples of one micro-batch over all ranks."""
        return self.micro_batch_size * self.ranks

    @property
    def accumulation(self) -> int:
        """Micro-batches per rank in a step. The last step of an epoch may have fewer."""
        return self.global_batch_size // self._at_once

    @property
    def samples_per_epoch(self) -> int:
        """Samples used in an epoch by all ranks together."""
        return self.size - self.size % self.global_batch_size if self.drop_last else self.size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return -(-self.samples_per_epoch // self.global_batch_size)

    def micro_batches(self, samples: int) -> int:
        """Returns this rank's micro-batches in the steps that use so many samples, from a step's first on."""
        full, rest = divmod(samples, self.global_batch_size)
        return full * self.accumulation - (-rest // self._at_once)

    def order(self, epoch: int) -> Order:
        """Returns the order of an epoch: a function from (first, end) to sample indices (int64, 1-D).

        Does not touch the global random state.
        """
        if self.sampler is not None:
            return self.sampler(self.seed, epoch)
        if self.shuffle:
            return order(self.size, mix(self.seed, epoch))
        return lambda first, end: torch.arange(first, min(end, self.size))

    def after(self, position: Position) -> Position:
        """Returns where the step ends that begins at `position`."""
        sample = position.sample + self.global_batch_size
        over = sample >= self.samples_per_epoch
        return Position(position.epoch + 1, 0) if over else Position(position.epoch, sample)

    def steps(self, start: Position) -> Iterator[Step]:
        """Yields the steps from `start` on, epoch after epoch, endlessly."""
        position = start
        while True:
            epoch, order = position.epoch, self.order(position.epoch)
            while position.epoch == epoch and position.sample < self.samples_per_epoch:
                end = min(position.sample + self.global_batch_size, self.samples_per_epoch)
                yield (step := self._step(position, order(position.sample, end)))
                position = step.after
            position = Position(epoch + 1, 0)

    def _step(self, position: Position, numbers: torch.Tensor) -> Step:
        """Deals the micro-batches to the ranks in turn, so their content does not depend on the rank.

        A rank without one in the last round repeats the step's first one with share 0. So all ranks do the
        same number of passes, as DDP requires, and the model sees a shape that it knows.
        """
        parts = [part.tolist() for part in torch.split(numbers, self.micro_batch_size)]
        return Step(
            epoch=position.epoch,
            micro_batches=[parts[i] if i < len(parts) else parts[0] for i in self._mine(len(parts))],
            after=self.after(position),
            shares=self.shares(len(numbers)),
            samples=len(numbers),
        )

    def _mine(self, parts: int) -> range:
        rounds = -(-parts // self.ranks)
        return range(self.rank, rounds * self.ranks, self.ranks)

    def shares(self, samples: int) -> list[float]:
        """Returns the shares of this rank's micro-batches in a step of so many samples."""
        size = self.micro_batch_size
        mine = self._mine(-(-samples // size))
        return [max(0, min(size, samples - i * size)) / samples for i in mine]

    def state(self, position: Position) -> dict[str, Any]:
        """Returns the state for a checkpoint: plain values, the same on all ranks."""
        return {**position._asdict(), "seed": self.seed, "size": self.size, "shuffle": self.shuffle}

    def resumed(self, state: dict[str, Any] | None) -> tuple[Plan, Position]:
        """Returns this plan with the seed and the shuffle setting of a `state()`, and its position.

        None: the checkpoint has no position in a map-style dataset. Raises CheckpointError then, and if the
        dataset had another size.
        """
        if state is None or state.get("size") != self.size:
            amount = "a stream instead of a map-style dataset"
            if state is not None and "size" in state:
                amount = f"{state['size']} samples"
            raise CheckpointError(
                f"the checkpoint was made with {amount}, and the dataset now has {self.size}, so its "
                "position in the epoch would select other samples. Use the same data, or another checkpoint "
                "URI",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )
        plan = replace(
            self,
            seed=of_checkpoint("seed", state["seed"], self.seed),
            shuffle=of_checkpoint("shuffle", state.get("shuffle", self.shuffle), self.shuffle),
        )
        return plan, Position(state["epoch"], state["sample"])


def of_checkpoint(setting: str, saved: Any, here: Any) -> Any:
    """Returns the checkpoint's value, by which the order goes on. Logs it where the script has another."""
    if saved != here:
        log.event("override", setting=setting, checkpoint=saved, script=here)
    return saved


def accumulation_of(global_batch_size: int, micro_batch_size: int, ranks: int) -> int:
    """Returns the micro-batches per rank in a step. Raises ConfigurationError if it is no whole number."""
    at_once = micro_batch_size * ranks
    if global_batch_size % at_once:
        of = f"microBatchSize {micro_batch_size}"
        if ranks > 1:
            of = f"{ranks} ranks x {of} = {at_once}"
        below = global_batch_size // at_once * at_once
        nearest = " or ".join(str(size) for size in (below, below + at_once) if size)
        raise ConfigurationError(
            f"globalBatchSize {global_batch_size} is not a multiple of {of}; nearest that fit: {nearest}"
        )
    return global_batch_size // at_once
