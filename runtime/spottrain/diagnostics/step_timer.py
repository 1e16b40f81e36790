"""Splits each step's wall time: data, host-to-device copy, compute, communication, checkpoint, other.

    timer = StepTimer(device)
    with timer.data(): batch = next(batches)
    with timer.h2d(): batch = to_device(batch)
    with timer.compute(): loss = model(batch)
    with timer.backward(): loss.backward()      # minus communication, with a `timed` hook
    with timer.compute(): optimizer.step()
    timer.step_done()

On a CPU a mark is time.perf_counter(). On CUDA it is an event on the current stream, so intervals are device
time. An event after the wait for data is recorded when the host has the batch; it completes when the device
has done all work queued before it. So the interval is the time that the *device* waited. A wait hidden by
queued work counts as compute. Events are read only after they complete, steps later, so the host never waits
for the device. (The CUDA path is tested with fake events only; it was not measured on a GPU.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import Any, Final

import torch
import torch.distributed as dist

from spottrain.distributed.world import World

DATA, H2D, COMPUTE, COMMUNICATION, CHECKPOINT = range(5)


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the time of `steps` optimizer steps went: seconds by phase, which add up to their wall time."""

    steps: int = 0
    data: float = 0.0
    h2d: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    checkpoint: float = 0.0
    other: float = 0.0
    """Outside of any phase, such as logging or garbage collection."""

    @property
    def total(self) -> float:
        return sum(float(getattr(self, phase)) for phase in PHASES)

    def share(self, phase: str) -> float:
        """Returns the share of a phase, from 0 to 1. All six add up to 1, or to 0 without steps."""
        total = self.total
        return float(getattr(self, phase)) / total if total > 0 else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """All shares, by phase."""
        return {phase: self.share(phase) for phase in PHASES}

    def mean(self, phase: str) -> float:
        """Returns the mean seconds of a phase in one step."""
        return float(getattr(self, phase)) / max(1, self.steps)

    @property
    def own_seconds(self) -> float:
        """Mean seconds of one step without communication, which is waiting for other ranks."""
        return self.mean("total") - self.mean("communication")


PHASES: Final = tuple(each.name for each in fields(Shares) if each.name != "steps")


def gathered(shares: Shares, world: World) -> tuple[Shares, ...]:
    """Returns the shares of all ranks. A CPU collective: all ranks must call it after the same step."""
    if not world.distributed:
        return (shares,)
    value = torch.tensor(astuple(shares), dtype=torch.float64)
    found = [torch.empty_like(value) for _ in range(world.size)]
    dist.all_gather(found, value)
    rows = [each.tolist() for each in found]
    return tuple(Shares(int(steps), *seconds) for steps, *seconds in rows)


class ClockMarks:
    """Marks on the host's clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.mark = clock

    def completed(self, mark: float) -> bool:
        return True

    def between(self, first: float, second: float) -> float:
        """Returns the seconds between two marks that have completed."""
        return second - first


class EventMarks:
    """Marks on the current CUDA stream. `event` makes one; tests replace it.

    torch's Event.elapsed_time raises unless both events have completed, so call `completed` first. All
    marks of a step are on one stream, so one query of the last mark is enough.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        event = self._event()
        event.record()
        return event

    def completed(self, mark: Any) -> bool:
        return bool(mark.query())

    def between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3


class _Phase:
    """Reusable context manager; one made from a generator costs three times as much."""

    __slots__ = ("_number", "_timer")

    def __init__(self, timer: StepTimer, number: int) -> None:
        self._timer, self._number = timer, number

    def __enter__(self) -> None:
        self._timer._enter(self._number)

    def __exit__(self, *_: object) -> None:
        self._timer._leave()


class StepTimer:
    """Measures the phases of each step, and sums them up. Not thread-safe.

    A phase inside another one interrupts it, so no time counts twice. An exception in a phase ends it.

    Args:
        device: the device that trains; CUDA events are used on a GPU.
        clock: host clock in seconds, used on a CPU.
        marks: replaces the marks for the device.
        restarted: callback of `restart`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        clock: Callable[[], float] = time.perf_counter,
        marks: ClockMarks | EventMarks | None = None,
        restarted: Callable[[], None] = lambda: None,
    ) -> None:
        self._marks: Any = marks or (EventMarks() if device.type == "cuda" else ClockMarks(clock))
        self._open: list[tuple[int, Any]] = []
        self._intervals: list[tuple[int, Any, Any]] = []
        """Phase, begin and end of each interval of this step, without overlap."""
        self._pending: deque[tuple[Any, Any, list[tuple[int, Any, Any]]]] = deque()
        """Begin, end and intervals of steps that the device has not done yet."""
        self._sums = [0.0] * (CHECKPOINT + 3)
        """Seconds of each phase, of all steps, and their number."""
        self._before = list(self._sums)
        """The same at the begin of the window."""
        self._reduced: Any = None
        phases = [_Phase(self, number) for number in range(CHECKPOINT + 1)]
        self._data, self._h2d, self._compute, self._communication, self._checkpoint = phases
        self._restarted = restarted
        self._begin = self._marks.mark()

    def data(self) -> _Phase:
        """Returns a context manager for the wait for the loader."""
        return self._data

    def h2d(self) -> _Phase:
        """Returns a context manager for the copy from host to device.

        A copy without `non_blocking`, or from memory that is not pinned, blocks the host and counts in full.
        Another copy counts for its time on the stream.
        """
        return self._h2d

    def compute(self) -> _Phase:
        """Returns a context manager for forward passes and the optimizer step."""
        return self._compute

    def backward(self) -> _Phase:
        """Returns a context manager for `loss.backward()`, split by a `timed` hook into communication.

        The forward pass may be in it too.
        """
        return self._compute

    def communication(self) -> _Phase:
        """Returns a context manager for collectives that the loop calls itself."""
        return self._communication

    def checkpoint(self) -> _Phase:
        """Returns a context manager for the part of a save that blocks training."""
        return self._checkpoint

    def timed(self, hook: Callable[[Any, Any], Any] | None = None) -> Callable[[Any, Any], Any]:
        """Returns a DDP communication hook: `ddp.register_comm_hook(state, timer.timed(hook))`.

        DDP calls the hook for each bucket with complete gradients, and `backward` returns when all buckets
        are reduced. After the last call no gradient is left to compute, so the rest of `backward` waits for
        other ranks and the network. That time counts as communication.

        Communication during backward computation is not measured; it costs no wall time, but may slow
        kernels. Buffer broadcasts in forward are not measured either. A slow network and a late rank look
        alike: compare `own_seconds` of all ranks to find a straggler.

        Args:
            hook: the hook to wrap; None: the mean over all ranks.
        """
        inner = hook or _mean

        def timed(state: Any, bucket: Any) -> Any:
            self._reduced = self._marks.mark()
            return inner(state, bucket)

        # torch 2.15 accepts a hook with exactly these annotations, or with none.
        timed.__annotations__ = {
            "bucket": dist.GradBucket,  # type: ignore[attr-defined]
            "return": torch.futures.Future[torch.Tensor],
        }
        return timed

    def step_done(self) -> None:
        """Ends a step. Call it after each optimizer step."""
        end = self._marks.mark()
        self._pending.append((self._begin, end, self._intervals))
        self._begin, self._intervals = end, []
        self._read()

    def restart(self) -> None:
        """Excludes the time since the last step, which was spent on something else, such as an evaluation."""
        self._begin, self._intervals, self._reduced = self._marks.mark(), [], None
        self._restarted()

    def whole(self) -> Shares:
        """Returns the time split of all steps that have completed so far."""
        self._read()
        return _shares(self._sums)

    def window(self, *, clear: bool = True) -> Shares:
        """Returns the time split since the last call, or since the start.

        Args:
            clear: whether to start a new window; False only reads.
        """
        self._read()
        found = [now - before for now, before in zip(self._sums, self._before, strict=True)]
        if clear:
            self._before = list(self._sums)
        return _shares(found)

    # --- private ------------------------------------------------------------------------------------
    def _enter(self, number: int) -> None:
        now = self._marks.mark()
        if self._open:
            outer, since = self._open[-1]
            self._intervals.append((outer, since, now))
        else:
            self._reduced = None
        self._open.append((number, now))

    def _leave(self) -> None:
        now = self._marks.mark()
        number, since = self._open.pop()
        if self._reduced is not None:  # the end of a backward pass: the rest of it was a wait
            self._intervals.append((number, since, self._reduced))
            number, since, self._reduced = COMMUNICATION, self._reduced, None
        self._intervals.append((number, since, now))
        if self._open:
            self._open[-1] = (self._open[-1][0], now)

    def _read(self) -> None:
        between = self._marks.between
        while self._pending and self._marks.completed(self._pending[0][1]):
            first, last, intervals = self._pending.popleft()
            for number, begin, end in intervals:
                self._sums[number] += between(begin, end)
            self._sums[-2] += between(first, last)
            self._sums[-1] += 1


def _shares(sums: list[float]) -> Shares:
    *parts, total, steps = sums
    other = max(0.0, total - sum(parts))  # events are rounded to half a microsecond
    return Shares(round(steps), *(*parts, other))


def _mean(state: Any, bucket: Any) -> Any:
    """Averages like DDP without a hook, bit for bit. `state`: process group; None: the default one.

    torch's own `allreduce_hook` divides by the number of ranks, while DDP multiplies by its reciprocal. With
    three ranks the results differ in the last bit (observed with torch 2.15).
    """
    group = state or dist.group.WORLD
    gradients = bucket.buffer().mul_(1 / dist.get_world_size(group))
    work: Any = dist.all_reduce(gradients, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
