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
from collections.abc import Callable, Iterator, Sized
from itertools import chain, tee
from typing import Any, Final, Literal

import torch
from torch.utils.data import DataLoader, default_collate

from spottrain import device as devices
from spottrain import log
from spottrain.data import workers as measuring
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
from spottrain.data.room import Room
from spottrain.errors import ConfigurationError
from spottrain.ranks.world import World
from spottrain.training import AUTO

OF_WORKERS: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""Options that torch refuses where there are no workers."""


class _Cursor:
    """Position in a plan. The same on all ranks, so any number of ranks may go on from it.

    data: the dataset, or its length.
    batch_size: samples that one rank gets at once (the DataLoader's).
    accumulation: batches of one rank in an optimizer step.
    seed: of the order; None: what `spottrain.seed()` has set before, else 0. A checkpoint's own holds.
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
        seed: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        world: World | None = None,
    ) -> None:
        self.world = world = World.from_env(os.environ) if world is None else world
        self.plan = Plan(
            size=data if isinstance(data, int) else len(data),
            batch_size=batch_size * accumulation * world.size,
            micro_batch_size=batch_size,
            seed=_order_seed() if seed is None else seed,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=world.rank,
            ranks=world.size,
        )
        self.position = Position()
        end_at_exit()  # the workers of a DataLoader that was given `ignore_signals`
        self._unused: Position | None = None
        """Where the last pass began that was given out whole."""
        self.ended: int | None = None
        """The epoch whose pass has ended, which only a `Loader` knows: workers ask ahead."""

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
        self._unused = self.ended = None

    @property
    def _of_accumulation(self) -> str:
        if self.plan.accumulation == 1:
            return ""
        return (
            f". With accumulation={self.plan.accumulation} micro-batches an epoch's last step may have fewer "
            "of them: use spottrain.levers.accumulation.parts(...), which knows, or drop_last=True"
        )

    def steps(self) -> Iterator[Step]:
        """From the position to the end of its epoch."""
        start = self.position
        if start == self._unused:
            raise ConfigurationError(
                f"epoch {start.epoch} was given out from sample {start.sample} to its end, and nobody called "
                "advance(), so it would come again: call it after each step (spottrain.Guard does); to only "
                f"look at the data, make another loader{self._of_accumulation}"
            )
        if start.epoch == self.ended:
            raise ConfigurationError(
                f"epoch {start.epoch} has ended, and advance() was not called for all of its steps, so what "
                f"was given out from sample {start.sample} on would come again: call it after each step, the "
                f"epoch's last too, also where the optimizer has left one out{self._of_accumulation}"
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
    """The same batches, each with the seed to fetch it with.

    `next`: steps of the next pass, where they are not all that is left of the epoch.
    """

    next: Iterator[Step] | None = None

    def __iter__(self) -> Iterator[Request]:  # type: ignore[override]
        steps, self.next = self.next or self.steps(), None
        return self._of(steps)

    def _of(self, steps: Iterator[Step]) -> Iterator[Request]:
        for step in steps:
            for samples in step.micro_batches:
                yield request(self.plan.seed, step.epoch, samples)


class Loader(DataLoader[Any]):
    """A DataLoader that goes on where `advance` was told it is. Made by `loader`.

    With `num_workers="auto"` the first steps are fetched without workers and timed, and as many as they need
    fetch the rest, from the step on at which that is known. The samples are the same.
    """

    def __init__(
        self,
        dataset: Dataset,
        requests: _Requests,
        collate: Collate,
        *,
        num_workers: int | Literal["auto"],
        clock: Callable[[], float] = devices.device_clock,
        **options: Any,
    ) -> None:
        self._trial: measuring.Trial | None = None
        super().__init__(
            Repeatable(dataset, collate),  # type: ignore[arg-type]
            batch_sampler=requests,
            collate_fn=as_it_is,
            worker_init_fn=ignore_signals,
            generator=torch.Generator().manual_seed(requests.plan.seed),
            num_workers=1 if isinstance(num_workers, str) else num_workers,  # so that torch takes options
            **options,
        )
        self.requests = requests
        context, ranks = self.multiprocessing_context, requests.world.local_size
        self._room = Room(dataset, collate, name="the set", ranks=ranks, context=context)
        if isinstance(num_workers, str):
            self.num_workers = 0
            self._timeout, self.timeout = self.timeout, 0.0  # torch takes none where there are no workers
            available = measuring.cores(local_ranks=ranks)
            self._trial = measuring.Trial(clock=clock, available=available)

    def __iter__(self) -> Any:
        if self._trial is not None:
            return self._whole(self._measured(self._trial), self.position.epoch)
        if getattr(self, "_iterator", None) is None:  # else its workers are there, and their copies in use
            self._room.warn(self.num_workers)
        return self._whole(self._pass(), self.position.epoch)

    def _whole(self, stream: Any, epoch: int) -> Iterator[Any]:
        yield from stream
        self.requests.ended = epoch

    def _pass(self, steps: Iterator[Step] | None = None) -> Any:
        self.requests.next = steps
        with signals_held():
            return end_at_exit(super().__iter__())

    def _measured(self, trial: measuring.Trial) -> Iterator[Any]:
        """A pass without workers until the trial knows how many there should be. One may begin it, and the
        next may end it."""
        asked, given = tee(self.requests.steps())
        stream = self._pass(asked)
        for step in given:
            found = trial.step()
            if found is not None:
                found = self._room.most(found)
                log.event("loader-workers", workers=found, **trial.figures)
                self._trial, self.num_workers = None, found
                del asked, stream  # else `given` keeps for them what it gives
                self.timeout = self._timeout if found else 0.0
                yield from self._pass(chain([step], given))
                return
            for _ in step.micro_batches:
                began = trial.clock()
                batch = next(stream)
                trial.fetch(trial.clock() - began)
                yield batch

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
    seed: int | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    world: World | None = None,
    collate: Collate | None = None,
    num_workers: int | Literal["auto"] = 0,
    pin_memory: bool = False,
    **options: Any,
) -> Loader:
    """A DataLoader over a map-style set whose position, order and augmentation survive an interruption.

    Its workers ignore SIGTERM and SIGINT. num_workers: "auto": as many as the first steps show are needed, on
    the cores and in the memory that this rank has. seed: None: what `spottrain.seed()` has set before, else
    0; a checkpoint's own holds. options: further ones of torch's DataLoader; those about
    workers are left out where there are none, and that is told.
    """
    if isinstance(num_workers, str) and num_workers != AUTO:
        raise ConfigurationError(
            f"spottrain.data.loader(num_workers={num_workers!r}): must be a whole number, or auto"
        )
    if num_workers == 0:
        options = _without_workers(options)
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


def _order_seed() -> int:
    return devices.seed_in_use() if devices.seeded() else 0


def _without_workers(options: dict[str, Any]) -> dict[str, Any]:
    """torch refuses them there, and a manifest that sets no workers would end the run."""
    idle = [name for name in OF_WORKERS if options.get(name)]
    if idle:
        text = f"{', '.join(idle)} cannot act: num_workers is 0"
        log.event("advice", about="data", text=text)
    return {name: value for name, value in options.items() if name not in OF_WORKERS}
