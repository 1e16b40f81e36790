"""`Batches`: a map-style dataset as an endless stream of optimizer steps, from any position.

Prefetched batches are not checkpointed: the position counts committed optimizer steps only. After a resume,
or a change of the number of workers, they are fetched again. `source` makes it, or a `StreamBatches`, from
the argument of `Trainer(train_dataset=...)`.
"""

from __future__ import annotations

from itertools import tee
from typing import Any, Literal

from torch.utils.data import default_collate

from spottrain.data.dataloader import Collate, load, request, workers
from spottrain.data.iterable import StreamBatches
from spottrain.data.order import seeded
from spottrain.data.plan import Dataset, Plan, Position, Step, Stream, accumulation_of
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError


class Batches:
    """A `Source` over a map-style dataset. Its state is the same on all ranks and for any number of ranks.

    The content of a sample does not depend on the number of workers.

    Args:
        dataset: map-style dataset.
        plan: assigns samples to steps; it may be replaced before the first step.
        num_workers: loader processes.
        collate_fn: makes a batch of a list of samples; None: torch's `default_collate`.
        pin_memory: as of torch's DataLoader.
        prefetch_factor: micro-batches that each worker fetches ahead; None: torch's default, 2.
    """

    per_rank = False

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        *,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        self.dataset, self.plan, self.num_workers = dataset, plan, num_workers
        self.collate_fn, self.pin_memory, self.prefetch_factor = collate_fn, pin_memory, prefetch_factor
        self.position = Position()

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return self.plan.steps_per_epoch

    def __iter__(self) -> Stream:
        """Yields (step, iterator of (batch, share)). Take all micro-batches, then call `done(step)`."""
        asked, given = tee(self.plan.steps(self.position))  # one order of an epoch in memory, not two
        batches = load(
            self.dataset,
            asked,
            seed=self.plan.seed,
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            prefetch_factor=self.prefetch_factor,
        )
        for step in given:
            yield step, ((next(batches), share) for share in step.shares)

    def sample(self, size: int, *, start: int = 0, apart: int = 1) -> Any:
        """Returns a collated batch of `size` samples, on the host, without moving the position.

        It takes every `apart`th sample from index `start` on.
        """
        count = len(self.dataset)
        numbers = [(start + number * apart) % count for number in range(size)]
        with seeded(request(self.plan.seed, 0, numbers).seed):
            return (self.collate_fn or default_collate)([self.dataset[number] for number in numbers])

    def done(self, step: Step) -> None:
        """Moves the position past `step`, after its optimizer step."""
        self.position = step.after

    def state_dict(self) -> dict[str, Any]:
        """Returns plain values, the same on all ranks."""
        return self.plan.state(self.position)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restores position and order; the saved seed overrides the current one. Raises CheckpointError."""
        self.plan, self.position = self.plan.resumed(state)


Source = Batches | StreamBatches
"""A resumable, endless source of optimizer steps; the package's docstring describes each member."""


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
    num_workers: int | Literal["auto"] = 0,
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
    found = workers(num_workers, local_ranks=world.local_size)
    return Batches(train_dataset, plan, num_workers=found, **loading)


def size_of(dataset: Any, name: str) -> int:
    """Returns the number of samples of a map-style dataset. Raises ConfigurationError for anything else."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(
            f"Trainer({name}=...) is a {type(dataset).__name__} without len() or [i]; give a map-style "
            "dataset or, for train_dataset, a loader that can be resumed (see spottrain.data)"
        )
    return len(dataset)
