"""The other ranks of the gang: one agreement with them on saves and stops, and what to do if one is lost."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from spottrain.core import log
from spottrain.distributed.control_channel import connect
from spottrain.distributed.stop_agreement import StopAgreement
from spottrain.errors import PeerLost
from spottrain.lifecycle.save_interval import RebalanceAdvice
from spottrain.lifecycle.session import Session

LOOK_SECONDS: Final = 0.1
"""Seconds between two checks for a stop or an advice to save that must be passed on to rank 0."""
LAST_SECONDS: Final = 5.0
"""Seconds for the training thread to notice the loss of a peer before another thread ends the process."""
ADVISED: Final = "advised"
"""Control message: the ranks of other pods report an advice to save to rank 0."""


class Peers:
    """Connects with the other ranks, if there are any.

    `end` ends the process. A thread of its own calls it soon after a rank was lost: the training thread may
    be stuck in a collective forever.
    """

    def __init__(self, session: Session, advice: RebalanceAdvice, end: Callable[[PeerLost], None]) -> None:
        self._session, self._end = session, end
        world = session.world
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self.control = connect(world, host=host, bind=session.run.bind_address, on_lost=self._lost)
        self.agreement = StopAgreement(self.control, stopping=lambda: session.preemption.stopping)
        if world.distributed:
            threading.Thread(target=self._forward, args=(advice,), name="spottrain-stop", daemon=True).start()

    def _forward(self, advice: RebalanceAdvice) -> None:
        """Reports a stop of this rank to rank 0, and again if the deadline becomes earlier; and `advice`."""
        told, preemption = float("inf"), self._session.preemption
        while True:
            if preemption.stopping and preemption.deadline < told:
                told = preemption.deadline
                self.agreement.request_stop(told, preemption.source)
            if self.control.world.first:
                for _, advised in self.control.take(ADVISED):
                    advice.tell(advised)
            elif self.control.world.first_here and (advised := advice.take()) is not None:
                with contextlib.suppress(PeerLost):  # the training thread notices it
                    self.control.send_to_leader(ADVISED, advised)
            time.sleep(LOOK_SECONDS)

    def _lost(self, error: PeerLost) -> None:
        log.unhindered("peer-lost", error=str(error))

        def end() -> None:
            time.sleep(LAST_SECONDS)
            self._end(error)

        threading.Thread(target=end, name="spottrain-peer-lost", daemon=True).start()

    def gone(self, seconds: float) -> bool:
        """Whether another rank is known to be lost; waits up to the given number of seconds to learn it."""
        return self.control.await_loss(seconds)

    def close(self) -> None:
        """Disconnects. Rank 0 waits for the others until the notice period is nearly over."""
        self.control.close(min(10.0, max(self._session.preemption.seconds_left(), 0.1)))
