"""Finds what slows training: where each step's time goes, what limits it, and which setting to change.

    step_timer (marks around the phases of a step) -> Shares ------+
    flops (one counted step) -> Work, Roofline --------------------+-> bottleneck.diagnose -> Verdict
    gpu_monitor, techniques.compilation ---------------------------+
    loop_watch: all of that for one loop
    profiler: a torch.profiler trace of some steps, if requested

    from spottrain.diagnostics import Profiler, Watch

Each works alone in a custom loop.
"""

from __future__ import annotations

from spottrain.diagnostics.bottleneck import InUse, Verdict
from spottrain.diagnostics.loop_watch import Watch
from spottrain.diagnostics.profiler import Profiler
from spottrain.diagnostics.step_timer import StepTimer

__all__ = ["InUse", "Profiler", "StepTimer", "Verdict", "Watch"]
