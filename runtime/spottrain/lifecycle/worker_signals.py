"""Makes DataLoader workers outlive a signal to the process group, and ends them with the process.

A stop reaches every process of the group. The trainer still needs its workers for the step it is in, so they
ignore SIGTERM and SIGINT.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Final
from weakref import WeakSet

from torch.utils.data import DataLoader

_OPEN: Final[WeakSet[Any]] = WeakSet()
"""Iterators of loaders that may have workers."""


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
