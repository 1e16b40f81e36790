"""A map-style training set as an endless stream of optimizer steps from a position on. Called by `trainer`.

What the loader has fetched ahead is no state: the position counts committed optimizer steps, and whatever was
prefetched is fetched again after a resume.
"""

from __future__ import annotations

from itertools import tee
from typing import Any

from spottrain.data.fetch import Collate, load
from spottrain.data.plan import Dataset, Plan, Position, Step, Stream


class Batches:
    """A `Source`. The same state on all ranks, so any number of ranks may go on from it."""

    per_rank = False

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        *,
        workers: int = 0,
        collate: Collate | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.dataset, self.plan, self.workers = dataset, plan, workers
        self.collate, self.pin_memory = collate, pin_memory
        self.position = Position()

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    def __iter__(self) -> Stream:
        """The caller takes all of a step's micro-batches, then calls `done(step)`."""
        asked, given = tee(self.plan.steps(self.position))  # one order of an epoch in memory, not two
        stream = load(
            self.dataset,
            asked,
            seed=self.plan.seed,
            workers=self.workers,
            collate=self.collate,
            pin_memory=self.pin_memory,
        )
        for step in given:
            yield step, ((next(stream), share) for share in step.shares)

    def done(self, step: Step) -> None:
        self.position = step.after

    def state_dict(self) -> dict[str, Any]:
        return self.plan.state(self.position)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Goes on at the saved position and in the saved order, even if the manifest's seed has changed."""
        self.plan, self.position = self.plan.resumed(state)
