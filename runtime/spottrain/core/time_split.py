"""`TimeSplitClock`: where the seconds of this process go. Each moment is in one part of `contract.TimeSplit`.

    clock = TimeSplitClock()                   # start-up, until the first step is done
    with clock.part(RESTORE): ...              # something else for a while
    clock.step_done()                          # after each step, which it times
    with clock.data: batch = next(batches)     # in the loop, so without a lock

The training thread changes the part. Another thread may do so only while the training thread stands still.
Any thread may read. The state is one tuple that is replaced as a whole, so that the parts always add up to
the elapsed time. No part gets smaller: a reader that meets a change reads again.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, TypeVar

from spottrain.contract import TIME_BEFORE, TimeSplit

T = TypeVar("T")

PRODUCTIVE, DATA_WAIT, STARTUP, CHECKPOINT_STALL, RESTORE, WAITING, OTHER = range(7)
PARTS: Final = ("productive", "dataWait", "startup", "checkpointStall", "restore", "waiting", "other")
"""Names of the parts in `TimeSplit`, by number."""
IN_TRAINING: Final = (PRODUCTIVE, DATA_WAIT, CHECKPOINT_STALL)
STEPS_MEASURED: Final = 15
_END: Final = object()
TRIES, PAUSE_SECONDS = 100, 0.001
"""Limit for a reader that meets a change: it may be a signal handler in the thread that makes the change."""


class TimeSplitClock:
    """Splits the time since a process started.

    Args:
        age: seconds since the process started.
        before: split of the time before that, such as of the launcher.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        age: float = 0.0,
        before: TimeSplit | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        before = before or TimeSplit()
        productive, data, *rest = (float(getattr(before, name)) for name in PARTS)
        self._clock = clock
        self._now: _State = (STARTUP, clock() - age, productive, data, tuple(rest))
        self._changing = False
        """Whether a thread has read the time of a change that it has not made yet."""
        self._silent: tuple[_State, int] | None = None
        """State of a silent store, and the part that it has replaced."""
        self.done = productive
        """Productive seconds at the end of the last step or evaluation: what a checkpoint taken now saves."""
        self._steps: deque[float] = deque(maxlen=STEPS_MEASURED)
        """Seconds of training of the last steps, without the first one of the training."""
        self._marked = (clock(), productive + data)
        """When the last step or evaluation ended, and the seconds of training up to then."""
        self._trained_before = productive + data
        """Seconds of training before `begin`."""
        self._durable = productive - before.unsaved
        self._lost = before.unsaved
        """Productive seconds of an earlier training of this attempt that were lost."""
        self.data = _DataWait(self)
        """Context manager for a wait for data. It counts only within training, after the first step.

        A loader may wait for another one: the wait ends with the outermost."""

    # --- what the training does -----------------------------------------------------------------------
    def begin(self) -> None:
        """Notes that a training begins. What an earlier one has not saved is lost."""
        seconds = self._read()[1]
        self._lost = seconds[PRODUCTIVE] - self._durable
        self._trained_before = seconds[PRODUCTIVE] + seconds[DATA_WAIT]
        self._steps.clear()
        self.enter(STARTUP)

    def enter(self, part: int) -> None:
        """From now on the time belongs to `part`."""
        self._changing = True
        now, (productive, data, *rest) = self._seconds(self._now)
        self._now = (part, now, productive, data, tuple(rest))
        self._changing = False

    @contextmanager
    def part(self, part: int) -> Iterator[None]:
        """The time of the block belongs to `part`."""
        before = self._now[0]
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def between_steps(self, part: int) -> None:
        """Enters `part` if a training is under way. Start-up and the end stay what they are."""
        if self._now[0] in IN_TRAINING:
            self.enter(part)

    def step_done(self) -> None:
        """Notes the end of a step. The first one ends the start-up."""
        part, (_, before) = self._now[0], self._marked
        if part != PRODUCTIVE:
            self.enter(PRODUCTIVE)
        self.mark()
        if part in (PRODUCTIVE, DATA_WAIT):
            self._steps.append(self._marked[1] - before)

    def mark(self) -> None:
        """Notes that a checkpoint taken from now on covers all that was done so far, such as an evaluation.

        What is noted so is no part of the next step.
        """
        part, since, productive, data, _ = self._now
        now = self._clock()
        productive += now - since if part == PRODUCTIVE else 0.0
        data += now - since if part == DATA_WAIT else 0.0
        self.done, self._marked = productive, (now, productive + data)

    def durable(self, done: float) -> None:
        """Notes that a checkpoint is durable that was taken when `done` was this."""
        self._durable = max(self._durable, done - self._lost)

    def completed(self) -> None:
        """Notes that the training is complete and stored: nothing can be lost any more."""
        self.durable(self._read()[1][PRODUCTIVE])

    def waited(self, seconds: float) -> None:
        """Moves the first seconds of the current part to `waiting`."""
        part, since, productive, data, rest = self._now
        more = [*rest]
        more[WAITING - STARTUP] += seconds
        self._now = (part, since + seconds, productive, data, tuple(more))

    # --- steps ----------------------------------------------------------------------------------------
    @property
    def step_seconds(self) -> float:
        """The time of a step: the median of the last ones, without saves and evaluations; 0 before them."""
        return sorted(self._steps)[(len(self._steps) - 1) // 2] if self._steps else 0.0

    @property
    def seconds_since_step(self) -> float:
        """Seconds since the end of the last step or evaluation."""
        return self._clock() - self._marked[0]

    @property
    def trained(self) -> float:
        """Seconds of this training, from the end of its first step on, without saves."""
        seconds = self._read()[1]
        return seconds[PRODUCTIVE] + seconds[DATA_WAIT] - self._trained_before

    # --- a store that does not respond ------------------------------------------------------------------
    def store_silent(self) -> None:
        """Enters `waiting`, because the training thread waits for the store. It may be repeated."""
        if self._silent is None or self._now is not self._silent[0]:
            before = self._now[0]
            self.enter(WAITING)
            self._silent = self._now, before

    def store_responds(self) -> None:
        """Goes back to what the silence has interrupted, unless the training thread has gone on itself."""
        if self._silent is not None and self._now is self._silent[0]:
            self.enter(self._silent[1])
        self._silent = None

    # --- the result -----------------------------------------------------------------------------------
    def split(self) -> TimeSplit:
        """Returns the split up to now, in milliseconds."""
        durable = self._durable  # read first: it only grows, and never beyond `productive`
        _, seconds = self._read()
        unsaved = max(seconds[PRODUCTIVE] - durable, 0.0)
        named = dict(zip(PARTS, seconds, strict=True)) | {"unsaved": unsaved}
        return TimeSplit(**{name: round(value, 3) for name, value in named.items()})

    def _read(self) -> tuple[float, list[float]]:
        """Returns the time, and the seconds of each part up to then."""
        for _ in range(TRIES):
            state = self._now
            found = self._seconds(state)
            if not self._changing and state is self._now:  # in this order: a change ends with `_changing`
                break
            time.sleep(PAUSE_SECONDS)  # the time that was read may be in another part
        return found

    def _seconds(self, state: _State) -> tuple[float, list[float]]:
        part, since, productive, data, rest = state
        now, seconds = self._clock(), [productive, data, *rest]
        seconds[part] += now - since
        return now, seconds


_State = tuple[int, float, float, float, tuple[float, ...]]
"""Part, since when, and the seconds of all parts before that: productive, data wait, and the others."""


class _DataWait:
    """Does what `TimeSplitClock.enter` does, for the two parts that change in each step."""

    __slots__ = ("_changed", "_clock", "_owner")

    def __init__(self, owner: TimeSplitClock) -> None:
        self._owner, self._clock = owner, owner._clock
        self._changed: list[bool] = []
        """For each wait that lasts, the outermost first, whether it has changed the part."""

    def __enter__(self) -> None:
        owner = self._owner
        part, since, productive, data, rest = owner._now
        self._changed.append(part == PRODUCTIVE)
        if part == PRODUCTIVE:
            owner._changing = True
            now = self._clock()
            owner._now = (DATA_WAIT, now, productive + now - since, data, rest)
            owner._changing = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        owner = self._owner
        part, since, productive, data, rest = owner._now
        if self._changed.pop() and part == DATA_WAIT:
            owner._changing = True
            now = self._clock()
            owner._now = (PRODUCTIVE, now, productive, data + now - since, rest)
            owner._changing = False


def timed(batches: Callable[[], Iterable[T]], clock: TimeSplitClock) -> Iterator[T]:
    """Yields the batches, and counts the waits for them, and for their iterator, as data wait.

    It keeps no batch while it fetches the next one.
    In another thread than the main one it only yields them: training does not wait for one that prefetches.
    """
    if threading.current_thread() is not threading.main_thread():
        yield from batches()
        return
    wait = clock.data
    with wait:
        stream: Iterator[Any] = iter(batches())
    while True:
        with wait:
            batch: Any = next(stream, _END)
        if batch is _END:
            return
        yield batch
        del batch


def before_this_process(env: Mapping[str, str], born: float) -> TimeSplit | None:
    """Returns the split from the start of the launcher to that of this process; None without a launcher.

    `born`: Unix seconds of the start of this process.
    """
    try:
        told = json.loads(env[TIME_BEFORE])
        split, since = TimeSplit.from_raw(told["split"]) or TimeSplit(), float(told["born"])
    except (ValueError, TypeError, KeyError):
        return None
    rest = max(born - since - split.total, 0.0)
    return replace(split, startup=split.startup + rest)
