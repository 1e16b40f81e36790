"""Makes all ranks of a gang save and stop at the same steps.

Rank 0 decides, by orders. An order is made at a boundary between steps. It says whether all ranks
save or stop there, and until which boundary all go on without asking again. A rank that reaches that
boundary takes the next order, so no two ranks can differ, whatever each of them knew at what time. An order
covers REACH_SECONDS, or one step: that is the maximum delay of a stop. Within it a boundary costs one
comparison, without collectives or device synchronization. Rationale: docs/adr/0005-agreement.md.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from spottrain.distributed.world import World
from spottrain.errors import ConfigurationError, PeerLost

REACH_SECONDS: Final = 0.25
REACH_SECONDS_PER_RANK: Final = 0.01
"""Rank 0 sends an order to each rank itself, in 5 to 10 us, so this is at most 0.1 % of its time."""
MAX_STEPS: Final = 1000
"""Maximum steps of one order, however fast the steps seem."""
ORDER: Final = "order"
STOP: Final = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What this rank does at this boundary: the result for the training loop. An `Order` is the message.

    Never both: after a stop, a last save is decided separately.
    """

    save: bool = False
    stop: bool = False


GO_ON: Final = Decision()


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    at: int
    """Steps done by every rank when the order was made."""
    until: int
    """Steps done when the next order is taken; `at` if this order is the last."""
    save: bool = False
    stop: bool = False
    deadline: float = math.inf
    """Unix seconds; the earliest of all ranks."""
    reason: str = ""
    total: int | None = None
    """Steps that rank 0 will do in total; None if the loop does not know."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Order:
        return cls(**json.loads(text))

    @property
    def decision(self) -> Decision:
        return Decision(save=self.save, stop=self.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequest:
    """Request that all ranks stop. Of several, the earliest deadline and the first reason apply."""

    deadline: float
    reason: str = ""

    def joined(self, other: StopRequest | None) -> StopRequest:
        if other is None:
            return self
        return StopRequest(deadline=min(self.deadline, other.deadline), reason=other.reason)


def reach(*, last: Order | None, at: int, step_seconds: float | None, size: int) -> int:
    """Returns for how many steps the next order holds.

    At most twice as many as the last order: a few quick steps, such as steps that a GPU has only queued, must
    not delay the next order for long.
    """
    if last is None or not step_seconds or step_seconds <= 0:
        return 1
    seconds = max(REACH_SECONDS, REACH_SECONDS_PER_RANK * size)
    return max(1, min(int(seconds / step_seconds), 2 * max(1, at - last.at), MAX_STEPS))


def decide(
    *,
    at: int,
    steps: int,
    total: int | None,
    request: StopRequest | None,
    save_due: Callable[[], bool],
    horizon: int | None = None,
) -> Order:
    """Returns rank 0's next order: for `steps` steps, or fewer if `total` or `horizon` comes first."""
    if request is not None:
        return Order(
            at=at, until=at, stop=True, deadline=request.deadline, reason=request.reason, total=total
        )
    ends = [bound for bound in (total, horizon) if bound is not None and bound > at]
    return Order(at=at, until=min([at + max(1, steps), *ends]), save=save_due(), total=total)


class OrderChannel(Protocol):
    """The part of `control_channel.ControlChannel` that is needed here."""

    world: World
    lost: PeerLost | None

    @property
    def gone(self) -> list[int]: ...
    def broadcast(self, name: str, body: bytes) -> None: ...
    def receive(self, name: str) -> bytes | None: ...
    def send_to_leader(self, name: str, body: bytes) -> None: ...
    def handle(self, name: str, handler: Callable[[int, bytes], None]) -> None: ...


class StopAgreement:
    """One rank's view. All ranks call `begin` and `at_boundary` with the same steps, in the same order."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self.request: StopRequest | None = None

    @property
    def stop_deadline(self) -> float:
        """Unix seconds; the earliest that this rank knows of, its own included."""
        return self.request.deadline if self.request else math.inf

    @property
    def stop_reason(self) -> str:
        """Who requested the stop."""
        return self.request.reason if self.request else ""

    def begin(self, step: int, total: int | None) -> Decision:
        """Before the next step, with `step` of `total` steps done. May already return a stop."""
        raise NotImplementedError

    def at_boundary(
        self, step: int, *, save_due: Callable[[], bool], horizon: Callable[[], int | None] = lambda: None
    ) -> Decision:
        """Returns the orders after `step` steps. Raises PeerLost.

        Both callables are called only on rank 0, once for each order. `save_due`: whether all ranks should
        save at `step`; not called if they stop. `horizon`: the next step at which `save_due` must be called
        again, where saves are due by steps.
        """
        raise NotImplementedError

    def request_stop(self, deadline: float, reason: str = "") -> None:
        """Requests a stop; may be repeated. Not for signal handlers. Does not raise and does not wait."""
        self._note(StopRequest(deadline=deadline, reason=reason))

    def _note(self, request: StopRequest) -> None:
        with self._turn:
            self.request = request.joined(self.request)


def alone(stopping: Callable[[], bool]) -> StopAgreement:
    """Returns the agreement of a world of one rank, which decides at every boundary."""
    return _Alone(stopping)


Start = Callable[[Callable[[], None]], None]
"""Runs the given work in the background."""


def _in_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="spottrain-request-stop", daemon=True).start()


def make_agreement(
    control: OrderChannel, *, clock: Callable[[], float] = time.monotonic, start: Start = _in_a_thread
) -> StopAgreement:
    """Returns the agreement of this rank in its gang; rank 0 leads."""
    return _Leader(control, clock) if control.world.first else _Follower(control, start)


class _Alone(StopAgreement):
    def __init__(self, stopping: Callable[[], bool]) -> None:
        super().__init__()
        self._stopping = stopping

    def begin(self, step: int, total: int | None) -> Decision:
        return Decision(stop=self._asked and step != total)

    def at_boundary(
        self, step: int, *, save_due: Callable[[], bool], horizon: Callable[[], int | None] = lambda: None
    ) -> Decision:
        return Decision(stop=True) if self._asked else Decision(save=save_due())

    @property
    def _asked(self) -> bool:
        return self._stopping() or self.request is not None


class _Rank(StopAgreement):
    """Common part of leader and followers: the next order is taken where the last one ends."""

    def __init__(self, control: OrderChannel) -> None:
        super().__init__()
        self._control = control
        self._order: Order | None = None
        self._until = 0
        self._total: int | None = None

    def begin(self, step: int, total: int | None) -> Decision:
        self._total = total
        self._until = step
        return self.at_boundary(step, save_due=lambda: False)

    def at_boundary(
        self, step: int, *, save_due: Callable[[], bool], horizon: Callable[[], int | None] = lambda: None
    ) -> Decision:
        if self._control.lost is not None:
            raise self._control.lost
        if step < self._until or step == self._total:
            return GO_ON
        if self._order is not None and self._order.stop:
            return self._order.decision  # a stop is final, however often it is asked for
        order = self._next(step, save_due, horizon)
        self._order, self._until = order, order.until
        return order.decision

    def _next(self, step: int, save_due: Callable[[], bool], horizon: Callable[[], int | None]) -> Order:
        raise NotImplementedError


class _Leader(_Rank):
    def __init__(self, control: OrderChannel, clock: Callable[[], float]) -> None:
        super().__init__(control)
        self._clock = clock
        self._made_at = 0.0
        control.handle(STOP, self._hear_request)

    def _hear_request(self, rank: int, body: bytes) -> None:
        told = StopRequest(**json.loads(body))
        self._note(StopRequest(deadline=told.deadline, reason=f"rank {rank}: {told.reason}"))

    def _next(self, step: int, save_due: Callable[[], bool], horizon: Callable[[], int | None]) -> Order:
        if gone := self._control.gone:
            raise PeerLost(
                f"rank {gone[0]} has ended its run, but rank 0 is at step {step} of {self._total}: all ranks "
                "must do the same number of steps, so give each of them as many batches"
            )
        last = self._order
        order = decide(
            at=step,
            steps=reach(
                last=last, at=step, step_seconds=self._step_seconds(step), size=self._control.world.size
            ),
            total=self._total,
            request=self.request,
            save_due=save_due,
            horizon=horizon(),
        )
        self._control.broadcast(ORDER, order.to_bytes())
        self._made_at = self._clock()
        return order

    def _step_seconds(self, step: int) -> float | None:
        """Average over the steps since the last order, including all other work between them."""
        if self._order is None or step <= self._order.at:
            return None
        return (self._clock() - self._made_at) / (step - self._order.at)


class _Follower(_Rank):
    def __init__(self, control: OrderChannel, start: Start) -> None:
        super().__init__(control)
        self._start = start

    def request_stop(self, deadline: float, reason: str = "") -> None:
        super().request_stop(deadline, reason)
        body = json.dumps({"deadline": deadline, "reason": reason}).encode()

        def tell() -> None:
            with contextlib.suppress(PeerLost):  # the main thread sees it at its next boundary
                self._control.send_to_leader(STOP, body)

        self._start(tell)

    def _next(self, step: int, save_due: Callable[[], bool], horizon: Callable[[], int | None]) -> Order:
        body = None
        while body is None:
            body = self._control.receive(ORDER)
        order = Order.from_bytes(body)
        if (order.at, order.total) != (step, self._total):
            raise ConfigurationError(
                f"rank {self._control.world.rank} is at step {step} of {self._total}, rank 0 at step "
                f"{order.at} of {order.total}: all ranks must do the same number of steps, so give each as "
                "many batches"
            )
        if order.stop:
            self._note(StopRequest(deadline=order.deadline, reason=order.reason))
        return order
