"""spottrain: the in-container training runtime, also imported on a laptop (`import spottrain`).

    spottrain.seed(1)
    trainer = spottrain.Trainer(model=model, optimizer=adam, train_set=dataset, loss=loss, max_steps=1000)
    trainer.fit()

Names are loaded on first use, so that `import spottrain` costs no torch: the operator imports
`spottrain.contract`, and the entry point must have its SIGTERM handler before anything slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spottrain import lazy

if TYPE_CHECKING:
    from spottrain import data, diagnosis, levers, schedule
    from spottrain.data.cache import cached
    from spottrain.device import seed
    from spottrain.guard import Guard
    from spottrain.levers.stopping import EarlyStopping
    from spottrain.ownloop import training_arguments
    from spottrain.replica import shard
    from spottrain.trainer import Result, Trainer
    from spottrain.training import ActivationCheckpointing, LearningRateScaling, Profile
    from spottrain.weights import load_weights

__all__ = [
    "ActivationCheckpointing",
    "EarlyStopping",
    "Guard",
    "LearningRateScaling",
    "Profile",
    "Result",
    "Trainer",
    "cached",
    "data",
    "diagnosis",
    "levers",
    "load_weights",
    "schedule",
    "seed",
    "shard",
    "training_arguments",
]

_MODULES = ("data", "diagnosis", "levers", "schedule")
_HOME = {
    "ActivationCheckpointing": "spottrain.training",
    "EarlyStopping": "spottrain.levers.stopping",
    "Guard": "spottrain.guard",
    "LearningRateScaling": "spottrain.training",
    "Profile": "spottrain.training",
    "Trainer": "spottrain.trainer",
    "Result": "spottrain.trainer",
    "cached": "spottrain.data.cache",
    "seed": "spottrain.device",
    "shard": "spottrain.replica",
    "load_weights": "spottrain.weights",
    "training_arguments": "spottrain.ownloop",
}

# spottrain.data.loader, without a second import
__getattr__ = lazy.names(__name__, _HOME, _MODULES)
