"""Resumes a plain DataLoader within an epoch of Lightning's Trainer, which would begin its data again.

The batches of an epoch follow from the random state when the loader's iterator is made, and from that when
the first batch is fetched. Both are part of a checkpoint. A resume makes the iterator from them, reads the
batches that were used, and sets the random state of the last step before the next batch is fetched. Of a
loader without a length Lightning fetches one batch ahead of the step: that one has a random state of its own.
Random state is the global one, and that of the generators of the loader and its samplers.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch.utils.data import DataLoader

from spottrain.core import log, patches
from spottrain.integrations.generators import (
    generators,
    is_sized,
    random_state,
    set_generators,
    set_random_state,
)

WARNING: Final = "You're resuming from a checkpoint that ended before the epoch ended"

PERSISTENT: Final = (
    "persistent_workers=True: the random state of the loader's workers goes on from epoch to epoch, and is "
    "not saved. After an interruption random numbers that are drawn in them differ; the order of the samples "
    "does not. Leave it out for a training that is exact"
)


class LoaderPosition:
    """The position in the only train loader of `trainer`, unless the loader has a state of its own.

    `before_batch` is called before the first batch after a resume is fetched.
    """

    def __init__(self, trainer: Any, before_batch: Callable[[], None]) -> None:
        self._trainer, self._before_batch = trainer, before_batch
        self._made: Any = None
        self._first: Any = None
        """Random states when this epoch's iterator was made, and when its first batch was fetched."""
        self._before: dict[int, Any] = {}
        """Random states before the last two batches were fetched, by their numbers."""
        self._loader: Any = None
        """The loader that is followed."""
        self._renewed = self._advised = False
        """Whether this epoch goes on with the workers of the one before; whether `PERSISTENT` was logged."""
        self._saved: dict[str, Any] | None = None
        self._generators: Mapping[str, Any] = {}
        """States of the generators in the checkpoint."""

    def state(self) -> dict[str, Any] | None:
        """Returns the position for a checkpoint; None if it is not known. No batches: the end of an epoch."""
        if self._loader is None:
            return None
        epoch_loop = self._trainer.fit_loop.epoch_loop
        position: dict[str, Any] = {"generators": generators(self._loader)}
        if self._first is None or epoch_loop._num_ready_batches_reached():
            return position
        used = epoch_loop.batch_progress.current.ready
        within = {"made": self._made, "first": self._first, "batches": used, "renewed": self._renewed}
        return position | within | {"ahead": self._before.get(used)}

    def load(self, saved: dict[str, Any] | None) -> None:
        """Makes the next iterator begin at this position."""
        self._generators = (saved or {}).get("generators", {})
        self._saved = saved if saved is not None and "batches" in saved else None

    def restore_generators(self) -> None:
        """Sets the generators to their state in the checkpoint."""
        if self._loader is not None:
            set_generators(self._loader, {"generators": self._generators})

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Within the block, the train loader's iterators are followed."""
        usual = DataLoader.__iter__

        def iterate(loader: Any) -> Any:
            return self._iterate(loader, usual) if self._follows(loader) else usual(loader)

        undo = patches.replace(DataLoader, "__iter__", iterate)
        try:
            yield
        finally:
            undo()

    def _follows(self, loader: Any) -> bool:
        combined = self._trainer.fit_loop._combined_loader
        loaders = [] if combined is None else combined.flattened
        alone = len(loaders) == 1 and loaders[0] is loader
        return alone and self._trainer.training and not hasattr(loader, "state_dict")

    def _iterate(self, loader: Any, usual: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        self._loader = loader
        if loader.persistent_workers and not self._advised:
            self._advised = True
            log.event("advice", about="attach", text=PERSISTENT)
        if saved is not None:
            return self._resume(saved, lambda: usual(loader), ahead=not is_sized(loader))
        self._renewed = loader.persistent_workers and loader._iterator is not None
        self._made, self._first = random_state(loader), None
        return self._begin(usual(loader))

    def _begin(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._first = random_state(self._loader)
        yield from self._fetch(batches, 0)

    def _fetch(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """Yields the batches, of which the next one has the number `first`."""
        for number in itertools.count(first):
            last = self._before.get(number - 1)
            self._before = {number - 1: last, number: random_state(self._loader)}
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _resume(
        self, saved: dict[str, Any], make: Callable[[], Iterator[Any]], *, ahead: bool
    ) -> Iterator[Any]:
        """Makes the iterator when its first batch is fetched: by then the sampler knows its epoch.

        `ahead`: Lightning fetches a batch while it trains on the one before, because the end is not known.
        """
        warnings.filterwarnings("ignore", message=WARNING)
        loader, now = self._loader, random_state(self._loader)
        self._made, self._first = saved["made"], saved["first"]
        self._renewed = saved.get("renewed", False)
        if self._renewed:
            make()  # starts the workers, for which torch draws a number
        set_random_state(loader, self._made)
        batches = make()
        set_random_state(loader, self._first)
        for _ in range(saved["batches"]):
            next(batches, None)
        used, before_ahead = saved["batches"], saved.get("ahead") if ahead else None
        if before_ahead is not None:
            set_random_state(loader, before_ahead, in_workers=loader.num_workers > 0)
            yield from itertools.islice(self._fetch(batches, used), 1)
            used += 1
        else:
            set_random_state(loader, now)
        if before_ahead is not None or not ahead:
            self._before_batch()
        yield from self._fetch(batches, used)
