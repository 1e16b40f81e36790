"""Which samples make up which optimizer step, and the loader that fetches them. Used by `trainer`.

The order of an epoch depends on the seed and the epoch only, so a position is two integers and any position
is reached at once. What the loader has fetched ahead is no state: the position counts committed optimizer
steps, and whatever was prefetched is fetched again after a resume.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, default_collate

from spottrain.contract import Reason
from spottrain.errors import CheckpointError, ConfigurationError

_STRIDE: Final = 1_000_003


def _mix(seed: int, number: int) -> int:
    """A seed for part `number` of what `seed` stands for, so that neighbouring seeds do not share parts."""
    return (seed * _STRIDE + number) % 2**63


class Dataset(Protocol):
    """A map-style dataset: samples are fetched by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Position(NamedTuple):
    """Where the next optimizer step begins."""

    epoch: int = 0
    sample: int = 0
    """Samples of this epoch that are already used."""


class Step(NamedTuple):
    """The samples of one optimizer step, cut into micro-batches."""

    epoch: int
    micro_batches: list[list[int]]
    after: Position

    @property
    def samples(self) -> int:
        return sum(map(len, self.micro_batches))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which of `size` samples make up which step; the last ones of an epoch may be smaller."""

    size: int
    batch_size: int
    """Samples of one optimizer step."""
    micro_batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    """Leave out an epoch's last step where it would be smaller."""

    def __post_init__(self) -> None:
        if self.size == 0:
            raise ConfigurationError("the training set is empty: give Trainer(train_set=...) samples")
        if self.batch_size < 1 or self.micro_batch_size < 1:
            raise ConfigurationError(
                f"batch size {self.batch_size} and micro-batch size {self.micro_batch_size}: at least 1 each"
            )
        if self.size < self.batch_size:
            raise ConfigurationError(
                f"the training set has {self.size} sample(s), fewer than one batch of {self.batch_size}: "
                "lower globalBatchSize (batch_size of Trainer) or add data"
            )
        if self.batch_size % self.micro_batch_size:
            raise ConfigurationError(
                f"globalBatchSize {self.batch_size} is no multiple of microBatchSize {self.micro_batch_size}"
            )

    @property
    def samples_per_epoch(self) -> int:
        return self.size - self.size % self.batch_size if self.drop_last else self.size

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples_per_epoch // self.batch_size)

    def order(self, epoch: int) -> torch.Tensor:
        """Sample numbers of an epoch, shape (size,), int64. Never touches the global random state."""
        if not self.shuffle:
            return torch.arange(self.size)
        generator = torch.Generator().manual_seed(_mix(self.seed, epoch))
        return torch.randperm(self.size, generator=generator)

    def steps(self, start: Position) -> Iterator[Step]:
        """The steps from `start` on, epoch after epoch, without an end."""
        epoch, sample = start
        while True:
            order = self.order(epoch)[: self.samples_per_epoch]
            while sample < len(order):
                numbers = order[sample : sample + self.batch_size]
                sample += len(numbers)
                after = Position(epoch, sample) if sample < len(order) else Position(epoch + 1, 0)
                yield Step(
                    epoch, [part.tolist() for part in torch.split(numbers, self.micro_batch_size)], after
                )
            epoch, sample = epoch + 1, 0


class _Request(NamedTuple):
    """What a loader worker is asked for: the samples, and the random state to fetch them with."""

    seed: int
    samples: list[int]


class _Repeatable:
    """Fetches and collates each micro-batch under a seed of its own, and leaves the random state as it was.

    So random augmentation and masking depend on the position alone, not on the number of workers or on what
    went before.
    """

    def __init__(self, dataset: Dataset, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitems__(self, request: _Request) -> Any:
        """The collated batch; torch's DataLoader would take a list of samples as well."""
        before = random.getstate(), torch.get_rng_state()
        numpy = sys.modules.get("numpy")
        numpy_before = numpy.random.get_state() if numpy else None
        random.seed(request.seed)
        # Not torch.manual_seed: it would seed CUDA too.
        torch.default_generator.manual_seed(request.seed)
        if numpy:
            numpy.random.seed(request.seed % 2**32)
        try:
            fetch_all = getattr(self.dataset, "__getitems__", None)
            samples = fetch_all(request.samples) if fetch_all else [self.dataset[i] for i in request.samples]
            return self.collate(list(samples))
        finally:
            random.setstate(before[0])
            torch.set_rng_state(before[1])
            if numpy:
                numpy.random.set_state(numpy_before)


def _as_it_is(batch: Any) -> Any:
    return batch


def _ignore_signals(_worker: int) -> None:
    """A stop reaches the whole process group; the workers must outlive it until the step is done."""
    signal.set_wakeup_fd(-1)  # inherited over fork: a worker's signal is not the trainer's
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))


@contextmanager
def _signals_held() -> Iterator[None]:
    """While workers are forked, so that none comes before the worker ignores it. Other threads take them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def load(
    dataset: Dataset,
    steps: Iterator[Step],
    *,
    seed: int = 0,
    workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
) -> Iterator[Any]:
    """The collated micro-batches of `steps`, in order."""
    # Within an epoch no other micro-batch begins with the same sample.
    requests = (
        _Request(_mix(_mix(seed, step.epoch), samples[0]), samples)
        for step in steps
        for samples in step.micro_batches
    )
    loader: DataLoader[Any] = DataLoader(
        _Repeatable(dataset, collate or default_collate),  # type: ignore[arg-type]
        batch_sampler=requests,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator().manual_seed(seed),  # else it draws a seed from the global random state
    )
    with _signals_held():
        return iter(loader)


Stream = Generator[tuple[Step, Iterator[tuple[Any, float]]], None, None]
"""Each step with its micro-batches: (batch, its share of the step's samples)."""


class Batches:
    """The training set as an endless stream of optimizer steps from a position on."""

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        *,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.dataset, self.plan, self.workers = dataset, plan, workers
        self.collate, self.pin_memory = collate, pin_memory
        self.position = Position()

    def __iter__(self) -> Stream:
        """The caller takes all of a step's micro-batches, then sets `position` to `step.after`."""
        start = self.position
        stream = load(
            self.dataset,
            self.plan.steps(start),
            seed=self.plan.seed,
            workers=self.workers,
            collate=self.collate,
            pin_memory=self.pin_memory,
        )
        for step in self.plan.steps(start):
            shares = (len(numbers) / step.samples for numbers in step.micro_batches)
            yield step, ((next(stream), share) for share in shares)

    def state_dict(self) -> dict[str, Any]:
        return {**self.position._asdict(), "seed": self.plan.seed, "size": self.plan.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on at the saved position and in the saved order, even if the manifest's seed has changed."""
        if state["size"] != self.plan.size:
            raise CheckpointError(
                f"the checkpoint was made with {state['size']} training samples, and train_set now has "
                f"{self.plan.size}; the position in an epoch would mean other samples. "
                "Give it the same data, or use another checkpoint URI",
                reason=Reason.CHECKPOINT_INCOMPATIBLE,
            )
        self.plan = replace(self.plan, seed=state["seed"])
        self.position = Position(state["epoch"], state["sample"])
