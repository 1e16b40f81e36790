"""What `Run(extra={...})` holds beside objects with a state: plain values, random generators, averages.

Plain values are numbers, strings, tensors, and dicts and lists of them. Mutable ones (tensor, dict, list,
deque, array), also those in a tuple, and generators are restored in place, so the script's own variable stays
valid. Numbers and strings are immutable: read and write them as `run.extra[name]`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from typing import Any, Final

import torch

from spottrain.checkpoint import plain_state
from spottrain.core import log
from spottrain.techniques.ema import EMA

SCALARS: Final = (bool, int, float, str)


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

    @property
    def unread(self) -> list[str]:
        """Names of numbers and strings, also in tuples, that the script has neither read nor written here."""
        return sorted(n for n, each in self.items() if _is_immutable(each) and n not in self.read)


class Plain:
    """Saves and restores one entry of `values`, which is equal on all ranks."""

    def __init__(self, values: Values, name: str) -> None:
        self._values, self._name = values, name

    def state_dict(self) -> dict[str, Any]:
        return {"value": _stored(self._values.get(self._name))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if type or shape differ."""
        here = self._values.get(self._name)
        dict.__setitem__(self._values, self._name, _restored(here, state["value"]))


class Generator:
    """Saves and restores a random generator per rank. A new rank keeps the state it has."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {}

    def own_state_dict(self) -> dict[str, Any]:
        it = self._generator
        if isinstance(it, torch.Generator):
            return {"torch": it.get_state()}
        if isinstance(it, random.Random):
            return {"python": it.getstate()}
        if hasattr(it, "bit_generator"):
            return {"numpy": _lists(it.bit_generator.state)}
        return {"numpy": _lists(it.get_state(legacy=False))}

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Raises KeyError or ValueError if the generator is of another type."""
        it = self._generator
        if own is None:
            return
        if isinstance(it, torch.Generator):
            it.set_state(own["torch"])
        elif isinstance(it, random.Random):
            it.setstate(own["python"])
        elif hasattr(it, "bit_generator"):
            it.bit_generator.state = own["numpy"]
        else:
            it.set_state(own["numpy"])


def adapted(values: Values, name: str) -> Plain | Generator | None:
    """Returns an object that saves and restores the value; None if the value is not plain."""
    given = values.get(name)
    if _is_generator(given):
        return Generator(given)
    return Plain(values, name) if _is_plain(given) else None


def _is_immutable(value: Any) -> bool:
    """Whether a part of the value can be restored only in `run.extra`."""
    if isinstance(value, tuple):
        return any(_is_immutable(item) for item in value)
    return isinstance(value, SCALARS)


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator | random.Random) or (
        type(value).__module__.startswith("numpy.random")
        and (hasattr(value, "bit_generator") or hasattr(value, "get_state"))
    )


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, SCALARS) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple | deque):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (*SCALARS, torch.Tensor)) or _is_array(value)


def _stored(value: Any) -> Any:
    """Returns the value in checkpoint form."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):  # keeps the order, which a script may iterate in
        return {"items": [[key, _stored(item)] for key, item in value.items()]}
    if isinstance(value, list | deque):
        return [_stored(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_stored(item) for item in value)
    return torch.from_numpy(value) if _is_array(value) else value


def _restored(here: Any, saved: Any) -> Any:
    """Returns `saved`, copied into `here` if that is mutable. Raises ValueError if they do not match."""
    if isinstance(here, torch.Tensor):
        with torch.no_grad():
            return here.copy_(_like(here.shape, saved))
    if _is_array(here):
        here[...] = _like(here.shape, saved).numpy()
        return here
    if isinstance(saved, Mapping) and (here is None or isinstance(here, dict)):
        here = {} if here is None else here
        items = {key: _restored(here.get(key), item) for key, item in saved["items"]}
        here.clear()
        here.update(items)
        return here
    if isinstance(here, list | deque) and isinstance(saved, list):
        befores = chain(here, repeat(None))
        found = [_restored(before, item) for before, item in zip(befores, saved, strict=False)]
        here.clear()
        here.extend(found)
        return here
    if isinstance(here, tuple) and isinstance(saved, tuple) and len(here) == len(saved):
        return tuple(_restored(before, item) for before, item in zip(here, saved, strict=True))
    if here is not None and isinstance(saved, SCALARS) != isinstance(here, SCALARS) and saved is not None:
        raise ValueError(f"it is a {type(saved).__name__} there and a {type(here).__name__} here")
    return saved


def _like(shape: Any, saved: Any) -> torch.Tensor:
    if not isinstance(saved, torch.Tensor) or saved.shape != shape:
        was = f"shape {tuple(saved.shape)}" if isinstance(saved, torch.Tensor) else type(saved).__name__
        raise ValueError(f"it is a {was} there and a tensor of shape {tuple(shape)} here")
    return saved


def _lists(value: Any) -> Any:
    """Replaces arrays in the state of a NumPy generator by lists, which it accepts too."""
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    return value.tolist() if _is_array(value) else value


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
            if step % ema.every:
                continue
            if ema.updated == step - ema.every and self._before.get(name) == step - 2 * ema.every:
                del self._emas[name]  # logged once
                text = f"{name} is a step behind, so a resume is not exact: call update(run.global_step + 1)"
                log.event("advice", about="ema", text=f"{text} before run.step_completed()")
            self._before[name] = ema.updated
