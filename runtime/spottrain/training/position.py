"""`LoopPosition`: where a custom loop is, in its steps and in its data, and what is saved of that.

The Run does not own the loop. It sees from outside which passes begin, how many batches are taken and how
many steps are counted. Where these do not add up, a resume would train on other samples: an error says so.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum, auto
from itertools import islice
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from spottrain.core import device as devices
from spottrain.data.adapters import length, require_sampler_state
from spottrain.data.sampler import BatchSampler
from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.worker_signals import protect


class DrawnBy(Enum):
    """What gives the loop its batches, as far as is seen: the script itself, or a method of the Run."""

    SCRIPT = auto()
    BATCHES = auto()
    AHEAD = auto()


class LoopPosition:
    """Counts steps, epochs and passes, and knows the position in the data: a sampler's, or a loader's own.

    Args:
        given: `Run(data=...)`.
        world: ranks of this attempt.
        others: what else is saved, such as a second loader; None: the loop may take any loader.
    """

    def __init__(self, given: Any, world: World, others: Collection[Any] | None) -> None:
        self._ranks, self._others = world.size, others
        self.given = given is not None
        self.cursor = cursor_of(given)
        """The position of the loader or sampler, if it is one of `spottrain.data`."""
        self._object = given if self.cursor is None else self.cursor
        self.of_loader = self.given and self.cursor is None
        """Whether it is the state of a loader, which only `Run.batches` and `Run.ahead` see passes of."""
        self.is_shared = not self.given or self.cursor is not None or bool(getattr(given, "elastic", False))
        """Whether its state is the same on all ranks."""
        if self.given and not has_state(self._object):
            raise ConfigurationError(
                f"Run(data=...) is a {type(given).__name__} without state_dict() and load_state_dict(), so "
                "it cannot resume at its position; use spottrain.data.loader(dataset, batch_size=...) "
                "instead, a DataLoader over a spottrain.data.BatchSampler, or torchdata's StatefulDataLoader"
            )
        if self.of_loader:
            require_sampler_state(given, "Run(data=...)")
        protect(given)
        # What is saved:
        self.step = self.passes = 0
        """Optimizer steps, and passes that have ended."""
        self.epoch = self.epoch_began = 0
        """The present epoch of `Run.epochs`, and the step at which it began."""
        self.epoch_random: dict[str, Any] | None = None
        """Without `data`: the random state with which that epoch began."""
        self.drawn: list[Any] = []
        """The batch that `Run.ahead` has drawn last, by `with_devices`, unless the position in the data is
        enough to draw it."""
        # What the Run has seen of the loop:
        self.drawn_by = DrawnBy.SCRIPT
        self.reads = 0
        """How often it has read its position; if never, it starts at 0 in each attempt."""
        self.counts_epochs = False
        """Whether it has read its epoch before its first pass, as `range(run.epoch, n)` does."""
        self.skips = False
        """Whether it leaves out what is done of an epoch by itself."""
        self.first_pass_after_resume = False
        """Whether it was restored and no pass has begun since."""
        self.taken = 0
        """Batches that `Run.batches` has given since the last step."""
        self._steps = 0
        """Of this attempt."""
        self._takes: list[int] = []
        """`taken` at each step."""
        self._unknown: dict[int, int] = {}
        """Batches that DataLoaders which are not saved had given at the first step."""

    # --- what is saved --------------------------------------------------------------------------------
    def shared(self) -> dict[str, Any]:
        """Returns what is the same on all ranks."""
        return {
            "step": self.step,
            "passes": self.passes,
            "epoch": self.epoch,
            "epoch_began": self.epoch_began,
            "data": self._data() if self.is_shared else None,
        }

    def own(self) -> dict[str, Any]:
        """Returns what is this rank's alone."""
        return {
            "random": devices.random_state(),
            "data": None if self.is_shared else self._data(),
            "ahead": self.drawn,
            "epoch_random": self.epoch_random,
        }

    def _data(self) -> dict[str, Any] | None:
        return {"ranks": self._ranks, "state": self._object.state_dict()} if self.given else None

    def load(self, saved: Mapping[str, Any], own: Mapping[str, Any], new_rank: bool) -> str | None:
        """Restores all but the random state.

        Returns None, or a sentence that says why it does not fit. Raises CheckpointError.
        """
        mismatch = self._load_data(saved["data"] if self.is_shared else own["data"])
        self.step, self.passes = saved["step"], saved.get("passes", 0)
        self.epoch, self.epoch_began = saved.get("epoch", 0), saved.get("epoch_began", self.step)
        self.first_pass_after_resume = self.step > 0
        self.drawn = [] if new_rank else own.get("ahead", [])
        self.epoch_random = None if new_rank else own.get("epoch_random")
        return mismatch

    def _load_data(self, saved: Mapping[str, Any] | None) -> str | None:
        if (saved is not None) != self.given:
            was, now = ("with", "without") if saved is not None else ("without", "with")
            return f"it was saved {was} data=, and this Run is created {now} it"
        if saved is None:
            return None
        if not self.is_shared and saved["ranks"] != self._ranks:
            return (
                f"{type(self._object).__name__} has one position per rank, and the number of ranks changed "
                f"from {saved['ranks']} to {self._ranks}; resume with {saved['ranks']} ranks, or use "
                "spottrain.data.loader"
            )
        self._object.load_state_dict(saved["state"])
        return None

    # --- passes ---------------------------------------------------------------------------------------
    def begin_pass(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Begins a pass over `known` batches. The first one after a resume leaves the random state unchanged.

        What a loader draws for its workers and order was drawn when the interrupted pass began.

        Raises ConfigurationError if nothing of the position in the loader is saved.
        """
        if not (self.given or isinstance(loader, Iterator) or self.skips):
            raise ConfigurationError(
                f"the loop iterates over a {type(loader).__name__}, of which nothing is saved, so each "
                "attempt would begin it again: write `data = spottrain.data.loader(dataset, ...)`, for "
                "batches of another kind `data = spottrain.data.Skipping(batches)`; then "
                "`spottrain.Run(data=data)` and run.batches(data) or run.ahead(data). Batches that are drawn "
                "at random each come from a generator or another iterator"
            )
        if not self.first_pass_after_resume or self.cursor is not None:
            return self.known(iter(loader))
        self.first_pass_after_resume, before = False, devices.random_state()
        stream = iter(loader)
        devices.set_random_state(before)
        return self.known(stream)

    def known(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches. Raises ConfigurationError if they do not follow from what is saved.

        The second one tells: without `data` it must be drawn from the random state, or from the position.
        """
        stream = iter(batches)
        if not (self.given or self._others is None or self._others or self.skips):
            first = list(islice(stream, 1))
            yield from first
            before, reads = devices.random_state(), self.reads
            second = list(islice(stream, 1))
            constant = all(map(operator.is_, first, second))
            if not (constant or self.reads > reads or not devices.same(before, devices.random_state())):
                raise ConfigurationError(
                    "the batches are not drawn from the random numbers of Python, NumPy or torch, and "
                    "nothing else of their position is saved, so each attempt would begin with the first "
                    "one: give spottrain.Run(data=...) what they come from (spottrain.data.loader, or "
                    "spottrain.data.Skipping around a list or another loader), or a generator that they are "
                    "drawn with as extra={'generator': generator}"
                )
            yield from second
            del first, second
        yield from stream

    # --- steps ----------------------------------------------------------------------------------------
    def advance(self) -> None:
        """Moves on in the data by a step.

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
        if self._others is not None and self._steps <= 2:
            self._require_known(self._others)

    def _require_not_ahead(self) -> None:
        """Raises ConfigurationError if the first step took a batch more than each of the next three."""
        if self._steps <= 4:
            self._takes.append(self.taken)
        self.taken = 0
        first, *more = self._takes
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
    def is_cheap(self) -> bool:
        """Whether it can be noted after each step, so that another thread may save it."""
        return self.is_shared

    @property
    def in_data(self) -> Any:
        """The position in the data, which also moves when an epoch begins; None: unknown."""
        return None if self.cursor is None else self.cursor.position

    @property
    def epoch_of_data(self) -> int | None:
        """None if only the loop knows it."""
        return None if self.cursor is None else self.cursor.position.epoch

    @property
    def samples(self) -> int:
        """Samples per step, over all ranks; 0: unknown."""
        return 0 if self.cursor is None else self.cursor.plan.global_batch_size


class StepBoundary(devices.Boundary):
    """State to undo a partial step. `in_data`: where it begins."""

    def __init__(self, modules: Iterable[torch.nn.Module], position: LoopPosition) -> None:
        super().__init__(modules)
        self._position = position
        self.in_data, self._drawn = position.in_data, position.drawn

    def restore(self) -> None:
        super().restore()
        self._position.drawn = self._drawn


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
