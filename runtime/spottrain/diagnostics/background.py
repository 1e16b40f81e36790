"""`Beside`: diagnostics for a custom loop without phase marks.

It covers a profile if requested, GPU utilisation, and the memory of the loader workers. It finds no
bottleneck: that needs `diagnostics.Watch`, with marks in the loop.
"""

from __future__ import annotations

import torch

from spottrain.diagnostics.gpu_monitor import sampled
from spottrain.diagnostics.loader_memory import watched
from spottrain.diagnostics.profiler import of_run
from spottrain.lifecycle.session import Session
from spottrain.lifecycle.worker_signals import worker_pids


class BackgroundMonitor:
    """Monitors an attempt that resumes after step `start`. `total_steps`: None if unknown.

    Raises ConfigurationError if the profile's window ends after the run.
    """

    def __init__(
        self, session: Session, *, start: int, total_steps: int | None, device: torch.device | None
    ) -> None:
        self._profiler = of_run(
            session, session.run.training.profile, start=start, total_steps=total_steps, device=device
        )
        self._sampler = sampled(device or torch.device("cpu"), session.board)
        self._memory = watched(session.world, session.board, worker_pids)

    def step(self) -> None:
        """Counts an optimizer step."""
        self._profiler.step()

    def close(self) -> None:
        """Ends all monitors, and waits until the profile is stored."""
        if self._memory is not None:
            self._memory.close()
        self._sampler.close()
        self._profiler.close()
