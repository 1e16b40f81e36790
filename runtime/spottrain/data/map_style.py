"""A map-style training set as an endless stream of optimizer steps from a position on. Called by `trainer`.

What the loader has fetched ahead is no state: the position counts committed optimizer steps, and whatever was
prefetched is fetched again after a resume, or when the number of workers changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import tee
from typing import Any, Literal

from spottrain.core import device as devices
from spottrain.core import log
from spottrain.data import worker_count as measuring
from spottrain.data.dataloader import Collate, load
from spottrain.data.plan import Dataset, Plan, Position, Step, Stream
from spottrain.data.worker_memory import Room
from spottrain.lifecycle.worker_signals import end_workers


class Batches:
    """A `Source`. The same state on all ranks, so any number of ranks may go on from it.

    workers: loader processes; "auto" times the first steps without, and then starts as many as are needed on
    the `cores` of this rank and have `room` in memory. A sample's content does not depend on who fetches it.
    """

    per_rank = False

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        *,
        workers: int | Literal["auto"] = 0,
        collate: Collate | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        cores: float | None = None,
        room: Room | None = None,
        clock: Callable[[], float] = devices.device_clock,
    ) -> None:
        self.dataset, self.plan = dataset, plan
        self.workers = workers if isinstance(workers, int) else 0
        self.collate, self.pin_memory, self.prefetch_factor = collate, pin_memory, prefetch_factor
        self.position = Position()
        self._room = room or Room(dataset, collate)
        self._clock = clock
        available = measuring.cores() if cores is None else cores
        self._trial = (
            None if isinstance(workers, int) else measuring.WorkerTrial(clock=clock, available=available)
        )

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    def __iter__(self) -> Stream:
        """The caller takes all of a step's micro-batches, then calls `done(step)`."""
        while True:  # each time that plan or workers have changed
            yield from self._as_it_is()

    def _as_it_is(self) -> Stream:
        """From the position on, for as long as nothing about the loading changes."""
        plan, workers = self.plan, self.workers
        self._room.warn(workers)
        asked, given = tee(plan.steps(self.position))  # one order of an epoch in memory, not two
        stream = load(
            self.dataset,
            asked,
            seed=plan.seed,
            workers=workers,
            collate=self.collate,
            pin_memory=self.pin_memory,
            prefetch_factor=self.prefetch_factor,
        )
        for step in given:
            self._judge()
            if (self.plan, self.workers) != (plan, workers):
                end_workers(stream)
                return
            yield step, ((self._timed(stream), share) for share in step.shares)

    def _timed(self, stream: Iterator[Any]) -> Any:
        if self._trial is None:
            return next(stream)
        began = self._clock()
        batch = next(stream)
        self._trial.fetch(self._clock() - began)
        return batch

    def _judge(self) -> None:
        """Where a step begins: by now the trial may know."""
        trial = self._trial
        if trial is None or (found := trial.step()) is None:
            return
        workers = self._room.most(found)
        wanted = found if workers != found else None  # why is a line of the room's
        log.event("loader-workers", workers=workers, wanted=wanted, **trial.figures)
        self.workers, self._trial = workers, None

    def resized(self, micro_batch_size: int) -> None:
        """Smaller micro-batches from the next step on, in the same order; for after a lack of memory."""
        self.plan = replace(self.plan, micro_batch_size=micro_batch_size)

    def done(self, step: Step) -> None:
        self.position = step.after

    def state_dict(self) -> dict[str, Any]:
        return self.plan.state(self.position)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Goes on at the saved position and in the saved order, even if the manifest's seed has changed."""
        self.plan, self.position = self.plan.resumed(state)
