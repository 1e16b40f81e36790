"""Fetches micro-batches of a map-style set, and has loader workers outlive a SIGTERM. Called by `batches`,
`evaluation`, `stream`, `sampler`.

Each micro-batch is fetched under a seed of its own, so random augmentation and masking depend on the position
alone, not on the number of workers or on what went before.
"""

from __future__ import annotations

import atexit
import multiprocessing
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Final, NamedTuple, cast
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, default_collate

from spottrain.data.plan import Dataset, Step
from spottrain.data.shuffle import mix

Collate = Callable[[list[Any]], Any]
_OPEN: Final[WeakSet[Any]] = WeakSet()
"""Iterators of loaders that may have workers."""


class Request(NamedTuple):
    """What a loader worker is asked for: the samples, and the random state to fetch them with."""

    seed: int
    samples: list[int]


def request(seed: int, epoch: int, samples: list[int]) -> Request:
    """Within an epoch no other micro-batch begins with the same sample, but a filler, which is the same."""
    return Request(mix(mix(seed, epoch), samples[0]), samples)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, torch's (on the CPU) and numpy's random state are `seed`'s inside, and as before outside."""
    before = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    numpy_before = numpy.random.get_state() if numpy else None
    random.seed(seed)
    # Not torch.manual_seed: it would seed CUDA too.
    torch.default_generator.manual_seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        if numpy:
            numpy.random.set_state(numpy_before)


class Repeatable:
    """Fetches and collates each micro-batch under a seed of its own."""

    def __init__(self, dataset: Dataset, collate: Collate) -> None:
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: Request) -> Any:
        """The collated batch; torch's DataLoader would take a list of samples as well."""
        with seeded(request.seed):
            fetch_all = getattr(self.dataset, "__getitems__", None)
            samples = fetch_all(request.samples) if fetch_all else [self.dataset[i] for i in request.samples]
            return self.collate(list(samples))


def as_it_is(batch: Any) -> Any:
    return batch


def ignore_signals(_worker: int = 0) -> None:
    """A `worker_init_fn`: a stop reaches the process group, and workers must outlive it for this step."""
    signal.set_wakeup_fd(-1)  # inherited over fork: a worker's signal is not the trainer's
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))


def _ignore_signals_then(after: Callable[[int], Any], worker: int) -> None:
    ignore_signals(worker)
    after(worker)


def protect(loader: Any) -> None:
    """Has the workers of a person's own DataLoader ignore signals too, before their own `worker_init_fn`."""
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
        return
    own = loader.worker_init_fn
    if own is ignore_signals or getattr(own, "func", None) is _ignore_signals_then:
        return
    # A partial of a module's function, because a spawned worker gets it pickled.
    loader.worker_init_fn = partial(_ignore_signals_then, own) if own else ignore_signals


def protect_all() -> None:
    """The same with every DataLoader of this process from now on, such as that of an evaluation."""
    _protect_class(DataLoader)
    stateful = sys.modules.get("torchdata.stateful_dataloader")
    if stateful is not None:
        _protect_class(stateful.StatefulDataLoader)


def _protect_class(kind: Any) -> None:
    start = kind.__dict__.get("_get_iterator")
    if start is None or getattr(start, "protects", False):
        return

    @wraps(start)
    def protected(loader: Any) -> Any:
        if not loader.num_workers:
            return start(loader)
        protect(loader)
        with signals_held() if _forks(loader) else nullcontext():
            return end_at_exit(start(loader))

    protected.protects = True  # type: ignore[attr-defined]
    kind._get_iterator = protected


def _forks(loader: Any) -> bool:
    """A server that forks later would hold the signals for ever, of all that it forks."""
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    return bool(context.get_start_method() == "fork")


def end_workers(*iterators: Any) -> None:
    """Of torch's and torchdata's loader iterators, which a loader may keep.

    `None` and what has no workers is passed over.
    """
    for iterator in iterators:
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


def end_at_exit(iterator: Any = None) -> Any:
    """The iterator, whose workers the end of the process ends, if nobody did before.

    Else it would not end: `multiprocessing` sends daemons a SIGTERM, which they ignore, and waits for them.
    """
    if hasattr(iterator, "_shutdown_workers"):
        _OPEN.add(iterator)
    # Registered last to be called first: torch's own handler waits 5 s for each persistent worker.
    atexit.unregister(_end_the_rest)
    atexit.register(_end_the_rest)
    return iterator


def worker_pids() -> tuple[int, ...]:
    """Of the loaders of this process that are at work. From any thread: asks none of them anything."""
    try:
        open_ones = tuple(_OPEN)
    except RuntimeError:  # one was added meanwhile: the next call sees it
        return ()
    return tuple(
        worker.pid
        for each in open_ones
        if not getattr(each, "_shutdown", False)
        for worker in getattr(each, "_workers", ())
        if worker.pid is not None
    )


def _end_the_rest() -> None:
    end_workers(*_OPEN)
    rest = [child for child in multiprocessing.active_children() if child.daemon]
    if rest:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises where a worker is killed
    for child in rest:
        child.terminate()
    for child in rest:
        child.join(1.0 / len(rest))
        child.kill()


@contextmanager
def signals_held() -> Iterator[None]:
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
    collate: Collate | None = None,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
) -> Iterator[Any]:
    """The collated micro-batches of `steps`, in order.

    prefetch_factor: of torch's DataLoader: micro-batches that each worker is ahead (None: 2). One iterator
    goes through all epochs, so workers live as long as it does: persistent_workers has nothing to add.
    """
    requests = (request(seed, step.epoch, samples) for step in steps for samples in step.micro_batches)
    loader: DataLoader[Any] = DataLoader(
        Repeatable(dataset, collate or default_collate),  # type: ignore[arg-type]
        batch_sampler=requests,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=as_it_is,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor if workers else None,
        worker_init_fn=ignore_signals,
        generator=torch.Generator().manual_seed(seed),  # else it draws a seed from the global random state
    )
    with signals_held():
        return cast(Iterator[Any], end_at_exit(iter(loader)))
