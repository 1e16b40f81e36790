"""Anything that is no map-style set as an endless stream of optimizer steps. Called by `trainer`.

    base (the loader's own state) --- steps done since: `behind` ---> position

The loader's state may take seconds to get, so it is asked for only when a save is made, and only where the
loader stands at the position. Where it is further (a stop inside a step, or while data are awaited) the state
is the last base and the number of steps since then: after the resume those are fetched again and dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

from spottrain.contract import Reason
from spottrain.data.adapters import resumable, samples_in
from spottrain.data.dataloader import seeded
from spottrain.data.plan import Position, Step, Stream
from spottrain.data.shuffle import mix
from spottrain.data.worker_memory import Room
from spottrain.errors import CheckpointError, ConfigurationError
from spottrain.lifecycle.worker_signals import end_at_exit, end_workers, protect, signals_held

_MISSING = object()


class Resumable(Protocol):
    """A loader of one rank that yields micro-batches, pass after pass, and can go on where it was.

    torchdata's StatefulDataLoader is one. `elastic`, an attribute that may be absent (False): rank 0's state
    serves every rank, also where the number of ranks has changed.
    """

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where in the stream a rank is, at a step boundary."""

    epoch: int = 0
    steps: int = 0
    """Of this epoch."""
    over: str = ""
    """How the pass has ended, where the next one has not begun: `ended` (the loader said so) or `cut`."""

    @property
    def position(self) -> Position:
        return Position(self.epoch + 1, 0) if self.over else Position(self.epoch, self.steps)


class StreamBatches:
    """A `Source` over a `Resumable`: `accumulation` micro-batches make a step, each with the same weight.

    loader: this rank's own, over this rank's share of the data.
    steps_per_epoch: None with one rank: the end of the loader ends the epoch, with a smaller step if need be.
        None with several: the loader has no end, as they could not know that another one's has come.
        A number: an epoch has so many steps on every rank; what a longer one has left is left out.
    local_ranks: of this container, whose loaders share its memory.
    seed: of the random state in which the loader is called; it is put back after each call.
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
        local_ranks: int = 1,
    ) -> None:
        if accumulation < 1 or (steps_per_epoch is not None and steps_per_epoch < 1):
            raise ConfigurationError(
                f"accumulation {accumulation} and steps per epoch {steps_per_epoch}: at least 1 each"
            )
        self.loader: Resumable = resumable(loader, ranks=ranks)
        self.accumulation, self.rank, self.ranks = accumulation, rank, ranks
        self.steps_per_epoch, self.seed = steps_per_epoch, seed
        self.workers: int = getattr(loader, "num_workers", 0) or 0  # None: some say so
        held, context = (getattr(loader, name, None) for name in ("dataset", "multiprocessing_context"))
        self._room = Room(held, ranks=local_ranks, context=context)
        self._place = _Place()
        self._base: tuple[Any, _Place] = _MISSING, self._place
        self._behind = 0
        self._at_place = True
        """Whether the loader stands at the position, and nobody is inside of it."""
        self._lock = threading.Lock()
        self._pass: Iterator[Any] | None = None

    @property
    def position(self) -> Position:
        """Epoch, and steps of it that are done."""
        return self._place.position

    def __iter__(self) -> Stream:
        """The caller takes all of a step's micro-batches, then calls `done(step)`.

        All of a step's micro-batches are fetched before its first is given, as their number is their weight.
        """
        protect(self.loader)
        self._room.warn(self.workers)
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
        """`step`: the one given last."""
        with self._lock:
            self._place = self._taken
            self._behind += 1
            self._at_place = True

    # --- state --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Of this rank, at the last `done`. From any thread, also while another one waits for the loader."""
        with self._lock:
            if self._at_place and self._behind:
                self._base, self._behind = (self._snapshot(), self._place), 0
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
        """Before the first step. Raises CheckpointError where the state is not one for this rank."""
        if state is None or "stream" not in state:
            raise _incompatible("it was made with a map-style train_set, and now it is a stream")
        self._refuse_other(state)
        place = _Place(epoch=state["epoch"], steps=state["steps"], over=state["over"])
        self._base = state["stream"].get("loader", _MISSING), place
        self._behind, self.seed = state["behind"], state["seed"]
        self._place, self._at_place = place, False  # `_resume` brings both to the position

    def _refuse_other(self, state: dict[str, Any]) -> None:
        elastic = getattr(self.loader, "elastic", False)
        if (state["rank"], state["ranks"]) != (self.rank, self.ranks) and not elastic:
            raise _incompatible(
                f"its position is that of rank {state['rank']} of {state['ranks']}, and this is rank "
                f"{self.rank} of {self.ranks}; {_name(self.loader)} keeps one position for each rank, so go "
                f"on with {state['ranks']} rank(s), or use a map-style train_set or an elastic stream"
            )
        if state["accumulation"] * state["ranks"] != self.accumulation * self.ranks and state["behind"]:
            raise _incompatible(
                f"{state['behind']} steps of {state['accumulation']} x {state['ranks']} micro-batches "
                f"must be fetched again, and now a step has {self.accumulation} x {self.ranks}: keep the "
                "batch size"
            )

    def _snapshot(self) -> Any:
        with seeded(self.seed):
            return deepcopy(self.loader.state_dict())  # the loader goes on while this is uploaded

    # --- the loader ---------------------------------------------------------------------------------
    def _resume(self) -> _Place:
        """Brings the loader to the position, and gives it a base."""
        state, place = self._base
        if state is _MISSING:
            with seeded(self._seed_of(place)), signals_held():  # some start their workers here
                self._base = deepcopy(self.loader.state_dict()), place
        else:
            self._load(state, place)
        for _ in range(self._behind):
            _, place = self._take(place)
        with self._lock:
            self._place, self._at_place = place, True
        return place

    def _load(self, state: Any, place: _Place) -> None:
        try:
            self.loader.load_state_dict(deepcopy(state))
            self._begin_pass(place)
            if place.over == "cut":
                # It goes on in the pass that was cut; a generator must be entered for to know that.
                assert self._pass is not None
                with seeded(self._seed_of(place)):
                    next(self._pass, None)
                self._begin_pass(place)
        except (AssertionError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise _incompatible(
                f"{_name(self.loader)} does not take its saved state ({type(error).__name__}: {error}); "
                "give it the same data, sampler and number of workers"
            ) from error

    def _begin_pass(self, place: _Place) -> None:
        self._pass = None  # before the next one's workers start
        with seeded(self._seed_of(place)), signals_held():
            self._pass = iter(self.loader)
        end_at_exit(self._pass)
        end_at_exit(getattr(self.loader, "_iterator", None))

    def _seed_of(self, place: _Place, part: int = -1) -> int:
        epoch, steps = place.position
        return mix(mix(mix(self.seed, epoch), steps), (part + 1) * self.ranks + self.rank)

    def _take(self, place: _Place) -> tuple[list[Any], _Place]:
        """The next step's micro-batches, and the place after them."""
        if place.over:
            # A loader that was resumed where its pass had ended may say so once more, or be in the next pass.
            if self._pass is None:
                self._begin_pass(place)
            place = _Place(epoch=place.epoch + 1)
        elif self._pass is None:
            self._begin_pass(place)
        parts: list[Any] = []
        empty = 0
        while len(parts) < self.accumulation:
            assert self._pass is not None
            try:
                with seeded(self._seed_of(place, len(parts))):
                    parts.append(next(self._pass))
            except StopIteration:
                if parts:
                    return self._ended(parts, place)
                empty += 1
                place = self._next_pass(place, empty)
        place = replace(place, steps=place.steps + 1)
        if self.steps_per_epoch is not None and place.steps >= self.steps_per_epoch:
            self._pass, place = None, replace(place, over="cut")
        return parts, place

    def _ended(self, parts: list[Any], place: _Place) -> tuple[list[Any], _Place]:
        """The pass has ended inside a step, which is smaller then."""
        self._refuse_end(place, len(parts))
        self._pass = None
        return parts, replace(place, steps=place.steps + 1, over="ended")

    def _next_pass(self, place: _Place, empty: int) -> _Place:
        """The pass has ended where a step ends."""
        if empty > 1:
            raise ConfigurationError(
                f"{_name(self.loader)} (train_set) gave rank {self.rank} no batch in a whole pass: give it "
                "data, and see that drop_last leaves some"
            )
        if place.steps:
            self._refuse_end(place, 0)
            place = _Place(epoch=place.epoch + 1)
        self._begin_pass(place)
        return place

    def _refuse_end(self, place: _Place, parts: int) -> None:
        """With several ranks, or a promised number of steps, an end is a mistake: the others go on."""
        if self.ranks == 1 and self.steps_per_epoch is None:
            return
        had = place.steps * self.accumulation + parts
        needed = "and steps_per_epoch was not given"
        if self.steps_per_epoch is not None:
            needed = f"fewer than steps_per_epoch {self.steps_per_epoch} x accumulation {self.accumulation}"
        fits = f"steps_per_epoch={max(1, had // self.accumulation)}"
        if self.ranks > 1:
            fits += " or less, as many as every rank has, or divide the data evenly"
        raise ConfigurationError(
            f"{_name(self.loader)} (train_set) of rank {self.rank} of {self.ranks} ended after {had} "
            f"micro-batches, {needed}: give {fits}"
        )


def _name(loader: Any) -> str:
    return type(loader).__name__


def _incompatible(why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's data position cannot be used: {why}", reason=Reason.CHECKPOINT_INCOMPATIBLE
    )
