"""spottrain: the in-container training runtime, also imported on a laptop (`import spottrain`).

    spottrain.seed(1)
    trainer = spottrain.Trainer(model=model, optimizer=adam, train_set=dataset, loss=loss, max_steps=1000)
    trainer.fit()

Names are loaded on first use, so that `import spottrain` costs no torch: the operator imports
`spottrain.contract`, and the entry point must have its SIGTERM handler before anything slow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spottrain import data, levers
    from spottrain.device import seed
    from spottrain.guard import Guard
    from spottrain.levers.stopping import EarlyStopping
    from spottrain.parts import Result
    from spottrain.ranks.parallel import shard
    from spottrain.trainer import Trainer
    from spottrain.training import LearningRateScaling, Profile
    from spottrain.weights import load_weights

__all__ = [
    "EarlyStopping",
    "Guard",
    "LearningRateScaling",
    "Profile",
    "Result",
    "Trainer",
    "data",
    "levers",
    "load_weights",
    "seed",
    "shard",
]

_HOME = {
    "EarlyStopping": "levers.stopping",
    "Guard": "guard",
    "LearningRateScaling": "training",
    "Profile": "training",
    "Trainer": "trainer",
    "Result": "parts",
    "seed": "device",
    "shard": "ranks.parallel",
    "load_weights": "weights",
}


def __getattr__(name: str) -> Any:
    if name in ("data", "levers"):  # spottrain.data.loader, without a second import
        return import_module(f"spottrain.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'spottrain' has no attribute {name!r}")
    return getattr(import_module(f"spottrain.{_HOME[name]}"), name)
