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
    from spottrain.device import seed
    from spottrain.state import load_weights
    from spottrain.trainer import Result, Trainer

__all__ = ["Result", "Trainer", "load_weights", "seed"]

_HOME = {"Trainer": "trainer", "Result": "trainer", "seed": "device", "load_weights": "state"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'spottrain' has no attribute {name!r}")
    return getattr(import_module(f"spottrain.{_HOME[name]}"), name)
