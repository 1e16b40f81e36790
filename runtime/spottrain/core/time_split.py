"""`TimeSplitClock`: where the seconds of this process go. Each moment is in one part of `contract.TimeSplit`.

    clock = TimeSplitClock()                   # start-up, until the first step is done
    with clock.part(RESTORE): ...              # something else for a while
    clock.step_done()                          # after each step, which it times
    with clock.data: batch = next(batches)

The training thread changes the part. Another thread may do so only while the training thread stands still.
Any thread may read. Each change takes the time once, so that the parts always add up to the elapsed time.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from spottrain.contract import TIME_BEFORE, TimeSplit

T = TypeVar("T")

PRODUCTIVE, DATA_WAIT, STARTUP, CHECKPOINT_STALL, RESTORE, WAITING, OTHER = range(7)
PARTS: Final = ("productive", "dataWait", "startup", "checkpointStall", "restore", "waiting", "other")
"""Names of the parts in `TimeSplit`, by number."""
IN_TRAINING: Final = (PRODUCTIVE, DATA_WAIT, CHECKPOINT_STALL)
STEPS_MEASURED: Final = 15
_END: Final = object()


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
        seconds = tuple(float(getattr(before, name)) for name in PARTS)
        productive, trained = seconds[PRODUCTIVE], seconds[PRODUCTIVE] + seconds[DATA_WAIT]
        self._clock = clock
        self._lock = threading.RLock()  # a signal handler may read in the middle of a change
        self._now: _State = (STARTUP, clock() - age, seconds)
        self._silent: tuple[_State, int] | None = None
        """State of a silent store, and the part that it has replaced."""
        self.done = productive
        """Productive seconds at the end of the last step or evaluation: what a checkpoint taken now saves."""
        self._steps: deque[float] = deque(maxlen=STEPS_MEASURED)
        """Seconds of training of the last steps, without the first one of the training."""
        self.stepped = 0.0
        """Seconds of training of all steps of this process but the first one of a training."""
        self._marked = (clock(), trained)
        """When the last step or evaluation ended, and the seconds of training up to then."""
        self._trained_before = trained
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
        with self._lock:
            self._now = (part, *self._read())

    def swap(self, old: int, new: int) -> bool:
        """Enters `new` if the time belongs to `old`. Returns whether it did."""
        with self._lock:
            if swapped := self._now[0] == old:
                self.enter(new)
            return swapped

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
            seconds = self._marked[1] - before
            self._steps.append(seconds)
            self.stepped += seconds

    def mark(self) -> None:
        """Notes that a checkpoint taken from now on covers all that was done so far, such as an evaluation.

        What is noted so is no part of the next step.
        """
        now, seconds = self._read()
        self.done = seconds[PRODUCTIVE]
        self._marked = (now, seconds[PRODUCTIVE] + seconds[DATA_WAIT])

    def durable(self, done: float) -> None:
        """Notes that a checkpoint is durable that was taken when `done` was this."""
        self._durable = max(self._durable, done - self._lost)

    def completed(self) -> None:
        """Notes that the training is complete and stored: nothing can be lost any more."""
        self.durable(self._read()[1][PRODUCTIVE])

    def waited(self, seconds: float) -> None:
        """Moves the first seconds of the current part to `waiting`."""
        part, since, parts = self._now
        moved = parts[WAITING] + seconds
        self._now = (part, since + seconds, (*parts[:WAITING], moved, *parts[WAITING + 1 :]))

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
        _, seconds = self._read()
        unsaved = max(seconds[PRODUCTIVE] - self._durable, 0.0)
        named = dict(zip(PARTS, seconds, strict=True)) | {"unsaved": unsaved}
        return TimeSplit(**{name: round(value, 3) for name, value in named.items()})

    def _read(self) -> tuple[float, tuple[float, ...]]:
        """Returns the time, and the seconds of each part up to then."""
        with self._lock:
            part, since, seconds = self._now
            now = self._clock()
            return now, (*seconds[:part], seconds[part] + now - since, *seconds[part + 1 :])


_State = tuple[int, float, tuple[float, ...]]
"""Part, since when, and the seconds of all parts before that."""


class _DataWait:
    """Counts as data wait what is productive otherwise."""

    def __init__(self, owner: TimeSplitClock) -> None:
        self._owner = owner
        self._changed: list[bool] = []
        """For each wait that lasts, the outermost first, whether it has changed the part."""

    def __enter__(self) -> None:
        self._changed.append(self._owner.swap(PRODUCTIVE, DATA_WAIT))

    def __exit__(self, *_: object) -> None:
        if self._changed.pop():
            self._owner.swap(DATA_WAIT, PRODUCTIVE)


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


def process_start(pid: int | str = "self") -> float:
    """Returns when a process started, in Unix seconds; the current time if there is no /proc."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, AttributeError, ValueError, IndexError):
        return time.time()
