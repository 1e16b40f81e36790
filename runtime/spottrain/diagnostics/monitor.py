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
from spottrain.diagnostics.profiler import Profiler
from spottrain.lifecycle.session import Session

EVERY: Final = 64
"""Steps between two diagnoses. They are collectives, so all ranks make them at the same steps."""


class Phases(Protocol):
    """What a loop with phase marks knows about itself."""

    def in_use(self) -> InUse:
        """Returns the current settings, so that advice names only what is not set yet."""

    def work(self) -> Work:
        """Returns the work of one step, empty if it cannot be counted. Called once, after the first step."""


class Monitor:
    """Monitors an attempt that resumes after step `start`, until `close`.

    `total_steps`: None if unknown. `phases`: None for a loop without phase marks; otherwise the loop marks
    them with `timer`, the `StepTimer`.

    A profile for which too few steps are left is not made, and that is logged. Raises ConfigurationError if
    there is no store for it.
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
            self._watch = Watch(device, use=phases.in_use(), world=session.world, sampler=self._gpu)
            self.timer = self._watch.timer
        if profile is not None and total_steps is not None and start + profile.steps > total_steps:
            why = f"{total_steps - start} steps are left, and the window has {profile.steps}"
            log.event("profile-left-out", why=why)
            profile = None
        self._profiler = Profiler(
            profile,
            session.store,
            attempt=session.attempt,
            rank=session.world.rank,
            device=device,
            facts=(lambda: None) if self._watch is None else self._watch.alone,
        )
        self._steps = 0
        self._left = EVERY if total_steps is None else total_steps - start
        """Steps of this attempt; `EVERY` if unknown."""

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

    def count_work(self) -> None:
        """Counts the work of a step, if there will be a diagnosis. It takes longer than the step itself.

        Not while a profile is recorded, which would show it.
        """
        if self._watch is None or self._phases is None or self._profiler.recording:
            return
        if self._left >= EVERY:
            self._watch.work = self._phases.work()

    def _look(self, watch: Watch, phases: Phases) -> None:
        watch.use = phases.in_use()
        watch.look()
        if (facts := watch.facts) is not None:
            verdict, flops = watch.verdict, watch.work.flops if watch.work is not None else 0
            self._session.board.update(
                shares=facts.shares.shares,
                mfu=facts.mfu,
                flops_per_step=float(flops) if flops else None,
                verdict="" if verdict is None else str(verdict.name),
                diagnosis="" if verdict is None else verdict.text,
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
            log.event("step-time", steps=shares.steps, step_seconds=shares.mean("total"), **parts)
