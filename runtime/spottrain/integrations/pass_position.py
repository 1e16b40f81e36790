"""The position in a pass over a DataLoader, for loops that skip used batches by Accelerate.

Accelerate's `skip_first_batches` leaves out as many batches as were used. Which ones these are follows from
the random state when the loader's iterator is made: a sampler may draw its order from it. The loader also
reads one batch ahead of the step, from the random state before that step, so what a dataset or a collator
draws for it follows from that. A checkpoint holds all of these states, and a resume sets each of them before
the same read. Random state is the global one, and that of the generators of the loader, of its samplers and
of its dataset.

Not known here: the random state of loader workers that skipped batches by number, and a sampler's other
state, such as a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from accelerate.data_loader import DataLoaderDispatcher, SkipBatchSampler
from torch.utils.data import DataLoader

from spottrain.core import device as devices
from spottrain.core import log, patches
from spottrain.integrations.generators import random_state, set_generators, set_random_state

WORKERS: Final = (
    "the order of the samples is that of an uninterrupted training, but the loader's workers start afresh: "
    "random numbers that a dataset or collator draws in them differ. For a training that is exact draw none, "
    "or leave num_workers at 0"
)


class PassPosition:
    """Follows one pass after the other over a loader that Accelerate has prepared, or a plain one.

    `expect` comes before each pass, `go_on` when its first batch was read, `step_done` after each step.
    """

    def __init__(self) -> None:
        self._loader: Any = None
        """The torch DataLoader that is read; None before the first pass, and on a rank that reads nothing."""
        self._made: Any = None
        """Random state when the iterator of this pass was made."""
        self._renewed = False
        """Whether this pass goes on with the workers of the one before."""
        self._before: dict[int, Any] = {}
        """Random state before each read that no finished step has used, by the number of the read."""
        self._reads = 1
        """Reads of this rank for each batch that the loop gets."""
        self._batches = 0
        """Batches that the finished steps of this pass have used."""
        self._goes_on: Any = None
        """Random state in which the loop goes on after a resume."""
        self._release: Callable[[], None] | None = None
        """Puts `DataLoader.__iter__` back while a DataLoader is waited for."""

    def expect(self, loader: Any, *, first: bool, saved: Mapping[str, Any] | None = None) -> None:
        """Follows the pass that begins now: the next DataLoader that is iterated over.

        Args:
            loader: as Accelerate has prepared it, or plain.
            first: whether it is the first pass of the training.
            saved: what `state` returned, if the pass goes on there; used batches are then skipped.
        """
        self.release()
        alone = not isinstance(loader, DataLoaderDispatcher) or loader.split_batches
        self._reads = 1 if alone else loader.state.num_processes
        self._before, self._batches = {}, 0
        within = saved is not None and saved["batches"] > 0 and saved["made"] is not None
        if saved is not None and within:
            self._batches, self._goes_on = saved["batches"], saved["random"]
        usual: Any = DataLoader.__iter__

        def iterate(read: Any) -> Iterator[Any]:
            self.release()
            if saved is not None and within:
                return self._resume(read, usual, saved)
            if saved is not None:
                set_generators(read, saved["random"])
            return self._begin(read, usual, first)

        self._release = patches.replace(DataLoader, "__iter__", iterate)

    def release(self) -> None:
        """Ends the wait for a DataLoader; a rank that reads nothing iterates over none."""
        if self._release is not None:
            self._release()
            self._release = None

    def go_on(self) -> None:
        """Sets the random state in which an interrupted loop goes on. Call it once batches were read."""
        self.release()
        if self._goes_on is not None:
            state, self._goes_on = self._goes_on, None
            devices.set_random_state(state)

    def step_done(self, batches: int) -> None:
        """Notes that the steps of this pass have used `batches` of it."""
        self._batches = batches
        used = batches * self._reads
        self._before = {number: state for number, state in self._before.items() if number >= used}

    def state(self) -> dict[str, Any]:
        """Returns the position after the last step."""
        return {
            "batches": self._batches,
            "made": self._made,
            "renewed": self._renewed,
            "ahead": self._before.get(self._batches * self._reads),
            "random": devices.random_state() if self._loader is None else random_state(self._loader),
        }

    def _begin(self, loader: Any, usual: Callable[[Any], Iterator[Any]], first: bool) -> Iterator[Any]:
        self._loader, self._renewed = loader, loader.persistent_workers and not first
        self._made = random_state(loader)
        if self._renewed and loader._iterator is None:
            usual(loader)  # starts the workers, for which torch draws a number
            devices.set_random_state(self._made)
        skipping = _skipping(loader)  # from a checkpoint of the script's own
        return self._read(usual(loader), 0 if skipping is None else skipping.skip_batches, {})

    def _resume(
        self, loader: Any, usual: Callable[[Any], Iterator[Any]], saved: Mapping[str, Any]
    ) -> Iterator[Any]:
        self._loader, self._made, self._renewed = loader, saved["made"], saved["renewed"]
        skipping = _skipping(loader)
        if skipping is not None and loader.num_workers:
            log.event("advice", about="resume", text=WORKERS)
        next_read = saved["batches"] * self._reads
        if skipping is not None:
            skipping.skip_batches = next_read  # Accelerate forgets that it reads one for each rank
        if self._renewed:
            usual(loader)
        set_random_state(loader, saved["made"])
        set_before = {next_read: saved["random"]}
        if saved["ahead"] is not None:
            set_before = {next_read: saved["ahead"], next_read + self._reads: saved["random"]}
        batches = usual(loader)
        if skipping is not None and not loader.num_workers:
            batches._sampler_iter = _skip(skipping)  # type: ignore[attr-defined]
        return self._read(batches, 0 if skipping is None else next_read, set_before)

    def _read(self, batches: Iterator[Any], number: int, set_before: dict[int, Any]) -> Iterator[Any]:
        """Yields the batches. `number`: of the first read; `set_before`: random states by number."""
        loader = self._loader
        while True:
            if number in set_before:
                set_random_state(loader, set_before[number], in_workers=loader.num_workers > 0)
            self._before[number] = random_state(loader)
            try:
                batch = next(batches)
            except StopIteration:
                return
            if self._goes_on is not None and number >= max(set_before, default=0):
                self._goes_on = devices.random_state()
            number += 1
            yield batch


def _skipping(loader: Any) -> SkipBatchSampler | None:
    """Returns the sampler by which Accelerate skips batches by their numbers, if it does."""
    samplers = (loader.batch_sampler, loader.sampler)
    return next((each for each in samplers if isinstance(each, SkipBatchSampler)), None)


def _skip(sampler: SkipBatchSampler) -> Iterator[Any]:
    """Skips now: a sampler that draws its order at the beginning does so before the next random state is set.

    One that draws as it goes draws the next batch after that.
    """
    batches: Iterator[Any] = iter(sampler.batch_sampler)
    for _ in range(sampler.skip_batches):
        next(batches, None)
    return batches
