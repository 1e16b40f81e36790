"""Techniques that make a step cheaper or training better, for `Trainer` and for custom loops.

    from spottrain.techniques import Amp, EMA
    from spottrain.techniques.activation_checkpointing import apply
    import spottrain          # then spottrain.techniques.lr_scaling.scaled(...), without a second import

Each technique works alone. Names and modules are loaded on first use. docs/techniques.md says when to use
each of them and when not. docs/job-settings.md has a short example of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spottrain.core import lazy

if TYPE_CHECKING:
    from spottrain.techniques import (
        accumulation,
        activation_checkpointing,
        compilation,
        dry_run,
        early_stopping,
        ema,
        lr_scaling,
        optimizers,
        precision,
        schedules,
        trackers,
    )
    from spottrain.techniques.compilation import compiled, warm_up
    from spottrain.techniques.dry_run import rehearsal
    from spottrain.techniques.early_stopping import EarlyStopping
    from spottrain.techniques.ema import EMA
    from spottrain.techniques.memory_fit import find_batch_size
    from spottrain.techniques.precision import Amp, Precision
    from spottrain.techniques.schedules import lr_schedule
    from spottrain.techniques.trackers import Trackers

__all__ = [
    "EMA",
    "Amp",
    "EarlyStopping",
    "Precision",
    "Trackers",
    "accumulation",
    "activation_checkpointing",
    "compilation",
    "compiled",
    "dry_run",
    "early_stopping",
    "ema",
    "find_batch_size",
    "lr_scaling",
    "lr_schedule",
    "optimizers",
    "precision",
    "rehearsal",
    "schedules",
    "trackers",
    "warm_up",
]

_HOME: Final = {
    "Amp": "spottrain.techniques.precision",
    "EMA": "spottrain.techniques.ema",
    "EarlyStopping": "spottrain.techniques.early_stopping",
    "Precision": "spottrain.techniques.precision",
    "Trackers": "spottrain.techniques.trackers",
    "compiled": "spottrain.techniques.compilation",
    "find_batch_size": "spottrain.techniques.memory_fit",
    "lr_schedule": "spottrain.techniques.schedules",
    "rehearsal": "spottrain.techniques.dry_run",
    "warm_up": "spottrain.techniques.compilation",
}

__getattr__ = lazy.names(__name__, _HOME, set(__all__) - set(_HOME))
