"""What a checkpoint manager needs to know of the run it works for."""

from __future__ import annotations

from typing import NoReturn, Protocol

from spottrain.core.preemption import Interruption
from spottrain.core.progress import Board
from spottrain.core.run_config import RunConfig
from spottrain.distributed.world import World
from spottrain.errors import RunError
from spottrain.storage.outage import Outage


class RunContext(Protocol):
    world: World
    run: RunConfig
    attempt: int
    board: Board
    interruption: Interruption
    outage: Outage
    """Whether the store answers, and whether it is waited for."""
    store_wait: float
    """Seconds that it is waited for."""

    def end_idle(self) -> NoReturn:
        """Ends a run that has nothing to save."""

    def fail_now(self, error: RunError) -> NoReturn:
        """Ends the process from any thread."""
