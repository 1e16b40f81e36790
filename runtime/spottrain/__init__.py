"""spottrain: the in-container training runtime, also imported on a laptop (`import spottrain`).

    spottrain.seed(1)
    trainer = spottrain.Trainer(model=model, optimizer=adam, train_dataset=data, loss_fn=loss, max_steps=1000)
    trainer.fit()

Names are imported on first use, so `import spottrain` does not import torch. The operator imports
`spottrain.contract`, and the entry point must install its SIGTERM handler before any slow import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spottrain.core import lazy

if TYPE_CHECKING:
    from spottrain import data, diagnostics, errors, techniques
    from spottrain.checkpoint.weights_files import load_weights
    from spottrain.core.device import seed
    from spottrain.core.training_settings import ActivationCheckpointing, LearningRateScaling, Profile
    from spottrain.data.download_cache import cached
    from spottrain.techniques.early_stopping import EarlyStopping
    from spottrain.training.data_parallel import shard
    from spottrain.training.job_settings import job_settings
    from spottrain.training.run import Run
    from spottrain.training.trainer import Result, StepHooks, Trainer

__all__ = [
    "ActivationCheckpointing",
    "EarlyStopping",
    "LearningRateScaling",
    "Profile",
    "Result",
    "Run",
    "StepHooks",
    "Trainer",
    "cached",
    "data",
    "diagnostics",
    "errors",
    "job_settings",
    "load_weights",
    "seed",
    "shard",
    "techniques",
]

_MODULES = ("data", "diagnostics", "errors", "techniques")
_HOME = {
    "ActivationCheckpointing": "spottrain.core.training_settings",
    "EarlyStopping": "spottrain.techniques.early_stopping",
    "Run": "spottrain.training.run",
    "StepHooks": "spottrain.training.trainer",
    "LearningRateScaling": "spottrain.core.training_settings",
    "Profile": "spottrain.core.training_settings",
    "Trainer": "spottrain.training.trainer",
    "Result": "spottrain.training.trainer",
    "cached": "spottrain.data.download_cache",
    "seed": "spottrain.core.device",
    "shard": "spottrain.training.data_parallel",
    "load_weights": "spottrain.checkpoint.weights_files",
    "job_settings": "spottrain.training.job_settings",
}

# Imports submodules on first use too, such as spottrain.data in `spottrain.data.BatchSampler`.
__getattr__ = lazy.names(__name__, _HOME, _MODULES)
