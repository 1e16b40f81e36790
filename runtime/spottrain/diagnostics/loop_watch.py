"""`Watch`: the whole diagnosis of one loop, with time split, one counted step, GPU samples and verdicts.

watch = Watch(device, precision="bf16", use=InUse(workers=4), world=world)
for ...:
    with watch.counting():              # counts a single step; no effect in the others
        with watch.timer.data(): ...    # the phases, as in `step_timer`
        ...
    watch.step_done()                   # in place of timer.step_done()
    if step % log_every == 0:
        watch.look()                    # on all ranks after the same step
watch.close()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Final

import torch

from spottrain.core import log
from spottrain.diagnostics.bottleneck import (
    MIN_SECONDS,
    InUse,
    Measurements,
    Name,
    Verdict,
    advice,
    diagnose,
)
from spottrain.diagnostics.flops import Work, counted
from spottrain.diagnostics.gpu_monitor import GPUMonitor
from spottrain.diagnostics.step_timer import Shares, StepTimer, gathered
from spottrain.distributed.world import World
from spottrain.techniques.compilation import compilations

SETTLED: Final = 3
"""First steps of an attempt that are left out: compilation, allocations. The next one is counted."""


class Watch:
    """Diagnoses one training loop on this rank.

    Args:
        device: the device that trains.
        precision: number format of the computation.
        use: current settings, so that advice names only what is not set yet.
        world: the ranks of the run.
        clock: host clock in seconds; for tests.
        sampler: GPU monitor; for tests.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        precision: str = "fp32",
        use: InUse | None = None,
        world: World | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sampler: GPUMonitor | None = None,
    ) -> None:
        self._sampler = sampler or GPUMonitor(device)
        self.timer = StepTimer(device, clock=clock, restarted=self._sampler.restart)
        self.work: Work | None = None
        """Work of the counted step; None before it."""
        self.facts: Measurements | None = None
        """What the last `look` has measured, and `verdict` what it means; None before it."""
        self.verdict: Verdict | None = None
        self._device = device
        self.use, self._world = use or InUse(precision=precision), world or World()
        """`use` may be replaced when a setting changes during the run."""
        self._steps = 0
        self._counting = False
        self._compiled = compilations()
        self._told: Name | None = None

    def counting(self) -> AbstractContextManager[object]:
        """Returns a context manager for a whole step, with the optimizer.

        It counts the work of the step after the first SETTLED ones, once per attempt. That step takes
        several times as long, so the time split leaves it out.
        """
        return self._count() if self._steps == SETTLED and self.work is None else nullcontext()

    def step_done(self) -> None:
        """Ends a step. Call it after each optimizer step."""
        self._steps += 1
        if self._counting:
            self._counting = False
            self.timer.restart()
            return
        self.timer.step_done()
        if self._steps == SETTLED:
            self.timer.window()
            self._sampler.restart()
            self._compiled = compilations()

    def alone(self) -> Measurements:
        """Returns measurements of this rank alone since the last `look`, without a collective."""
        return self._facts(self.timer.window(clear=False), together=False)

    def look(self) -> Verdict | None:
        """Diagnoses the steps since the last call. A collective if there are several ranks.

        Rank 0 logs the verdict if it differs from the last one.

        Returns:
            The bottleneck; None if the window is shorter than `bottleneck.MIN_SECONDS`, or without data.
        """
        shares = self.timer.window(clear=False)
        facts = self._facts(shares)
        if shares.total < MIN_SECONDS:
            return None
        self.timer.window()
        self._compiled = compilations()
        self.facts, self.verdict = facts, diagnose(facts)
        if self.verdict is not None and self._world.first and self.verdict.name is not self._told:
            self._told = self.verdict.name
            first = advice(facts) or None
            log.event("diagnosis", verdict=self.verdict.name, first=first, why=self.verdict.text)
        return self.verdict

    def close(self) -> None:
        """Ends the GPU monitor."""
        self._sampler.close()

    # --- private ------------------------------------------------------------------------------------
    @contextmanager
    def _count(self) -> Iterator[object]:
        self._counting = True
        with counted(self._device) as work:
            yield work
        self.work = work

    def _facts(self, shares: Shares, *, together: bool = True) -> Measurements:
        compiled = compilations().since(self._compiled)
        work = self.work or Work()
        settled = self._steps > SETTLED
        return Measurements(
            shares=shares,
            roofline=work.roofline,
            compilations=compiled.count if settled else 0,
            compile_seconds=compiled.seconds if settled else 0.0,
            ranks=gathered(shares, self._world) if together else (),
            busy=self._sampler.busy,
            mfu=work.mfu(shares.mean("total")),
            use=self._as_computed(work),
        )

    def _as_computed(self, work: Work) -> InUse:
        """Returns `use` with the counted number format: the loop may not declare its 16-bit precision."""
        halved = self.use.precision in ("fp32", "tf32") and work.format in ("bf16", "fp16")
        return replace(self.use, precision=work.format) if halved and work.format else self.use
