"""For people who keep their own DataLoader: samplers that count what was used, not what was prefetched.

    sampler = spottrain.data.BatchSampler(dataset, batch_size=32)
    loader = DataLoader(dataset, batch_sampler=sampler, worker_init_fn=spottrain.data.ignore_signals)

or, with both set and randomness that depends on the position alone:

    loader = spottrain.data.loader(dataset, batch_size=32)

`run` calls `advance()` at each optimizer step, and keeps `state_dict()`. A pass over the loader is what is
left of an epoch, so a loop over epochs goes on in the middle of one by itself. After an epoch's last step the
position stays at the end of that epoch until the next pass begins: what the loop does between two epochs
belongs to the first. A position restored from there gives one empty pass, so that this work is done again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sized
from itertools import chain, tee
from typing import Any, Final, Literal

import torch
from torch.utils.data import DataLoader, default_collate

from spottrain.core import device as devices
from spottrain.core import log
from spottrain.core.training_spec import AUTO
from spottrain.data import worker_count as measuring
from spottrain.data.dataloader import Collate, FetchRequest, Repeatable, as_it_is, request
from spottrain.data.plan import Dataset, Plan, Position, Step
from spottrain.data.worker_memory import Room
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.worker_signals import end_at_exit, ignore_signals, signals_held

OF_WORKERS: Final = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""Options that torch refuses where there are no workers."""


class Cursor:
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
        self.ahead = False
        """Whether batches are drawn before they are used, so that a pass begins while the last step of the
        epoch before is not done (`Loop.ahead`)."""
        self.counted = False
        """Whether the loop counts its epochs by `position`: no pass may be left early then."""
        self.ended: int | None = None
        """The epoch whose pass has ended, which only a `Loader` knows: workers ask ahead."""
        self._forget_passes()

    def _forget_passes(self) -> None:
        self._unused: Position | None = None
        """Where the last pass began that was given out whole."""
        self.begun: int | None = None
        """The epoch of the last pass."""
        self._empty = False
        """Whether the next pass is empty: the position was restored at the end of an epoch."""
        self.ended = None

    def advance(self, steps: int = 1) -> None:
        """So many optimizer steps were done with what was given."""
        for _ in range(steps):
            start = self._next
            after = self.plan.after(start)
            self.position = after if after.epoch == start.epoch else Position(start.epoch, self.plan.size)
        self._empty = False

    @property
    def over(self) -> bool:
        """Whether all steps of the position's epoch are done."""
        return self.position.sample >= self.plan.samples_per_epoch

    @property
    def _next(self) -> Position:
        """Where the next step begins."""
        return Position(self.position.epoch + 1, 0) if self.over else self.position

    def begin_epoch(self) -> None:
        """Moves on from the end of an epoch: the loop has done all that belongs to it."""
        self.position, self._empty = self._next, False

    @property
    def shares(self) -> list[float]:
        """Weight of each batch of this rank in the next step; over all ranks 1."""
        return self.plan.shares(self._next)

    def state_dict(self) -> dict[str, Any]:
        return self.plan.state(self.position)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Takes effect at the next pass. Raises CheckpointError."""
        self.plan, self.position = self.plan.resumed(state)
        self._forget_passes()
        self._empty = self.over

    @property
    def _of_accumulation(self) -> str:
        if self.plan.accumulation == 1:
            return ""
        return (
            f". With accumulation={self.plan.accumulation} micro-batches an epoch's last step may have fewer "
            "of them: use spottrain.techniques.accumulation.parts(...), which knows, or drop_last=True"
        )

    def steps(self) -> Iterator[Step]:
        """Begins a pass: from the position to the end of its epoch. Raises ConfigurationError."""
        if self._empty:
            self._empty = False
            return iter(())
        self.begin_epoch()
        start = self.position
        if self.ahead and start.epoch == self.ended:
            start = Position(start.epoch + 1, 0)  # the last step of the one before is still to be counted
        else:
            self._require_used(start)
        self.begun = start.epoch
        return self._of_epoch(start)

    def _of_epoch(self, start: Position) -> Iterator[Step]:
        for step in self.plan.steps(start):
            if step.epoch != start.epoch:
                break
            yield step
            if step.after.epoch != start.epoch:
                self._unused = start

    def _require_used(self, start: Position) -> None:
        """Raises ConfigurationError where samples would come twice, or epochs be counted wrongly."""
        if start == self._unused:
            raise ConfigurationError(
                f"epoch {start.epoch} was given out from sample {start.sample} to its end, and nobody called "
                "advance(), so it would come again: call it after each step (spottrain.Run does); to only "
                f"look at the data, make another loader"
                f"{self._of_accumulation}"
            )
        if start.epoch == self.ended:
            raise ConfigurationError(
                f"epoch {start.epoch} has ended, and advance() was not called for all of its steps, so what "
                f"was given out from sample {start.sample} on would come again: call it after each step, the "
                "epoch's last too, also where the optimizer has left one out; a loop that draws its next "
                f"batch before it calls step_completed() iterates over run.ahead(loader)"
                f"{self._of_accumulation}"
            )
        if self.counted and start.sample and start.epoch == self.begun:
            raise ConfigurationError(
                f"the loop over epoch {start.epoch} was left after {start.sample} of its "
                f"{self.plan.samples_per_epoch} samples, and the next pass goes on there, so run.epoch "
                "does not count the loop's epochs: iterate `for epoch in run.epochs(n, steps=...)` and "
                "`for batch in run.batches(loader)`, which ends each epoch after so many steps, and "
                "leave out the break"
            )


class BatchSampler(Cursor, torch.utils.data.Sampler[list[int]]):
    """This rank's batches, for `DataLoader(batch_sampler=...)`."""

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps():
            yield from step.micro_batches

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.plan.micro_batches_per_epoch


class Sampler(Cursor, torch.utils.data.Sampler[int]):
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

    def __iter__(self) -> Iterator[FetchRequest]:  # type: ignore[override]
        """Takes its steps when first asked: with workers torch makes two iterators, and uses the second."""
        steps, self.next = self.next or self.steps(), None
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
        self._trial: measuring.WorkerTrial | None = None
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
            self._trial = measuring.WorkerTrial(clock=clock, available=available)

    def __iter__(self) -> Any:
        """Begins with the first batch, so that a position that is restored before that counts."""
        steps = self.requests.steps()
        if self.requests.over:
            return
        epoch = self.requests.begun
        if self._trial is not None:
            yield from self._measured(self._trial, steps)
        else:
            if getattr(self, "_iterator", None) is None:  # else its workers are there, their copies in use
                self._room.warn(self.num_workers)
            yield from self._pass(steps)
        self.requests.ended = epoch

    def _pass(self, steps: Iterator[Step]) -> Any:
        self.requests.next = steps
        with signals_held():
            return end_at_exit(super().__iter__())

    def _measured(self, trial: measuring.WorkerTrial, steps: Iterator[Step]) -> Iterator[Any]:
        """A pass without workers until the trial knows how many there should be. One may begin it, and the
        next may end it."""
        asked, given = tee(steps)
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
