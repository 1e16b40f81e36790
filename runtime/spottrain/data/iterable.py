"""`StreamBatches`: an iterable loader as an endless stream of optimizer steps.

    base (the loader's own state) --- steps done since: `behind` ---> position

The loader's `state_dict()` may take seconds. So it is called only for a save, and only if the loader is
exactly at the position. If the loader is ahead (a stop within a step, or while waiting for data), the saved
state is the last base and the number of steps since. A resume fetches those steps again and drops them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

from spottrain.contract import Reason
from spottrain.data.adapters import require_resumable, samples_in
from spottrain.data.order import mix, seeded
from spottrain.data.plan import Position, Step, Stream, of_checkpoint
from spottrain.errors import CheckpointError, ConfigurationError
from spottrain.lifecycle.worker_signals import end_at_exit, end_workers, protect, signals_held

_MISSING = object()


class Resumable(Protocol):
    """A loader of one rank that yields micro-batches and can save and restore its position.

    Each `iter()` is one pass. torchdata's StatefulDataLoader fits. The optional attribute `elastic` (default
    False) says that rank 0's state is valid on every rank and for any number of ranks.
    """

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _StreamPlace:
    """Position of a rank in the stream, at a step boundary."""

    epoch: int = 0
    steps: int = 0
    """Optimizer steps done in this epoch."""
    over: str = ""
    """How the pass ended, while the next one has not begun: `ended` (by the loader) or `cut` (by us)."""

    @property
    def position(self) -> Position:
        return Position(self.epoch + 1, 0) if self.over else Position(self.epoch, self.steps)


class StreamBatches:
    """A `Source` over a `Resumable`. All micro-batches of a step have the same weight.

    Args:
        loader: this rank's `Resumable`, over this rank's share of the data.
        accumulation: micro-batches per rank in an optimizer step.
        steps_per_epoch: None with one rank: the end of the loader ends the epoch; its last step may be
            smaller. None with several ranks: the loader must be endless, because ranks do not see each
            other's end. A number: optimizer steps per epoch on every rank; further batches are dropped.
        seed: seeds the random state while the loader runs; the script's own is restored after each call.

    Raises:
        ConfigurationError: a number is below 1, or the loader cannot be resumed.
    """

    per_rank = True

    def __init__(
        self,
        loader: Any,
        *,
        accumulation: int = 1,
        rank: int = 0,
        ranks: int = 1,
        steps_per_epoch: int | None = None,
        seed: int = 0,
    ) -> None:
        if accumulation < 1 or (steps_per_epoch is not None and steps_per_epoch < 1):
            raise ConfigurationError(
                f"accumulation {accumulation} and steps per epoch {steps_per_epoch}: at least 1 each"
            )
        require_resumable(loader)
        self.loader: Resumable = loader
        self.accumulation, self.rank, self.ranks = accumulation, rank, ranks
        self.steps_per_epoch, self.seed = steps_per_epoch, seed
        self.num_workers: int = getattr(loader, "num_workers", 0) or 0  # some loaders have None
        self._place = _StreamPlace()
        self._base: tuple[Any, _StreamPlace] = _MISSING, self._place
        self._behind = 0
        self._at_place = True
        """Whether the loader is at the position, and no thread is inside it."""
        self._lock = threading.Lock()
        self._pass: Iterator[Any] | None = None

    def __iter__(self) -> Stream:
        """Yields (step, iterator of (batch, share)). Take all micro-batches, then call `done(step)`.

        A step's micro-batches are all fetched before the first is yielded: their number sets their weight.
        """
        protect(self.loader)
        try:
            place = self._resume()
            while True:
                with self._lock:
                    self._at_place = False
                parts, place = self._take(place)
                share = 1 / (len(parts) * self.ranks)
                samples = sum(map(samples_in, parts)) * self.ranks
                step = Step(place.epoch, [], place.position, [share] * len(parts), samples)
                self._taken = place
                yield step, ((part, share) for part in parts)
        finally:
            end_workers(self._pass, getattr(self.loader, "_iterator", None))
            self._pass = None

    def done(self, step: Step) -> None:
        """Moves the position past `step`, which must be the last one yielded."""
        with self._lock:
            self._place = self._taken
            self._behind += 1
            self._at_place = True

    # --- state --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state at the last `done`.

        Thread-safe, also while another thread waits for the loader.
        """
        with self._lock:
            if self._at_place and self._behind:
                with seeded(self.seed):
                    taken = deepcopy(self.loader.state_dict())  # the loader goes on while this is uploaded
                self._base, self._behind = (taken, self._place), 0
            state, place = self._base
            fresh = state is _MISSING
            return {
                "stream": {} if fresh else {"loader": state},
                "epoch": place.epoch,
                "steps": place.steps,
                "over": place.over,
                "behind": self._behind,
                "rank": self.rank,
                "ranks": self.ranks,
                "accumulation": self.accumulation,
                "seed": self.seed,
            }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restores this rank's state, before the first step. None: the checkpoint has none of a stream.

        Raises CheckpointError if it is of another kind of data, rank, number of ranks or batch size.
        """
        if state is None or "stream" not in state:
            raise _incompatible(
                "it was made with a map-style train_dataset, and train_dataset is now a stream"
            )
        self._refuse_other(state)
        place = _StreamPlace(epoch=state["epoch"], steps=state["steps"], over=state["over"])
        self._base = state["stream"].get("loader", _MISSING), place
        self._behind, self.seed = state["behind"], of_checkpoint("seed", state["seed"], self.seed)
        self._place, self._at_place = place, False  # `_resume` brings both to the position

    def _refuse_other(self, state: dict[str, Any]) -> None:
        elastic = getattr(self.loader, "elastic", False)
        if (state["rank"], state["ranks"]) != (self.rank, self.ranks) and not elastic:
            raise _incompatible(
                f"its position is that of rank {state['rank']} of {state['ranks']}, and this is rank "
                f"{self.rank} of {self.ranks}; {_name(self.loader)} has one position per rank, so "
                f"resume with {state['ranks']} rank(s), or use a map-style train_dataset or an elastic stream"
            )
        if state["accumulation"] * state["ranks"] != self.accumulation * self.ranks and state["behind"]:
            raise _incompatible(
                f"{state['behind']} steps of {state['accumulation']} x {state['ranks']} micro-batches "
                f"must be fetched again, and now a step has {self.accumulation} x {self.ranks}: keep "
                "accumulation x ranks the same"
            )

    # --- the loader ---------------------------------------------------------------------------------
    def _resume(self) -> _StreamPlace:
        """Advances the loader to the position, and sets the base."""
        state, place = self._base
        if state is _MISSING:
            with seeded(self._seed_of(place)), signals_held():  # some loaders start their workers here
                self._base = deepcopy(self.loader.state_dict()), place
        else:
            self._load(state, place)
        for _ in range(self._behind):
            _, place = self._take(place)
        with self._lock:
            self._place, self._at_place = place, True
        return place

    def _load(self, state: Any, place: _StreamPlace) -> None:
        try:
            self.loader.load_state_dict(deepcopy(state))
            self._begin_pass(place)
            if place.over == "cut":
                # The loader goes on in the pass that was cut. A generator must run once to notice that.
                assert self._pass is not None
                with seeded(self._seed_of(place)):
                    next(self._pass, None)
                self._begin_pass(place)
        except (AssertionError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise _incompatible(
                f"{_name(self.loader)} refused its saved state ({type(error).__name__}: {error}); "
                "give it the same data, sampler and number of workers"
            ) from error

    def _begin_pass(self, place: _StreamPlace) -> None:
        self._pass = None  # before the next one's workers start
        with seeded(self._seed_of(place)), signals_held():
            self._pass = iter(self.loader)
        end_at_exit(self._pass)
        end_at_exit(getattr(self.loader, "_iterator", None))

    def _seed_of(self, place: _StreamPlace, part: int = -1) -> int:
        epoch, steps = place.position
        return mix(mix(mix(self.seed, epoch), steps), (part + 1) * self.ranks + self.rank)

    def _take(self, place: _StreamPlace) -> tuple[list[Any], _StreamPlace]:
        """Fetches the micro-batches of the next step. Returns them and the place after them."""
        if self._pass is None:
            self._begin_pass(place)
        if place.over:
            # A loader that was resumed at the end of a pass may end once more, or be in the next pass.
            place = _StreamPlace(epoch=place.epoch + 1)
        parts: list[Any] = []
        empty, over = False, ""
        while len(parts) < self.accumulation and not over:
            assert self._pass is not None
            try:
                with seeded(self._seed_of(place, len(parts))):
                    parts.append(next(self._pass))
            except StopIteration:
                if parts or place.steps:
                    self._refuse_end(place, len(parts))
                if parts:  # the step is smaller
                    over = "ended"
                    continue
                if empty:
                    raise ConfigurationError(
                        f"{_name(self.loader)} (train_dataset) yielded no batch to rank {self.rank} in a "
                        "whole pass: check that it has data, and that drop_last does not drop all of it"
                    ) from None
                empty = True
                place = _StreamPlace(epoch=place.epoch + 1) if place.steps else place
                self._begin_pass(place)
        place = replace(place, steps=place.steps + 1, over=over)
        if not over and self.steps_per_epoch is not None and place.steps >= self.steps_per_epoch:
            place = replace(place, over="cut")
        if place.over:
            self._pass = None
        return parts, place

    def _refuse_end(self, place: _StreamPlace, parts: int) -> None:
        """Raises ConfigurationError with several ranks or a given `steps_per_epoch`: the others go on."""
        if self.ranks == 1 and self.steps_per_epoch is None:
            return
        had = place.steps * self.accumulation + parts
        needed = "but steps_per_epoch was not given"
        if self.steps_per_epoch is not None:
            needed = f"fewer than steps_per_epoch {self.steps_per_epoch} x accumulation {self.accumulation}"
        fits = f"steps_per_epoch={max(1, had // self.accumulation)}"
        if self.ranks > 1:
            fits += " or less, as many as every rank has, or divide the data evenly"
        raise ConfigurationError(
            f"{_name(self.loader)} (train_dataset) of rank {self.rank} of {self.ranks} ended after {had} "
            f"micro-batches, {needed}: give {fits}"
        )


def _name(loader: Any) -> str:
    return type(loader).__name__


def _incompatible(why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's data position cannot be used: {why}", reason=Reason.CHECKPOINT_INCOMPATIBLE
    )
