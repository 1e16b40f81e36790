"""`Monitor`: everything that observes one attempt of a training, whatever its loop.

Each attempt gets a profile if requested, and GPU utilisation. A loop that marks the phases of its steps
(`Phases`) also gets their time split and a bottleneck. Results go to the log, the progress board and the
store.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch

from spottrain.core import log
from spottrain.core.training_settings import Profile
from spottrain.diagnostics.bottleneck import InUse
from spottrain.diagnostics.flops import Work
from spottrain.diagnostics.gpu_monitor import GPUMonitor
from spottrain.diagnostics.loop_watch import Watch
from spottrain.diagnostics.profiler import of_run
from spottrain.lifecycle.session import Session

EVERY: Final = 64
"""Steps between two diagnoses. They are collectives, so all ranks make them at the same steps."""


class Phases(Protocol):
    """What a loop with phase marks knows about itself."""

    precision: str

    def in_use(self) -> InUse:
        """Returns the current settings, so that advice names only what is not set yet."""

    def work(self) -> Work:
        """Returns the work of one step, empty if it cannot be counted. Called once, between two steps."""


class Monitor:
    """Monitors an attempt that resumes after step `start`, until `close`.

    `total_steps`: None if unknown. `phases`: None for a loop without phase marks; otherwise the loop marks
    them with `timer`, the `StepTimer`.

    Raises ConfigurationError if the profile's window ends after the run.
    """

    def __init__(
        self,
        session: Session,
        *,
        start: int,
        total_steps: int | None,
        device: torch.device,
        profile: Profile | None,
        phases: Phases | None = None,
    ) -> None:
        self._session, self._phases = session, phases
        self._watch: Watch | None = None
        self._gpu = GPUMonitor(
            device,
            on_sample=lambda gpu: session.board.update(
                gpu_utilisation=gpu.utilisation, gpu_memory=gpu.memory
            ),
        )
        if phases is not None:
            self._watch = Watch(
                device,
                precision=phases.precision,
                use=phases.in_use(),
                world=session.world,
                sampler=self._gpu,
            )
            self.timer = self._watch.timer
        self._profiler = of_run(
            session,
            profile,
            start=start,
            total_steps=total_steps,
            device=device,
            facts=(lambda: None) if self._watch is None else self._watch.alone,
        )
        self._steps = 0

    def step_done(self) -> None:
        """Counts an optimizer step, and diagnoses the run every EVERY steps."""
        self._steps += 1
        if self._watch is not None:
            self._watch.step_done()
        was_on = self._profiler.on
        self._profiler.step()
        if self._watch is None or self._phases is None:
            return
        if was_on and not self._profiler.on:
            self.timer.restart()  # writing the trace took seconds
        if self._steps % EVERY == 0:
            self._look(self._watch, self._phases)

    def _look(self, watch: Watch, phases: Phases) -> None:
        if watch.work is None:
            watch.work = phases.work()
        watch.use = phases.in_use()
        watch.look()
        found = watch.figures
        self._session.board.update(
            shares=found.shares.shares if found.shares.steps else {},
            mfu=found.mfu,
            flops_per_step=None if found.step_flops is None else float(found.step_flops),
            verdict="" if found.verdict is None else str(found.verdict.name),
            diagnosis="" if found.verdict is None else found.verdict.text,
        )
        self.timer.restart()

    def close(self) -> None:
        """Ends all observers, waits until the profile is stored, and logs the time split of the attempt."""
        self._profiler.close()
        self._gpu.close()
        if self._watch is None:
            return
        shares = self.timer.whole()
        if shares.steps and self._session.world.first:
            parts = {name: f"{share:.3f}" for name, share in shares.shares.items()}
            log.event("step-time", steps=shares.steps, step_seconds=shares.step_seconds, **parts)
