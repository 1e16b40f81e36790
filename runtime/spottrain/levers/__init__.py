"""What makes a step cheaper, or the training better: for `Trainer` and for a loop of one's own.

    from spottrain.levers import Amp, EMA
    from spottrain.levers.activations import apply

Every one is one import and can be used alone; names are loaded on first use. What each is good for, and when
not to use it: docs/techniques.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from spottrain.levers.activations import Policy
    from spottrain.levers.batchsize import Trial
    from spottrain.levers.compiling import compiled, warm_up
    from spottrain.levers.ema import EMA
    from spottrain.levers.precision import Amp, Precision
    from spottrain.levers.rehearsing import rehearsal
    from spottrain.levers.stopping import EarlyStopping
    from spottrain.levers.trackers import Trackers

__all__ = [
    "EMA",
    "Amp",
    "EarlyStopping",
    "Policy",
    "Precision",
    "Trackers",
    "Trial",
    "compiled",
    "rehearsal",
    "warm_up",
]

_HOME: Final = {
    "Amp": "precision",
    "EMA": "ema",
    "EarlyStopping": "stopping",
    "Policy": "activations",
    "Precision": "precision",
    "Trackers": "trackers",
    "Trial": "batchsize",
    "compiled": "compiling",
    "rehearsal": "rehearsing",
    "warm_up": "compiling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'spottrain.levers' has no attribute {name!r}")
    return getattr(import_module(f"spottrain.levers.{_HOME[name]}"), name)
