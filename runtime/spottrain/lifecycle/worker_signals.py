"""Makes DataLoader workers ignore stop signals, and ends them with the process.

A stop reaches every process of the group. The trainer still needs its workers for the current step, so they
ignore SIGTERM, SIGINT and SIGHUP.
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

from spottrain.core import patches
from spottrain.core.preemption import SIGNALS

_OPEN: Final[WeakSet[Any]] = WeakSet()
"""Loader iterators that may have workers."""


def ignore_signals(_worker: int = 0) -> None:
    """A `worker_init_fn` that ignores stop signals: the current step still needs the worker."""
    signal.set_wakeup_fd(-1)  # inherited by fork: a worker's signal must not wake the trainer
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _ignore_signals_then(after: Callable[[int], Any], worker: int) -> None:
    ignore_signals(worker)
    after(worker)


def protect(loader: Any) -> None:
    """Makes workers of a user's DataLoader ignore signals before the user's `worker_init_fn` runs."""
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
        return
    own = loader.worker_init_fn
    if own is ignore_signals or getattr(own, "func", None) is _ignore_signals_then:
        return
    # A partial of a module-level function, because a spawned worker receives it pickled.
    loader.worker_init_fn = partial(_ignore_signals_then, own) if own else ignore_signals


def protect_all() -> None:
    """Protects every DataLoader of this process from now on, such as that of an evaluation."""
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
    patches.replace(kind, "_get_iterator", protected)


def _forks(loader: Any) -> bool:
    """Whether workers are forked directly; a fork server would pass blocked signals to all children."""
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    return bool(context.get_start_method() == "fork")


def end_workers(*iterators: Any) -> None:
    """Ends the workers of torch's and torchdata's loader iterators, which a loader may keep.

    `None` and iterators without workers are ignored.
    """
    for iterator in iterators:
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


def end_at_exit(iterator: Any = None) -> Any:
    """Registers the iterator's workers to be ended at exit, and returns the iterator.

    Otherwise the process would hang: `multiprocessing` sends daemons a SIGTERM, which they ignore, and waits.
    """
    if hasattr(iterator, "_shutdown_workers"):
        _OPEN.add(iterator)
    # Registered last to run first: torch's own handler waits 5 s for each persistent worker.
    atexit.unregister(_end_the_rest)
    atexit.register(_end_the_rest)
    return iterator


def _end_the_rest() -> None:
    end_workers(*_OPEN)
    rest = [child for child in multiprocessing.active_children() if child.daemon]
    if rest:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a worker is killed
    for child in rest:
        child.terminate()
    for child in rest:
        child.join(1.0 / len(rest))
        child.kill()


@contextmanager
def signals_held() -> Iterator[None]:
    """Blocks signals until forked workers ignore them. Other threads still receive them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
