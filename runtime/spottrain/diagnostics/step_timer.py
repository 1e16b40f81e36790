"""Where each step's wall time goes: data, host-to-device, compute, communication, checkpoint, other.

Called by the training loop around its phases:

    split = Split(device)
    with split.data(): batch = next(batches)
    with split.h2d(): batch = to_device(batch)
    with split.compute(): loss = model(batch)
    with split.backward(): loss.backward()      # communication is taken out of it where `timed` tells
    with split.compute(): optimizer.step()
    split.step_done()

On a CPU a mark is time.perf_counter(). On CUDA it is an event on the current stream, so that an interval is
the device's own: an event after the wait for data is recorded when the host has the batch, and completes when
the device has done all that was queued before. What lies between two is therefore what the *device* waited,
and a wait that queued work hides counts as compute, which it is. Events are read only once they have
completed, steps later: nothing here ever makes the host wait for the device. (The CUDA side is tested with
events of our own making; on a GPU it was not measured.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Final, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

M = TypeVar("M")

DATA, H2D, COMPUTE, COMMUNICATION, CHECKPOINT = range(5)
RECENT: Final = 64
"""Steps whose utilisation is kept, for its trend."""
PENDING: Final = 256
"""Steps that may wait for their events; older ones are dropped unread, and counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Of all steps together. `other` is what no phase covers: Python between them, logging, collector."""

    data: float = 0.0
    h2d: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    checkpoint: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return sum(float(getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """How the time of `steps` optimizer steps was spent. `seconds` add up to the wall time of these steps."""

    steps: int = 0
    seconds: Seconds = Seconds()
    unread: int = 0
    """Steps whose events were not there in time; they are in none of the figures."""

    def share(self, phase: str) -> float:
        """Of 1. All six add up to 1, or to 0 where there was no step."""
        total = self.seconds.total
        return float(getattr(self.seconds, phase)) / total if total > 0 else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """By the names of `Seconds`."""
        return {field.name: self.share(field.name) for field in fields(Seconds)}

    @property
    def utilisation(self) -> float:
        """Share of the time in which the device had the model's work to do."""
        return self.share("compute")

    @property
    def step_seconds(self) -> float:
        """Mean of one step."""
        return self.seconds.total / self.steps if self.steps else 0.0

    @property
    def own_seconds(self) -> float:
        """Of a mean step without communication, in which a rank waits for others."""
        return (self.seconds.total - self.seconds.communication) / self.steps if self.steps else 0.0


class Marks(Protocol[M]):
    """Moments, and the seconds between them once both have come."""

    def mark(self) -> M: ...

    def come(self, mark: M) -> bool: ...

    def between(self, first: M, second: M) -> float: ...


class ClockMarks:
    """Moments of the host."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.mark = clock

    def come(self, mark: float) -> bool:
        return True

    def between(self, first: float, second: float) -> float:
        return second - first


class EventMarks:
    """Moments of the current CUDA stream. `event`: makes one; a parameter so that no GPU is needed to test.

    torch's Event.elapsed_time raises unless both have completed, so `come` is asked first: one query of the
    last mark of a step says so of all its marks, for they are on one stream.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self._event = event or (_timing_event)

    def mark(self) -> Any:
        event = self._event()
        event.record()
        return event

    def come(self, mark: Any) -> bool:
        return bool(mark.query())

    def between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(kw_only=True, slots=True)
class _Step(Generic[M]):
    """Marks of one step. Intervals are (phase, begin, end) and do not overlap."""

    begin: M
    end: M
    intervals: list[tuple[int, M, M]]


class _Phase:
    """A reusable context manager; a generator's would cost three times as much."""

    __slots__ = ("_number", "_split")

    def __init__(self, split: Split, number: int) -> None:
        self._split, self._number = split, number

    def __enter__(self) -> None:
        self._split._enter(self._number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._split._leave()


class _Backward(_Phase):
    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._split._leave_backward()


class Split:
    """Marks the phases of each step, and sums them up. Used by one thread.

    A phase inside another interrupts it, so no second counts twice. An exception in a phase ends it.
    `clock`: seconds, of the host, where the device is a CPU. `marks`: in place of what the device calls for.
    `restarted`: called by `restart`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        clock: Callable[[], float] = time.perf_counter,
        marks: Marks[Any] | None = None,
        restarted: Callable[[], None] = lambda: None,
    ) -> None:
        usual: Marks[Any] = EventMarks() if device.type == "cuda" else ClockMarks(clock)
        self._marks = marks or usual
        self._open: list[tuple[int, Any]] = []
        self._intervals: list[tuple[int, Any, Any]] = []
        self._pending: deque[_Step[Any]] = deque()
        self._whole, self._window = _Sums(), _Sums()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._reduced: Any = None
        phases = [_Phase(self, number) for number in range(CHECKPOINT + 1)]
        self._data, self._h2d, self._compute, self._communication, self._checkpoint = phases
        self._backward = _Backward(self, COMPUTE)
        self._restarted = restarted
        self._begin = self._marks.mark()

    def data(self) -> _Phase:
        """Around the wait for the loader."""
        return self._data

    def h2d(self) -> _Phase:
        """Around the copy from host to device. A copy without `non_blocking`, or from memory that is not
        pinned, makes the host wait and is seen in full; another one is seen as long as the stream does it."""
        return self._h2d

    def compute(self) -> _Phase:
        """Around forward passes and the optimizer's step."""
        return self._compute

    def backward(self) -> _Phase:
        """Around `loss.backward()` alone: after the last call of a `timed` hook it is communication."""
        return self._backward

    def communication(self) -> _Phase:
        """Around collectives that the loop calls itself."""
        return self._communication

    def checkpoint(self) -> _Phase:
        """Around the part of a save for which the training stands still."""
        return self._checkpoint

    def timed(self, hook: Callable[[Any, Any], Any] | None = None) -> Callable[[Any, Any], Any]:
        """A communication hook for DDP: `ddp.register_comm_hook(state, split.timed(hook))`.

        hook: the one to be called, by default the mean over all ranks. DDP calls it for each bucket when
        its gradients are complete, and `backward` returns when all buckets have come back. No gradient is
        left to be computed after the last call, so from there to the end of `backward` the step waits for
        the others and the network: that is the communication that costs time.

        It does not see what is exchanged while backward still computes (which costs no wall time, but may
        slow the kernels beside it), nor the broadcast of buffers in forward, and it cannot tell a slow
        network from a rank that comes late: the straggler is told by comparing `own_seconds` of all ranks.
        """
        inner = hook or _mean

        def timed(state: Any, bucket: Any) -> Any:
            self._reduced = self._marks.mark()
            return inner(state, bucket)

        # torch 2.15 checks a hook's annotations, and refuses all but these (and none at all).
        timed.__annotations__ = {
            "bucket": dist.GradBucket,  # type: ignore[attr-defined]
            "return": torch.futures.Future[torch.Tensor],
        }
        return timed

    def step_done(self) -> None:
        """After each optimizer step. What follows belongs to the next one."""
        end = self._marks.mark()
        self._pending.append(_Step(begin=self._begin, end=end, intervals=self._intervals))
        self._begin, self._intervals = end, []
        self._read()

    def restart(self) -> None:
        """Forgets the time since the last step: it went into something else, such as an evaluation."""
        self._begin, self._intervals, self._reduced = self._marks.mark(), [], None
        self._restarted()

    def whole(self) -> Shares:
        """Of all steps that could be read so far."""
        self._read()
        return self._whole.shares()

    def window(self, *, clear: bool = True) -> Shares:
        """Of the steps since this was last asked for, or since the beginning; `clear=False`: looks only."""
        self._read()
        found = self._window.shares()
        if clear:
            self._window = _Sums()
        return found

    @property
    def recent(self) -> tuple[float, ...]:
        """Utilisation of each of the last steps, at most RECENT; the oldest first."""
        return tuple(self._recent)

    # --- inside -------------------------------------------------------------------------------------
    def _enter(self, number: int) -> None:
        now = self._marks.mark()
        if self._open:
            outer, since = self._open[-1]
            self._intervals.append((outer, since, now))
        self._open.append((number, now))

    def _leave(self) -> None:
        now = self._marks.mark()
        number, since = self._open.pop()
        self._intervals.append((number, since, now))
        if self._open:
            self._open[-1] = (self._open[-1][0], now)

    def _leave_backward(self) -> None:
        if self._reduced is not None:
            number, since = self._open[-1]
            self._intervals.append((number, since, self._reduced))
            self._open[-1] = (COMMUNICATION, self._reduced)
            self._reduced = None
        self._leave()

    def _read(self) -> None:
        while self._pending and self._marks.come(self._pending[0].end):
            self._add(self._pending.popleft())
        while len(self._pending) > PENDING:
            self._pending.popleft()
            self._whole.unread += 1
            self._window.unread += 1

    def _add(self, step: _Step[Any]) -> None:
        between = self._marks.between
        total = between(step.begin, step.end)
        parts = [0.0] * (CHECKPOINT + 1)
        for number, begin, end in step.intervals:
            parts[number] += between(begin, end)
        self._whole.add(total, parts)
        self._window.add(total, parts)
        if total > 0:
            self._recent.append(min(1.0, parts[COMPUTE] / total))


class _Sums:
    def __init__(self) -> None:
        self.steps = 0
        self.unread = 0
        self.total = 0.0
        self.parts = [0.0] * (CHECKPOINT + 1)

    def add(self, total: float, parts: list[float]) -> None:
        self.steps += 1
        self.total += total
        for number, seconds in enumerate(parts):
            self.parts[number] += seconds

    def shares(self) -> Shares:
        other = max(0.0, self.total - sum(self.parts))  # events are rounded to half a microsecond
        names = ("data", "h2d", "compute", "communication", "checkpoint")
        seconds = Seconds(**dict(zip(names, self.parts, strict=True)), other=other)
        return Shares(steps=self.steps, seconds=seconds, unread=self.unread)


def _mean(state: Any, bucket: Any) -> Any:
    """As DDP does by itself, bit for bit; `state` is the process group, or None for the default one.

    torch's own `allreduce_hook` divides by the number of ranks, and DDP multiplies by its reciprocal: with
    three ranks their sums differ in the last bit (torch 2.15, seen).
    """
    group = state or dist.group.WORLD
    gradients = bucket.buffer().mul_(1 / dist.get_world_size(group))
    work: Any = dist.all_reduce(gradients, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
