"""Plain values: numbers, strings, tensors, NumPy arrays, and containers of them. Random generators.

A value that can be changed (tensor, array, dict, list, deque, set), also one in a tuple, is restored in
place, so each variable that holds it stays valid.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from itertools import chain, repeat
from typing import Any, Final

import torch

from spottrain.checkpoint.tree import is_array, is_number_of_numpy
from spottrain.core import numpy_random

SCALARS: Final = (bool, int, float, str)
DICTS: Final = (dict, OrderedDict, Counter, defaultdict)
SETS: Final = (set, frozenset)


def is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in DICTS:
        return all(_is_key(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple | deque):
        return all(is_plain(item) for item in value)
    if kind in SETS:
        return all(_is_key(item) for item in value)
    return value is None or isinstance(value, torch.Tensor) or is_array(value) or _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    return (
        type(value) in SCALARS or is_number_of_numpy(value) or isinstance(value, torch.dtype | torch.device)
    )


def _is_key(value: Any) -> bool:
    return value is None or _is_scalar(value) or (type(value) is tuple and all(map(_is_key, value)))


def stored(value: Any) -> Any:
    """Returns a copy of the containers in checkpoint form; tensors and arrays are not copied."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.detach()
    if kind is dict:
        return {"items": [[key, stored(item)] for key, item in value.items()]}
    if kind in DICTS:
        copy = value.copy()
        for key, item in value.items():
            copy[key] = stored(item)
        return copy
    if kind is list:
        return [stored(item) for item in value]
    if kind is deque:
        return deque(map(stored, value), value.maxlen)
    if isinstance(value, tuple) and kind is not torch.Size:
        return tuple(stored(item) for item in value)
    return set(value) if kind is set else value


def restored(here: Any, saved: Any) -> Any:
    """Returns `saved`, copied into `here` if that is mutable. Raises ValueError if they do not match."""
    if isinstance(here, torch.Tensor):
        with torch.no_grad():
            return here.copy_(torch.as_tensor(_like(here.shape, saved)))
    if is_array(here):
        here[...] = _like(here.shape, saved)
        return here
    if isinstance(saved, Mapping) and (here is None or isinstance(here, dict)):
        marked = type(saved) is dict  # a dict in the form of `stored`
        items = {
            k: restored((here or {}).get(k), v) for k, v in (saved["items"] if marked else saved.items())
        }
        if here is None:
            here = {} if marked else saved.copy()  # type: ignore[attr-defined]
        here.clear()
        here.update(items)
        return here
    if here is None and isinstance(saved, list | deque):
        here = deque(maxlen=saved.maxlen) if isinstance(saved, deque) else []
    if isinstance(here, list | deque | set) and isinstance(saved, list | deque | set):
        befores = repeat(None) if isinstance(here, set) else chain(here, repeat(None))
        found = [restored(before, item) for before, item in zip(befores, saved, strict=False)]
        here.clear()
        here.update(found) if isinstance(here, set) else here.extend(found)
        return here
    if isinstance(here, tuple) and isinstance(saved, tuple) and len(here) == len(saved):
        found = [restored(before, item) for before, item in zip(here, saved, strict=True)]
        return type(here)(*found) if hasattr(here, "_fields") else type(saved)(found)
    if here is not None and saved is not None and _is_scalar(saved) != _is_scalar(here):
        raise ValueError(f"it is a {type(saved).__name__} there and a {type(here).__name__} here")
    return saved


def _like(shape: Any, saved: Any) -> Any:
    tensor = isinstance(saved, torch.Tensor) or is_array(saved)
    if not tensor or tuple(saved.shape) != tuple(shape):
        was = f"shape {tuple(saved.shape)}" if tensor else type(saved).__name__
        raise ValueError(f"it is a {was} there and a tensor of shape {tuple(shape)} here")
    return saved


# --- random generators --------------------------------------------------------------------------------------
def is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator | random.Random) or (
        type(value).__module__.startswith("numpy.random")
        and (hasattr(value, "bit_generator") or hasattr(value, "get_state"))
    )


def generator_state(it: Any) -> dict[str, Any]:
    if isinstance(it, torch.Generator):
        return {"torch": it.get_state()}
    if isinstance(it, random.Random):
        return {"python": it.getstate()}
    state = it.bit_generator.state if hasattr(it, "bit_generator") else it.get_state(legacy=False)
    return {"numpy": numpy_random.lists(state)}


def set_generator_state(it: Any, state: Mapping[str, Any]) -> None:
    """Raises KeyError or ValueError if the state is of another type of generator."""
    if isinstance(it, torch.Generator):
        it.set_state(state["torch"])
    elif isinstance(it, random.Random):
        it.setstate(state["python"])
    elif hasattr(it, "bit_generator"):
        it.bit_generator.state = state["numpy"]
    else:
        it.set_state(state["numpy"])
