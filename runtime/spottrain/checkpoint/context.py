"""The part of a run that the checkpoint manager depends on."""

from __future__ import annotations

from typing import NoReturn, Protocol

from spottrain.core.preemption import Preemption
from spottrain.core.progress import ProgressBoard
from spottrain.core.run_config import RunConfig
from spottrain.distributed.world import World
from spottrain.errors import RunError
from spottrain.storage.outage import Outage


class RunContext(Protocol):
    world: World
    run: RunConfig
    attempt: int
    board: ProgressBoard
    preemption: Preemption
    outage: Outage
    """Tracks whether the store responds, and whether requests are retried."""
    store_wait: float
    """Seconds to wait for a store that does not respond."""

    def begin_claim(self) -> None:
        """Notes that HEAD may be claimed from now on: no signal may end the process before the response."""

    def end_idle(self) -> NoReturn:
        """Ends a run that has nothing to save."""

    def fail_now(self, error: RunError) -> NoReturn:
        """Ends the process from any thread."""
