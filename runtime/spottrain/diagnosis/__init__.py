"""Knowing what is slow: where each step's time goes, what binds it, and what to change.

    split (marks around the phases of a step) -> Shares --+
    flops (one counted step) -> Work -> machine -> Roofline --+-> verdict.diagnose -> Verdict
    nvml, compiling, ranks (further facts) ---------------+
    watch: all of that for one loop
    window, profiling: a profile of some steps, when asked for

    from spottrain.diagnosis import Profiler, Watch

Each is one import for a loop of one's own; names are loaded on first use. Only `window` is without torch, for
the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spottrain import lazy

if TYPE_CHECKING:
    from spottrain.diagnosis import flops, profiling, split, verdict, watch, window
    from spottrain.diagnosis.profiling import Profiler
    from spottrain.diagnosis.split import Split
    from spottrain.diagnosis.verdict import InUse, Verdict
    from spottrain.diagnosis.watch import Watch
    from spottrain.diagnosis.window import Window

__all__ = [
    "InUse",
    "Profiler",
    "Split",
    "Verdict",
    "Watch",
    "Window",
    "flops",
    "profiling",
    "split",
    "verdict",
    "watch",
    "window",
]

_MODULES: Final = ("flops", "profiling", "split", "verdict", "watch", "window")
_HOME: Final = {
    "InUse": "spottrain.diagnosis.verdict",
    "Profiler": "spottrain.diagnosis.profiling",
    "Split": "spottrain.diagnosis.split",
    "Verdict": "spottrain.diagnosis.verdict",
    "Watch": "spottrain.diagnosis.watch",
    "Window": "spottrain.diagnosis.window",
}

__getattr__ = lazy.names(__name__, _HOME, _MODULES)
