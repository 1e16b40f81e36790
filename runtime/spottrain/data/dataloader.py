"""Fetches micro-batches of a map-style dataset.

Each micro-batch is fetched under its own seed. So random augmentation and masking depend on the position
only, not on the number of workers or on earlier batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, default_collate

from spottrain.core import container, log
from spottrain.data.order import mix, seeded
from spottrain.data.plan import Dataset, Step
from spottrain.lifecycle.worker_signals import end_at_exit, ignore_signals, signals_held

Collate = Callable[[list[Any]], Any]
MAX_WORKERS: Final = 8
"""Loader processes of a rank that `auto` starts at most: each soon holds its own copy of Python objects."""


class FetchRequest(NamedTuple):
    """Request to a loader worker: indices of the samples, and the seed to fetch them with."""

    seed: int
    samples: list[int]


def request(seed: int, epoch: int, samples: list[int]) -> FetchRequest:
    """Derives the seed from the first sample, which is unique in an epoch (a filler repeats its batch)."""
    return FetchRequest(mix(mix(seed, epoch), samples[0]), samples)


class Repeatable:
    """Fetches and collates each micro-batch under its own seed."""

    def __init__(self, dataset: Dataset, collate_fn: Collate) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: FetchRequest) -> Any:
        """Returns the collated batch. torch's DataLoader accepts that in place of a list of samples."""
        with seeded(request.seed):
            fetch_all = getattr(self.dataset, "__getitems__", None)
            if fetch_all:
                return self.collate_fn(list(fetch_all(request.samples)))
            return self.collate_fn([self.dataset[i] for i in request.samples])


def as_it_is(batch: Any) -> Any:
    return batch


def load(
    dataset: Dataset,
    steps: Iterator[Step],
    *,
    seed: int = 0,
    num_workers: int = 0,
    collate_fn: Collate | None = None,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
) -> Iterator[Any]:
    """Yields the collated micro-batches of `steps`, in order, each fetched under a seed derived from `seed`.

    One iterator serves all epochs, so its workers persist without `persistent_workers`. They end with it, or
    at exit. The other arguments are those of `source.Batches`.
    """
    requests = (request(seed, step.epoch, samples) for step in steps for samples in step.micro_batches)
    loader: DataLoader[Any] = DataLoader(
        Repeatable(dataset, collate_fn or default_collate),  # type: ignore[arg-type]
        batch_sampler=requests,  # type: ignore[arg-type]
        num_workers=num_workers,
        collate_fn=as_it_is,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor if num_workers else None,
        worker_init_fn=ignore_signals,
        generator=torch.Generator().manual_seed(seed),  # else it draws from the global random state
    )
    with signals_held():
        return cast(Iterator[Any], end_at_exit(iter(loader)))


def cores(cgroups: Path = container.CGROUPS, local_ranks: int = 1) -> float:
    """Returns the CPU cores for this rank: the container's cores, divided by its `local_ranks`."""
    return container.cores(cgroups) / max(local_ranks, 1)


def workers(wanted: int | Literal["auto"], *, local_ranks: int) -> int:
    """Returns the number of loader processes; "auto": this rank's cores less one, from 1 to `MAX_WORKERS`.

    One core is kept for the training process, which launches kernels and must not wait.
    """
    if isinstance(wanted, int):
        return wanted
    available = cores(local_ranks=local_ranks)
    found = max(1, min(int(available) - 1, MAX_WORKERS))
    log.event("loader-workers", workers=found, cores=available)
    return found
