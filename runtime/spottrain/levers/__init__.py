"""What makes a step cheaper, or the training better: for `Trainer` and for a loop of one's own.

    from spottrain.levers import Amp, EMA
    from spottrain.levers.activations import apply
    import spottrain                       # spottrain.levers.rates.scaled(...), without a second import

Every one is one import and can be used alone; names and modules are loaded on first use. What each is good
for, and when not to use it: docs/techniques.md; three lines of each: docs/own-loop.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spottrain import lazy

if TYPE_CHECKING:
    from spottrain.levers import (
        accumulation,
        activations,
        batchsize,
        compiling,
        compression,
        ema,
        memory,
        optimizers,
        precision,
        rates,
        rehearsing,
        stopping,
        trackers,
    )
    from spottrain.levers.activations import Policy
    from spottrain.levers.batchsize import Trial
    from spottrain.levers.compiling import compiled, warm_up
    from spottrain.levers.ema import EMA
    from spottrain.levers.fits import autofit
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
    "accumulation",
    "activations",
    "autofit",
    "batchsize",
    "compiled",
    "compiling",
    "compression",
    "ema",
    "memory",
    "optimizers",
    "precision",
    "rates",
    "rehearsal",
    "rehearsing",
    "stopping",
    "trackers",
    "warm_up",
]

_MODULES: Final = (
    "accumulation",
    "activations",
    "batchsize",
    "compiling",
    "compression",
    "ema",
    "memory",
    "optimizers",
    "precision",
    "rates",
    "rehearsing",
    "stopping",
    "trackers",
)
_HOME: Final = {
    "Amp": "spottrain.levers.precision",
    "EMA": "spottrain.levers.ema",
    "EarlyStopping": "spottrain.levers.stopping",
    "Policy": "spottrain.levers.activations",
    "Precision": "spottrain.levers.precision",
    "Trackers": "spottrain.levers.trackers",
    "Trial": "spottrain.levers.batchsize",
    "autofit": "spottrain.levers.fits",
    "compiled": "spottrain.levers.compiling",
    "rehearsal": "spottrain.levers.rehearsing",
    "warm_up": "spottrain.levers.compiling",
}

__getattr__ = lazy.names(__name__, _HOME, _MODULES)
