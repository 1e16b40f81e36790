"""What `Run(extra={...})` holds beside objects with a state: plain values, random generators, averages.

Plain values (`checkpoint.plain_values`) that can be changed, and generators, are restored in place, so the
script's own variable stays valid. Numbers and strings are immutable: read and write them as
`run.extra[name]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spottrain.checkpoint import plain_state
from spottrain.checkpoint.plain_values import (
    SCALARS,
    generator_state,
    is_generator,
    is_plain,
    restored,
    set_generator_state,
    stored,
)
from spottrain.core import log
from spottrain.techniques.ema import EMA


class Values(dict[str, Any]):
    """Values of `run.extra` by name. `read`: names that the script has read or written here."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.read.add(name)
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.read.add(name)
        return super().pop(name, *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().setdefault(name, default)

    def update(self, *given: Any, **named: Any) -> None:
        for name, value in dict(*given, **named).items():
            self[name] = value

    def values(self) -> Any:
        self.read.update(self)
        return super().values()

    def items(self) -> Any:
        self.read.update(self)
        return super().items()

    @property
    def unread(self) -> list[str]:
        """Names of numbers and strings, also in tuples, that the script has neither read nor written here."""
        return sorted(n for n in self if _is_immutable(dict.get(self, n)) and n not in self.read)


class Plain:
    """Saves and restores one entry of `values`, which is equal on all ranks."""

    def __init__(self, values: Values, name: str) -> None:
        self._values, self._name = values, name

    def state_dict(self) -> dict[str, Any]:
        return {"value": stored(dict.get(self._values, self._name))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if type or shape differ."""
        here = dict.get(self._values, self._name)
        dict.__setitem__(self._values, self._name, restored(here, state["value"]))


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


def adapted(values: Values, name: str) -> Plain | Generator | None:
    """Returns an object that saves and restores the value; None if the value is not plain."""
    given = dict.get(values, name)
    if is_generator(given):
        return Generator(given)
    return Plain(values, name) if is_plain(given) else None


def _is_immutable(value: Any) -> bool:
    """Whether a part of the value can be restored only in `run.extra`."""
    if isinstance(value, tuple):
        return any(_is_immutable(item) for item in value)
    return isinstance(value, (*SCALARS, frozenset))


# --- averages of the weights --------------------------------------------------------------------------------
def final_weights(model: torch.nn.Module, emas: Mapping[str, EMA], *, tell: bool) -> dict[str, Any]:
    """Returns the final weights by name: the average if there is a usable one, as in `Trainer`.

    A ModuleDict counts as several models, some of which may have an average. All ranks must call it: each
    returns its part of sharded weights.
    """
    weights = plain_state.model_state(model)
    averages: dict[int, torch.Tensor] = {}
    for name, ema in emas.items():
        found = ema.by_weight()
        if not found.keys() & _ids(model):
            continue  # an average of something else
        others = [
            each for each, other in emas.items() if other is not ema and found.keys() & other.by_weight()
        ]
        why = _why_not(model, ema, found, others)
        averages |= {} if why else found
        if tell and why:
            text = f"the final weights are not the average {name}, but the raw ones: {why}"
            log.event("advice", about="ema", text=text)
        elif tell:
            log.event("ema", final="the average", of=name)
    return {name: averages.get(id(value), value) for name, value in weights.items()}


def _why_not(model: torch.nn.Module, ema: EMA, found: Mapping[int, Any], others: list[str]) -> str:
    """Returns why the average does not become the final weights; "" if it does."""
    if others:
        return f"{' and '.join(others)} averages the same; give the Run one of them, or ship it by copy_to"
    if not ema.updated:
        return "it was never updated; call ema.update(run.global_step + 1) before run.step_completed()"
    if not found.keys() <= _ids(model) or any(
        found.keys() & _ids(part) and not _ids(part, trained=True) <= found.keys() for part in _parts(model)
    ):
        return "it is of a part of the model, and with the raw rest it is no model that was trained"
    return ""


def _parts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    yield from model.values() if isinstance(model, torch.nn.ModuleDict) else (model,)


def _ids(model: torch.nn.Module, *, trained: bool = False) -> set[int]:
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad or not trained}


class AveragePosition:
    """Warns of averages that are updated after `step_completed`, or with the number of the previous step.

    A save inside `step_completed` then lacks the update, so a resume is not exact.
    """

    def __init__(self, emas: Mapping[str, EMA]) -> None:
        self._emas = dict(emas)
        self._before: dict[str, int] = {}

    def counted(self, step: int) -> None:
        """Checks the averages within `step_completed`.

        A single missing update may be a step that fp16 skipped; but such an update does not come later.
        """
        for name, ema in list(self._emas.items()):
            if ema.updated == step - 1 and self._before.get(name) == step - 2:
                del self._emas[name]  # logged once
                text = f"{name} is a step behind, so a resume is not exact: call update(run.global_step + 1)"
                log.event("advice", about="ema", text=f"{text} before run.step_completed()")
            self._before[name] = ema.updated
