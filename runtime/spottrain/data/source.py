"""`Batches`: a map-style dataset as an endless stream of optimizer steps, from any position.

Prefetched batches are not checkpointed: the position counts committed optimizer steps only. After a resume,
or a change of the number of workers, they are fetched again. `source` makes it, or a `StreamBatches`, from
the argument of `Trainer(train_dataset=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from spottrain.core import device as devices
from spottrain.data.dataloader import Collate, load
from spottrain.data.iterable import StreamBatches
from spottrain.data.plan import Dataset, Plan, Position, Source, Step, Stream, accumulation_of
from spottrain.data.worker_count import WorkerTrial, cores, fetched
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError


class Batches:
    """A `Source` over a map-style dataset. Its state is the same on all ranks and for any number of ranks.

    The content of a sample does not depend on the number of workers.

    Args:
        dataset: map-style dataset.
        plan: assigns samples to steps; it may be replaced before the first step.
        num_workers: loader processes. "auto" times the first steps without workers. Then it starts as many as
            are needed, limited by `cores`.
        collate_fn: makes a batch of a list of samples; None: torch's `default_collate`.
        pin_memory: as of torch's DataLoader.
        prefetch_factor: micro-batches that each worker fetches ahead; None: torch's default, 2.
        available: CPU cores of this rank; None: as cgroups or the machine say.
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
        available: float | None = None,
        clock: Callable[[], float] = devices.device_clock,
    ) -> None:
        self.dataset, self.plan = dataset, plan
        self.collate_fn, self.pin_memory, self.prefetch_factor = collate_fn, pin_memory, prefetch_factor
        self.position = Position()
        self.num_workers, self._trial = 0, None
        if isinstance(num_workers, int):
            self.num_workers = num_workers
        else:
            self._trial = WorkerTrial(clock, cores() if available is None else available)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return self.plan.steps_per_epoch

    def __iter__(self) -> Stream:
        """Yields (step, iterator of (batch, share)). Take all micro-batches, then call `done(step)`."""
        steps = self.plan.steps(self.position)
        for step, batches in fetched(steps, self._load, self.num_workers, self._trial):
            yield step, ((next(batches), share) for share in step.shares)

    def _load(self, steps: Iterator[Step], workers: int) -> Iterator[Any]:
        self.num_workers = workers
        return load(
            self.dataset,
            steps,
            seed=self.plan.seed,
            num_workers=workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            prefetch_factor=self.prefetch_factor,
        )

    def done(self, step: Step) -> None:
        """Moves the position past `step`, after its optimizer step."""
        self.position = step.after

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values, the same on all ranks."""
        return self.plan.state(self.position)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restores position and order; the saved seed overrides the current one. Raises CheckpointError."""
        self.plan, self.position = self.plan.resumed(state)


def source(
    train_dataset: Any,
    world: World,
    *,
    global_batch_size: int,
    micro_batch_size: int | None,
    seed: int = 0,
    shuffle: bool = False,
    drop_last: bool = False,
    steps_per_epoch: int | None = None,
    **loading: Any,
) -> Source:
    """Returns `Batches` for a map-style dataset, `StreamBatches` for a loader of this rank's micro-batches.

    loading: further arguments of `Batches`. Raises ConfigurationError, also if the batch sizes do not divide
    evenly.
    """
    micro = micro_batch_size or max(global_batch_size // world.size, 1)
    if not hasattr(train_dataset, "__getitem__") and hasattr(train_dataset, "__iter__"):
        return StreamBatches(
            train_dataset,
            accumulation=accumulation_of(global_batch_size, micro, world.size),
            steps_per_epoch=steps_per_epoch,
            seed=seed,
            rank=world.rank,
            ranks=world.size,
        )
    plan = Plan(
        size=size_of(train_dataset, "train_dataset"),
        global_batch_size=global_batch_size,
        micro_batch_size=micro,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        rank=world.rank,
        ranks=world.size,
    )
    return Batches(train_dataset, plan, available=cores(local_ranks=world.local_size), **loading)


def size_of(dataset: Any, name: str) -> int:
    """Returns the number of samples of a map-style dataset. Raises ConfigurationError for anything else."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(
            f"Trainer({name}=...) is a {type(dataset).__name__} without len() or [i]; give a map-style "
            "dataset or, for train_dataset, a loader that can be resumed (see spottrain.data)"
        )
    return len(dataset)
