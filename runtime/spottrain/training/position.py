"""`LoopPosition`: where a custom loop is in its data, and whether that is what its `Run` counts.

The Run does not own the loop. It sees from outside which passes begin, how many batches are taken and how
many steps are counted. Where these do not add up, a resume would train on other samples: an error says so.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from spottrain.data.adapters import length, require_sampler_state
from spottrain.data.sampler import BatchSampler
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.worker_signals import protect


class LoopPosition:
    """Position in the data: that of a loader or sampler of `spottrain.data`, or a loader's own state."""

    def __init__(self, given: Any, world: World) -> None:
        self._ranks = world.size
        self.given = given is not None
        self.cursor = cursor_of(given)
        """The position of the loader or sampler, if it is one of `spottrain.data`."""
        self._object = given if self.cursor is None else self.cursor
        self.of_loader = self.given and self.cursor is None
        """Whether it is the state of a loader, which only `Run.batches` and `Run.ahead` see passes of."""
        self.shared = not self.given or self.cursor is not None or bool(getattr(given, "elastic", False))
        """Whether its state is the same on all ranks."""
        if self.given and not has_state(self._object):
            raise ConfigurationError(
                f"Run(data=...) is a {type(given).__name__} without state_dict() and load_state_dict(), so "
                "it cannot resume at its position; use spottrain.data.loader(dataset, batch_size=...) "
                "instead, a DataLoader over a spottrain.data.BatchSampler, or torchdata's StatefulDataLoader"
            )
        if self.of_loader:
            require_sampler_state(given, "Run(data=...)")
        self.taken = 0
        """Batches that `Run.batches` has given since the last step."""
        self._steps = 0
        """Of this attempt."""
        self._takes: list[int] = []
        """`taken` at each step."""
        self._unknown: dict[int, int] = {}
        """Batches that DataLoaders which are not saved had given at the first step."""
        protect(given)

    def advance(self, others: Collection[Any] | None) -> None:
        """Moves on by a step.

        Args:
            others: what else is saved, such as a second loader; None: the loop may take any loader.

        Raises:
            ConfigurationError: a resume after this step would begin at other samples.
        """
        self._steps += 1
        if self.of_loader:  # it may be around any DataLoader
            self._require_not_ahead()
            return
        if self.cursor is not None:
            if self.cursor.begun is None:
                raise ConfigurationError(
                    "the loop does not iterate over the loader that is given as Run(data=...), so a resume "
                    "would begin at other samples: give the Run the loader that the loop iterates over"
                )
            self.cursor.advance()
        if others is not None and self._steps <= 2:
            self._require_known(others)

    def _require_not_ahead(self) -> None:
        """Raises ConfigurationError if the first step took a batch more than each of the next three."""
        if self._steps <= 4:
            self._takes.append(self.taken)
        self.taken = 0
        first, *more = self._takes[:4]
        if self._steps == 4 and more == [first - 1] * 3 and more[0]:
            raise ConfigurationError(
                "the loop draws its next batch before it calls step_completed(), so a resume would leave it "
                "out: iterate over run.ahead(loader)"
            )

    def _require_known(self, others: Collection[Any]) -> None:
        """Raises ConfigurationError if the loop takes batches from a DataLoader whose position is not saved.

        An evaluation may have left an iterator of its own: only those count that the second step has used.
        """
        saved = [self._object, *others]
        cursors = [each for each in map(cursor_of, saved) if each is not None]
        iterators = [getattr(each, "_iterator", None) for each in saved]
        before, self._unknown = self._unknown, {}
        for each in _iterators_in_use():
            cursor = cursor_of(each._index_sampler)
            if cursor is not None and any(cursor is known for known in cursors):
                if cursor.taken is None and cursor is self.cursor:
                    cursor.require_taken(each._num_yielded)
            elif not any(each is known for known in iterators):
                self._unknown[id(each)] = each._num_yielded
                if self._steps == 2 and each._num_yielded != before.get(id(each)):
                    kind = type(each._dataset).__name__
                    raise ConfigurationError(
                        f"the loop takes batches from a DataLoader over a {kind} that the Run does not know, "
                        "so after an interruption they would be others: write `loader = "
                        "spottrain.data.loader(dataset, ...)` in its place, which takes shuffle= or "
                        "sampler=, and `spottrain.Run(data=loader)`. A second loader goes into "
                        "extra={'second': loader}, with loader.advance() before run.step_completed(). One of "
                        "an evaluation is iterated over afresh in each: `for batch in loader`"
                    )

    @property
    def epoch(self) -> int | None:
        """Epoch of the data; None if only the loop knows it."""
        return None if self.cursor is None else self.cursor.position.epoch

    @property
    def samples(self) -> int:
        """Samples per step, over all ranks; 0: unknown."""
        return 0 if self.cursor is None else self.cursor.plan.global_batch_size

    def state(self) -> dict[str, Any] | None:
        return {"ranks": self._ranks, "state": self._object.state_dict()} if self.given else None

    def load(self, saved: Mapping[str, Any] | None) -> str | None:
        """Restores it. Returns None, or a sentence that says why it does not fit. Raises CheckpointError."""
        if (saved is not None) != self.given:
            was, now = ("with", "without") if saved is not None else ("without", "with")
            return f"it was saved {was} data=, and this Run is created {now} it"
        if saved is None:
            return None
        if not self.shared and saved["ranks"] != self._ranks:
            return (
                f"{type(self._object).__name__} has one position per rank, and the number of ranks changed "
                f"from {saved['ranks']} to {self._ranks}; resume with {saved['ranks']} ranks, or use "
                "spottrain.data.loader"
            )
        self._object.load_state_dict(saved["state"])
        return None


def has_state(each: Any) -> bool:
    return hasattr(each, "state_dict") and hasattr(each, "load_state_dict")


def cursor_of(data: Any) -> BatchSampler | None:
    """Returns the position of a loader or sampler of `spottrain.data`, or of a DataLoader over one."""
    places = (data, getattr(data, "batch_sampler", None), getattr(data, "sampler", None))
    return next((each for each in places if isinstance(each, BatchSampler)), None)


def _iterators_in_use() -> list[Any]:
    """Returns the iterators of torch's DataLoaders that have begun their pass and not ended it.

    The collector knows them, wherever the loop holds them: in a generator, a thread, `itertools`.
    """
    kinds, more = {_BaseDataLoaderIter}, [_BaseDataLoaderIter]
    while more:
        more = [kind for each in more for kind in each.__subclasses__()]
        kinds.update(more)
    found: list[Any] = [each for each in gc.get_objects() if type(each) in kinds]
    return [each for each in found if 0 < each._num_yielded < length(each._index_sampler)]
