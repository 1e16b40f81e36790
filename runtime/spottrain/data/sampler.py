"""For people who keep their own DataLoader: samplers that count what was used, not what was prefetched.

    sampler = spottrain.data.BatchSampler(dataset, batch_size=32)
    loader = DataLoader(dataset, batch_sampler=sampler, worker_init_fn=spottrain.data.ignore_signals)

or, with both set and randomness that depends on the position alone:

    loader = spottrain.data.loader(dataset, batch_size=32)

`guard` calls `advance()` at each optimizer step, and keeps `state_dict()`. A pass over the loader is what is
left of an epoch, so a loop over epochs goes on in the middle of one by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from spottrain.data.fetch import (
    Collate,
    Repeatable,
    Request,
    as_it_is,
    end_at_exit,
    ignore_signals,
    request,
    signals_held,
)
from spottrain.data.plan import Dataset, Plan, Position, Step
from spottrain.errors import ConfigurationError
from spottrain.ranks.world import World


class _Cursor:
    """Position in a plan. The same on all ranks, so any number of ranks may go on from it.

    data: the dataset, or its length.
    batch_size: samples that one rank gets at once (the DataLoader's).
    accumulation: batches of one rank in an optimizer step.
    drop_last: leave out an epoch's last step where it would be smaller. Without it, ranks that are left
        without a batch in that step are given its first one once more: multiply the loss by `shares`.
    world: rank and number of ranks; None: from the environment.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        batch_size: int = 1,
        accumulation: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        world: World | None = None,
    ) -> None:
        world = World.from_env(os.environ) if world is None else world
        self.plan = Plan(
            size=data if isinstance(data, int) else len(data),
            batch_size=batch_size * accumulation * world.size,
            micro_batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=world.rank,
            ranks=world.size,
        )
        self.position = Position()
        end_at_exit()  # the workers of a DataLoader that was given `ignore_signals`
        self._unused: Position | None = None
        """Where the last pass began that was given out whole."""

    def advance(self, steps: int = 1) -> None:
        """So many optimizer steps were done with what was given."""
        self.position = self.plan.after(self.position, steps)

    @property
    def shares(self) -> list[float]:
        """Weight of each batch of this rank in the step that begins at the position; over all ranks 1."""
        return self.plan.shares(self.position)

    def state_dict(self) -> dict[str, Any]:
        return self.plan.state(self.position)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Takes effect at the next pass. Raises CheckpointError."""
        self.plan, self.position = self.plan.resumed(state)
        self._unused = None

    def steps(self) -> Iterator[Step]:
        """From the position to the end of its epoch."""
        start = self.position
        if start == self._unused:
            raise ConfigurationError(
                f"epoch {start.epoch} was given out from sample {start.sample} to its end, and nobody called "
                "advance(), so it would come again: call it after each step (spottrain.Guard does); to only "
                "look at the data, make another loader"
            )
        for step in self.plan.steps(start):
            if step.epoch != start.epoch:
                break
            yield step
            if step.after.epoch != start.epoch:
                self._unused = start


class BatchSampler(_Cursor, torch.utils.data.Sampler[list[int]]):
    """This rank's batches, for `DataLoader(batch_sampler=...)`."""

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps():
            yield from step.micro_batches

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.plan.micro_batches_per_epoch


class Sampler(_Cursor, torch.utils.data.Sampler[int]):
    """This rank's samples, for `DataLoader(sampler=..., batch_size=...)` with the same batch size as here."""

    def __iter__(self) -> Iterator[int]:
        for step in self.steps():
            for samples in step.micro_batches:
                yield from samples

    def __len__(self) -> int:
        """Samples of a whole epoch."""
        return self.plan.samples_per_epoch_here


class _Requests(BatchSampler):
    """The same batches, each with the seed to fetch it with."""

    def __iter__(self) -> Iterator[Request]:  # type: ignore[override]
        for step in self.steps():
            for samples in step.micro_batches:
                yield request(self.plan.seed, step.epoch, samples)


class Loader(DataLoader[Any]):
    """A DataLoader that goes on where `advance` was told it is. Made by `loader`."""

    def __init__(self, dataset: Dataset, requests: _Requests, collate: Collate, **options: Any) -> None:
        super().__init__(
            Repeatable(dataset, collate),  # type: ignore[arg-type]
            batch_sampler=requests,
            collate_fn=as_it_is,
            worker_init_fn=ignore_signals,
            generator=torch.Generator().manual_seed(requests.plan.seed),
            **options,
        )
        self.requests = requests

    def __iter__(self) -> Any:
        with signals_held():
            return end_at_exit(super().__iter__())

    @property
    def position(self) -> Position:
        return self.requests.position

    @property
    def shares(self) -> list[float]:
        """See `BatchSampler.shares`."""
        return self.requests.shares

    def advance(self, steps: int = 1) -> None:
        """So many optimizer steps were done with what was given."""
        self.requests.advance(steps)

    def state_dict(self) -> dict[str, Any]:
        return self.requests.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect at the next pass. Raises CheckpointError."""
        self.requests.load_state_dict(state)


def loader(
    dataset: Dataset,
    *,
    batch_size: int = 1,
    accumulation: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    world: World | None = None,
    collate: Collate | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    **options: Any,
) -> Loader:
    """A DataLoader over a map-style set whose position, order and augmentation survive an interruption.

    Its workers ignore SIGTERM and SIGINT. options: further ones of torch's DataLoader.
    """
    requests = _Requests(
        dataset,
        batch_size=batch_size,
        accumulation=accumulation,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        world=world,
    )
    return Loader(
        dataset,
        requests,
        collate or default_collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        **options,
    )
