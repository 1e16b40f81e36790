"""`Batches`: a map-style dataset as an endless stream of optimizer steps, from any position.

Prefetched batches are not checkpointed: the position counts committed optimizer steps only. After a resume,
or a change of the number of workers, they are fetched again.
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
from spottrain.lifecycle.worker_signals import end_workers


class Batches:
    """A `Source` over a map-style dataset. Its state is the same on all ranks and for any number of ranks.

    The content of a sample does not depend on the number of workers.

    Args:
        dataset: map-style dataset.
        plan: assigns samples to steps.
        num_workers: loader processes. "auto" times the first steps without workers. Then it starts as many as
            are needed, limited by `cores`.
        collate_fn: makes a batch of a list of samples; None: torch's `default_collate`.
        pin_memory: as of torch's DataLoader.
        prefetch_factor: micro-batches that each worker fetches ahead; None: torch's default, 2.
        cores: CPU cores of this rank; None: as cgroups or the machine say.
        clock: returns seconds; must wait for the device.
    """

    per_rank = False

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        *,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        cores: float | None = None,
        clock: Callable[[], float] = devices.device_clock,
    ) -> None:
        self.dataset, self.plan = dataset, plan
        self.num_workers = num_workers if isinstance(num_workers, int) else 0
        self.collate_fn, self.pin_memory, self.prefetch_factor = collate_fn, pin_memory, prefetch_factor
        self.position = Position()
        self._clock = clock
        available = measuring.cores() if cores is None else cores
        self._trial = (
            None if isinstance(num_workers, int) else measuring.WorkerTrial(clock=clock, available=available)
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return self.plan.steps_per_epoch

    def __iter__(self) -> Stream:
        """Yields (step, iterator of (batch, share)). Take all micro-batches, then call `done(step)`."""
        while True:  # once more each time that plan or workers have changed
            yield from self._until_change()

    def _until_change(self) -> Stream:
        """Yields from the position on, until the plan or the number of workers changes."""
        plan, num_workers = self.plan, self.num_workers
        asked, given = tee(plan.steps(self.position))  # one order of an epoch in memory, not two
        stream = load(
            self.dataset,
            asked,
            seed=plan.seed,
            num_workers=num_workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            prefetch_factor=self.prefetch_factor,
        )
        for step in given:
            self._apply_trial()
            if (self.plan, self.num_workers) != (plan, num_workers):
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

    def _apply_trial(self) -> None:
        """Applies the trial's number of workers at the beginning of a step, once it is known."""
        trial = self._trial
        if trial is None or (found := trial.step()) is None:
            return
        log.event("loader-workers", workers=found, **trial.figures)
        self.num_workers, self._trial = found, None

    def resized(self, micro_batch_size: int) -> None:
        """Changes the micro-batch size from the next step on; the order of samples stays.

        Args:
            micro_batch_size: samples per rank and forward pass; must divide the rank's share of a batch.
        """
        self.plan = replace(self.plan, micro_batch_size=micro_batch_size)

    def done(self, step: Step) -> None:
        """Moves the position past `step`, after its optimizer step."""
        self.position = step.after

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values, the same on all ranks."""
        return self.plan.state(self.position)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restores position and order; the saved seed overrides the current one. Raises CheckpointError."""
        self.plan, self.position = self.plan.resumed(state)
