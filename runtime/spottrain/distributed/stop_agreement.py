"""Makes all ranks of a gang save and stop at the same steps.

Rank 0 decides, by orders. An order is made at a boundary between steps. It says whether all ranks
save or stop there, and until which boundary all go on without asking again. A rank that reaches that
boundary takes the next order, so no two ranks can differ, whatever each of them knew at what time. An order
covers REACH_SECONDS, or one step: that is the maximum delay of a stop. Within it a boundary costs one
comparison, without collectives or device synchronization. Rationale: docs/adr/0005-agreement.md.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

from spottrain.distributed.control_channel import ControlChannel
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
class Order:
    """What all ranks do at a boundary, and how far they go then. It never says both to save and to stop."""

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


GO_ON: Final = Order(at=0, until=0)
"""What a rank does within an order: it neither saves nor stops."""


def reach(*, last: Order | None, at: int, step_seconds: float, size: int) -> int:
    """Returns for how many steps the next order holds.

    At most twice as many as the last order: a few quick steps, such as steps that a GPU has only queued, must
    not delay the next order for long.
    """
    if last is None or step_seconds <= 0:
        return 1
    seconds = max(REACH_SECONDS, REACH_SECONDS_PER_RANK * size)
    return max(1, min(int(seconds / step_seconds), 2 * max(1, at - last.at), MAX_STEPS))


@dataclass(slots=True)
class _Orders:
    """The orders of one kind of boundary. `name`: of their messages."""

    name: str
    total: int | None = None
    last: Order | None = None
    until: int = 0
    made_at: float = 0.0


class StopAgreement:
    """One rank's view. All ranks call `begin` and `at_boundary` with the same steps, in the same order.

    control: None for one rank alone, which decides at every boundary by `stopping`. Several stop where one
    of them has called `request_stop`: rank 0 hears of it when it makes its next order.
    """

    def __init__(
        self,
        control: ControlChannel | None = None,
        *,
        stopping: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control or ControlChannel(World())
        self._stopping, self._clock = stopping, clock
        self.stop_deadline = math.inf
        """Unix seconds; the earliest that this rank knows of, its own included. Infinite: no stop."""
        self.stop_reason = ""
        """Who was the first to request the stop."""
        self._turn = threading.Lock()
        self._steps, self._batches = _Orders(ORDER), _Orders(f"{ORDER} in an evaluation")

    def begin(self, step: int, total: int | None) -> Order:
        """Before the next step, with `step` of `total` steps done. May already return a stop."""
        self._steps.total, self._steps.until = total, step
        return self.at_boundary(step)

    def decides(self, step: int) -> bool:
        """Whether this rank decides for all at this boundary, by what it gives `at_boundary`."""
        return self._control.world.first and step >= self._steps.until and step != self._steps.total

    def at_boundary(self, step: int, *, save: bool = False, next_save: int | None = None) -> Order:
        """Returns what to do after `step` steps. Raises PeerLost.

        `save`: whether all ranks should save at `step`. `next_save`: the step at which the next save will be
        due, where that is known.
        """
        return self._next(self._steps, step, save, next_save)

    def stops_evaluation(self, batch: int) -> bool:
        """Whether all ranks stop at this batch, which is counted over all evaluations. Raises PeerLost."""
        return self._next(self._batches, batch).stop

    def _next(self, orders: _Orders, step: int, save: bool = False, next_save: int | None = None) -> Order:
        if self._control.lost is not None:
            raise self._control.lost
        if step < orders.until or step == orders.total:
            return GO_ON
        if not self._control.world.distributed:
            stop = self._stopping()
            return Order(at=step, until=step, stop=stop, save=save and not stop) if stop or save else GO_ON
        order = orders.last
        if order is None or not order.stop:  # a stop is final, however often it is asked for
            if self._control.world.first:
                order = self._make_order(orders, step, save, next_save)
            else:
                order = self._take_order(orders, step)
            orders.last, orders.until = order, order.until
        return order

    def request_stop(self, deadline: float, reason: str) -> None:
        """Requests a stop; may be repeated. Sends to rank 0, so not for signal handlers. Does not raise."""
        self._note(deadline, reason)
        if not self._control.world.first:
            with contextlib.suppress(PeerLost):  # the training thread sees it at its next boundary
                self._control.send_to_leader(STOP, [deadline, reason])

    def _note(self, deadline: float, reason: str) -> None:
        with self._turn:
            self.stop_reason = reason if math.isinf(self.stop_deadline) else self.stop_reason
            self.stop_deadline = min(deadline, self.stop_deadline)

    def hear(self) -> None:
        """Rank 0: notes what other ranks have requested so far."""
        for rank, (deadline, reason) in self._control.take(STOP):
            self._note(deadline, f"rank {rank}: {reason}")

    def _make_order(self, orders: _Orders, step: int, save: bool, next_save: int | None) -> Order:
        """Rank 0: makes the order at this boundary and sends it to the others."""
        if gone := self._control.gone:
            raise PeerLost(
                f"rank {gone[0]} has ended its run, but rank 0 is at step {step} of {orders.total}: all "
                "ranks must do the same number of steps, so give each of them as many batches"
            )
        self.hear()
        with self._turn:
            deadline, reason = self.stop_deadline, self.stop_reason
        if not math.isinf(deadline):
            order = Order(
                at=step, until=step, stop=True, deadline=deadline, reason=reason, total=orders.total
            )
        else:
            done = step - orders.last.at if orders.last is not None else 0
            # With all other work between the steps.
            pace = (self._clock() - orders.made_at) / done if done > 0 else 0.0
            steps = reach(last=orders.last, at=step, step_seconds=pace, size=self._control.world.size)
            ends = [end for end in (orders.total, next_save) if end is not None and end > step]
            order = Order(at=step, until=min([step + steps, *ends]), save=save, total=orders.total)
        self._control.broadcast(orders.name, asdict(order))
        orders.made_at = self._clock()
        return order

    def _take_order(self, orders: _Orders, step: int) -> Order:
        """Another rank: waits for rank 0's order at this boundary."""
        order = Order(**self._control.receive(orders.name))
        if (order.at, order.total) != (step, orders.total):
            raise ConfigurationError(
                f"rank {self._control.world.rank} is at step {step} of {orders.total}, rank 0 at step "
                f"{order.at} of {order.total}: all ranks must do the same number of steps, so give each as "
                "many batches"
            )
        if order.stop:
            self._note(order.deadline, order.reason)
        return order
