"""What is measured beside a loop that is not `Trainer`'s, and marks no phases. Made by it and the callbacks.

A profile if one is asked for, how busy the GPU is, and what the loader workers hold. What binds the training
is told by `diagnosis.Watch` alone, which a loop must be marked for; `Trainer`'s is, by `watch`.
"""

from __future__ import annotations

import torch

from spottrain.diagnostics.gpu_monitor import sampled
from spottrain.diagnostics.loader_memory import watched
from spottrain.diagnostics.profiler import of_run
from spottrain.lifecycle.session import Session
from spottrain.lifecycle.worker_signals import worker_pids


class Beside:
    """Of an attempt that goes on after step `start`. total_steps: None where nobody knows.

    Raises ConfigurationError where the profile's window ends after the run.
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
        """After each optimizer step."""
        self._profiler.step()

    def close(self) -> None:
        """At the end of the loop, however it came; what the profile has made is stored then."""
        if self._memory is not None:
            self._memory.close()
        self._sampler.close()
        self._profiler.close()
