"""What `Run(extra={...})` holds beside objects with a state: plain values, random generators, averages.

Plain values (`checkpoint.plain_values`) that can be changed, and generators, are restored in place, so the
script's own variable stays valid. Numbers and strings are immutable: read and write them as
`run.extra[name]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spottrain.checkpoint import plain_state
from spottrain.checkpoint.plain_values import (
    generator_state,
    is_generator,
    is_plain,
    restored,
    set_generator_state,
    stored,
)
from spottrain.core import log
from spottrain.techniques.ema import EMA


class Plain:
    """Saves and restores one entry of `values`, which is equal on all ranks."""

    def __init__(self, values: dict[str, Any], name: str) -> None:
        self._values, self._name = values, name

    def state_dict(self) -> dict[str, Any]:
        return {"value": stored(self._values.get(self._name))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if type or shape differ."""
        self._values[self._name] = restored(self._values.get(self._name), state["value"])


class Generator:
    """Saves and restores a random generator per rank. A new rank keeps the state it has."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {}

    def own_state_dict(self) -> dict[str, Any]:
        return generator_state(self._generator)

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Raises KeyError or ValueError if the generator is of another type."""
        if own is not None:
            set_generator_state(self._generator, own)


def adapted(values: dict[str, Any], name: str) -> Plain | Generator | None:
    """Returns an object that saves and restores the value; None if the value is not plain."""
    given = values[name]
    if is_generator(given):
        return Generator(given)
    return Plain(values, name) if is_plain(given) else None


# --- averages of the weights --------------------------------------------------------------------------------
def final_weights(model: torch.nn.Module, emas: Mapping[str, EMA], *, tell: bool) -> dict[str, Any]:
    """Returns the final weights by name: the average, if one is of all that was trained of the model.

    A ModuleDict counts as several models, some of which may have an average. All ranks must call it: each
    returns its part of sharded weights.
    """
    weights = plain_state.model_state(model)
    parts = [model, *(model.values() if isinstance(model, torch.nn.ModuleDict) else ())]
    found = {name: ema.by_weight() for name, ema in emas.items()}
    averages: dict[int, torch.Tensor] = {}
    for name, average in found.items():
        others = [each for each in found if each != name and found[each].keys() & average.keys()]
        whole = any(_ids(part, trained=True) <= average.keys() <= _ids(part) for part in parts)
        if whole and emas[name].updated and not others:
            averages |= average
        if tell and average.keys() & _ids(model):  # else it is of something else
            why = "it was not updated, or it is of a part of the model alone"
            why = f"{' and '.join(others)} averages the same" if others else why
            final = "the average" if average.keys() <= averages.keys() else f"the raw ones: {why}"
            log.event("ema", final=final, of=name)
    return {name: averages.get(id(value), value) for name, value in weights.items()}


def _ids(model: torch.nn.Module, *, trained: bool = False) -> set[int]:
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad or not trained}
