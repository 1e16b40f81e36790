"""Makes a `Source` from the argument of `Trainer(train_dataset=...)`."""

from __future__ import annotations

from typing import Any, Literal

from spottrain.data.dataloader import Collate
from spottrain.data.iterable import StreamBatches
from spottrain.data.map_style import Batches
from spottrain.data.plan import Plan, Source
from spottrain.data.worker_count import cores
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError


def source(
    train_dataset: Any,
    world: World,
    *,
    global_batch_size: int,
    micro_batch_size: int | None,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    steps_per_epoch: int | None,
    num_workers: int | Literal["auto"],
    collate_fn: Collate | None,
    pin_memory: bool,
    prefetch_factor: int | None = None,
) -> Source:
    """Returns `Batches` for a map-style dataset, `StreamBatches` for a loader of this rank's micro-batches.

    Raises ConfigurationError, also if the batch sizes do not divide evenly.
    """
    micro = micro_batch_size or max(global_batch_size // world.size, 1)
    if not hasattr(train_dataset, "__getitem__") and hasattr(train_dataset, "__iter__"):
        return StreamBatches(
            train_dataset,
            accumulation=_accumulation(global_batch_size, micro, world.size),
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
    return Batches(
        train_dataset,
        plan,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor,
        cores=cores(local_ranks=world.local_size),
    )


def size_of(dataset: Any, name: str) -> int:
    """Returns the number of samples of a map-style dataset. Raises ConfigurationError for anything else."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(
            f"Trainer({name}=...) is a {type(dataset).__name__} without len() or [i]; give a map-style "
            "dataset or, for train_dataset, a loader that can be resumed (see spottrain.data)"
        )
    return len(dataset)


def _accumulation(global_batch_size: int, micro: int, ranks: int) -> int:
    if global_batch_size % (micro * ranks):
        raise ConfigurationError(
            f"globalBatchSize {global_batch_size} is not a multiple of {ranks} rank(s) x microBatchSize "
            f"{micro}, the size of the loader's batches; change one of the two"
        )
    return global_batch_size // (micro * ranks)
