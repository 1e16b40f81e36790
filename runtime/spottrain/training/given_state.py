"""`GivenState`: what a `Run` is given to save, by name.

Plain values of `extra` (`checkpoint.plain_values`) that can be changed, and generators, are restored in
place, so the script's own variable stays valid. Numbers and strings are immutable: read and write them as
`run.extra[name]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spottrain.checkpoint import outside_parameters, plain_state
from spottrain.checkpoint.plain_values import (
    generator_state,
    is_generator,
    is_plain,
    restored,
    set_generator_state,
    stored,
)
from spottrain.core import log
from spottrain.errors import ConfigurationError
from spottrain.techniques.ema import EMA
from spottrain.training.position import has_state
from spottrain.training.state_tree import MAIN, SCALER, SCHEDULER


class GivenState:
    """Model, optimizers, and what else has a state. Raises ConfigurationError if it cannot be saved.

    `give_scheduler`: how the script gives a scheduler, for an error.
    """

    def __init__(
        self, model: Any, optimizer: Any, scheduler: Any, scaler: Any, extra: Any, *, give_scheduler: str
    ) -> None:
        self.model = _models(model)
        self.optimizers = _optimizers(optimizer)
        parts = model.values() if isinstance(model, Mapping | torch.nn.ModuleDict) else [model]
        self.replicated = any(map(plain_state.replica, parts))
        """Whether DDP wraps it."""
        self.modules: dict[str, torch.nn.Module] = {}
        self.objects: dict[str, Any] = {}
        self.left_out: set[str] = set()
        """Names of what is not used now, such as the scaler of fp16, or an average."""
        self.values = dict(extra) if isinstance(extra, Mapping) else {}
        for kind, given in ((SCHEDULER, scheduler), (SCALER, scaler), ("extra", extra)):
            self._add(kind, given)
        for each in scheduler.values() if isinstance(scheduler, Mapping) else [scheduler]:
            outside_parameters.require_of(each, self.optimizers.values(), "Run(scheduler=...)")
        scheduled = any(hasattr(each, "optimizer") for each in self.objects.values())
        self._may_schedule, self._give_scheduler = scheduled or scheduler is not None, give_scheduler

    def _add(self, kind: str, given: Any) -> None:
        if isinstance(given, Mapping):
            named = {f"{kind}.{name}": each for name, each in given.items()}
        elif given is None and kind != SCALER:
            return
        elif kind == "extra":
            raise ConfigurationError(
                f"Run(extra=...) is a {type(given).__name__}: give it a dict of names, such as "
                "extra={'ema': ema}"
            )
        else:
            named = {kind: given}
        for name, each in named.items():
            if each is None:
                self.left_out.add(name)
            elif isinstance(each, torch.nn.Module):
                self.modules[name] = plain_state.plain(each)
            elif has_state(each):
                self.objects[name] = each
            elif kind == "extra" and (plain := adapted(self.values, name.removeprefix("extra."))) is not None:
                self.objects[name] = plain
            else:
                raise ConfigurationError(
                    f"Run: {name} is a {type(each).__name__} without state_dict() and load_state_dict(), "
                    "so it cannot be saved; give it both, or leave it out"
                    + ("; or give what is in it: numbers, tensors, dicts of them" if kind == "extra" else "")
                )

    def require_scheduler(self) -> None:
        """Raises ConfigurationError if the script has made a torch scheduler that is not saved."""
        groups = [group for each in self.optimizers.values() for group in each.param_groups]
        if not self._may_schedule and any("initial_lr" in group for group in groups):
            raise ConfigurationError(
                "a torch scheduler was made for the optimizer, and the Run is not given it, so after an "
                f"interruption its rates would start again from the beginning: {self._give_scheduler}"
            )


def _models(given: Any) -> torch.nn.Module:
    """Returns one module; parameters of several are named `<key>.<parameter>`."""
    if isinstance(given, torch.nn.Module) and not isinstance(given, torch.nn.ModuleDict):
        return plain_state.plain(given)
    if not isinstance(given, Mapping | torch.nn.ModuleDict) or not given:
        raise ConfigurationError(
            f"Run(model=...) is {given!r:.80}; give a torch module, or a dict of modules"
        )
    try:
        return torch.nn.ModuleDict({name: plain_state.plain(each) for name, each in given.items()})
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"Run(model=...): {error}; give a dict of names and torch modules"
        ) from error


def _optimizers(given: Any) -> dict[str, torch.optim.Optimizer]:
    named = dict(given) if isinstance(given, Mapping) else {MAIN: given}
    for name, each in named.items():
        each = getattr(each, "optimizer", each)  # unwraps Accelerate's optimizer
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigurationError(
                f"Run(optimizer=...): {name} is a {type(each).__name__}; give a torch optimizer, or a dict "
                "of several"
            )
        named[name] = each
    if not named:
        raise ConfigurationError("Run(optimizer={}) is empty; give a torch optimizer, or a dict of them")
    return named


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
