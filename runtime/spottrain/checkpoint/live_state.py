"""State that training changes and no state_dict() holds, saved for each rank.

Which parameters are trained (requires_grad), which modules are in evaluation mode, plain attributes of
modules and optimizers, random generators in modules, buffers that are not persistent or have another shape.
Only what has changed since the script made it is saved: on all else the script decides, also one that was
edited between two attempts.
"""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from spottrain.checkpoint.layout import SAFETENSORS
from spottrain.checkpoint.plain_state import clean, plain
from spottrain.checkpoint.plain_values import (
    DICTS,
    SCALARS,
    SETS,
    generator_state,
    is_generator,
    is_plain,
    restored,
    set_generator_state,
    stored,
)
from spottrain.checkpoint.tensor_memory import byte_view
from spottrain.checkpoint.tree import is_array
from spottrain.core import device as devices
from spottrain.core import log

MISSING: Final = object()
LARGE: Final = object()
"""In place of what is not looked at."""
OF_MODULES: Final = frozenset(vars(torch.nn.Module())) - {"training"} | {
    "_compiled_call_impl",
    "_flat_weights",
}
"""Attributes in which torch keeps what belongs to a module."""
OF_OPTIMIZERS: Final = frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {
    "_opt_called",  # a scheduler sets it, and `step`
    "add_param_group",
    "step",
}
Place = tuple[str, str]
"""Name of a module or optimizer, and of its attribute or buffer."""


class LiveState:
    """Saves and restores it for the modules and optimizers of one loop, which are given by name.

    Of `dataset`, and of what it wraps, only attributes that are numbers and strings: it may be large.
    Create it before the checkpoint is restored. Call `note` at the end of each step.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        dataset: Any = None,
    ) -> None:
        roots = {name: plain(module) for name, module in modules.items()}
        self._modules = {
            clean(f"{name}.{path}.").rstrip("."): module
            for name, root in roots.items()
            for path, module in root.named_modules()
        }
        self._parameters = {
            clean(f"{name}.{path}"): each
            for name, root in roots.items()
            for path, each in root.named_parameters()
        }
        self._owners = {path: (vars(module), OF_MODULES) for path, module in self._modules.items()}
        self._owners |= {
            f"optimizer {name}": (vars(each), OF_OPTIMIZERS) for name, each in optimizers.items()
        }
        self._datasets = _chain(dataset)
        self._owners |= {name: (vars(each), frozenset()) for name, each in self._datasets.items()}
        self._trained = self._trained_now()
        self._buffers = {place: _form(each) for place, each in self._buffers_now().items()}
        attributes = dict(self._each_attribute())
        self._attributes = {place: _comparable(each) for place, each in attributes.items() if _is_kept(each)}
        self._odd = {place for place, each in attributes.items() if _is_odd(each)}
        """Attributes that cannot be saved."""
        self._told: set[str] = set()
        self._changing: set[Place] = set()
        """Attributes that have changed and are more than a number or a string."""
        self._slots: list[tuple[Place, dict[str, Any]]] = []
        """Where to look at the end of each step; `_stale`: there may be more of them."""
        self._stale = True
        self.note()

    def note(self) -> None:
        """Notes what an unfinished step or an evaluation may change, and what a save then has to hold."""
        if self._stale:
            self._stale = False
            self._slots = [
                ((owner, name), attributes)
                for owner, (attributes, of_torch) in self._owners.items()
                for name, each in attributes.items()
                if name not in of_torch and (type(each) in SCALARS or (owner, name) in self._changing)
            ]
        found = (attributes.get(name, MISSING) for (_, name), attributes in self._slots)
        self._noted = [
            each if type(each) in SCALARS else _saved(each) if _is_kept(each) else MISSING for each in found
        ]
        self._noted_trained = self._trained_now()

    def _trained_now(self) -> list[bool]:
        return [each.requires_grad for each in self._parameters.values()]

    def _buffers_now(self) -> dict[Place, dict[str, Any]]:
        """Returns what is saved of each buffer here; of a persistent one, which is the model's, its shape."""
        return {
            (path, name): _saved_buffer(module, name)
            for path, module in self._modules.items()
            for name in module._buffers
        }

    def _each_attribute(self) -> Iterator[tuple[Place, Any]]:
        for owner, (attributes, of_torch) in self._owners.items():
            for name, each in list(attributes.items()):  # a copy: this may run beside the training
                if name not in of_torch:
                    large = owner in self._datasets and each is not None and type(each) not in SCALARS
                    yield (owner, name), LARGE if large else each

    # --- save and restore -------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        flags = zip(self._parameters, self._trained, self._noted_trained, strict=True)
        found: dict[str, dict[Any, Any]] = {
            "trained": {name: now for name, before, now in flags if before != now},
            "buffers": self._changed_buffers(),
            "attributes": self._changed_attributes(),
        }
        return {name: each for name, each in found.items() if each}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores it, before the state of modules and optimizers. What is not there any more is left out."""
        for name, trained in saved.get("trained", {}).items():
            if name in self._parameters:
                self._parameters[name].requires_grad_(trained)
        for (path, name), found in saved.get("buffers", {}).items():
            if path in self._modules:
                _set_buffer(self._modules[path], name, found)
        for (owner, name), found in saved.get("attributes", {}).items():
            if owner in self._owners:
                _set_attribute(self._owners[owner][0], name, found)
        self._changing |= set(saved.get("attributes", {}))
        self._stale = True
        self.note()

    def _changed_buffers(self) -> dict[Place, Any]:
        now, before = self._buffers_now(), self._buffers
        changed = {place: each for place, each in now.items() if _form(each) != before.get(place, MISSING)}
        return changed | {place: {"gone": True} for place in before if place not in now}

    def _changed_attributes(self) -> dict[Place, Any]:
        noted = dict(zip((place for place, _ in self._slots), self._noted, strict=True))
        changed: dict[Place, Any] = {}
        odd: set[Place] = set()
        for place, now in self._each_attribute():
            before = noted.get(place, MISSING)
            value = before if type(before) in SCALARS else now
            if _is_odd(value):
                odd.add(place)
            elif _is_kept(value) and _comparable(value) != self._attributes.get(place, MISSING):
                changed[place] = before if type(before) is dict else _saved(value)
                if type(value) not in SCALARS:
                    self._changing.add(place)
        self._stale = True
        for owner, name in sorted(odd - self._odd):  # without that object the others may mean something else
            for place in [each for each in changed if each[0] == owner and each[1] != "training"]:
                del changed[place]
                self._tell_left_out(owner, name)
        return changed

    def _tell_left_out(self, owner: str, name: str) -> None:
        if owner in self._told:
            return
        self._told.add(owner)
        text = (
            f"{owner} has got a {type(self._owners[owner][0][name]).__name__} as its attribute {name} in the "
            "training, which no checkpoint can hold, so none of its plain attributes are saved; keep what "
            "training changes in a buffer"
        )
        log.event("advice", about="model", text=text)


def _chain(dataset: Any) -> dict[str, Any]:
    """Returns the dataset and what it wraps, as torch's Subset does, by name."""
    found: dict[str, Any] = {}
    name = "dataset"
    while hasattr(dataset, "__dict__") and all(dataset is not each for each in found.values()):
        found[name] = dataset
        name, dataset = f"{name}.dataset", vars(dataset).get("dataset")
    return found


# --- buffers ------------------------------------------------------------------------------------------------
def _saved_buffer(module: torch.nn.Module, name: str) -> dict[str, Any]:
    buffer = module._buffers[name]
    if buffer is None or not _is_storable(buffer):
        return {"value": None}
    if name in module._non_persistent_buffers_set:
        return _saved(buffer)
    return {"dtype": buffer.dtype, "shape": buffer.shape, "device": buffer.device.type}


def _form(saved: Mapping[str, Any]) -> Any:
    """Returns what is equal for equal buffers, on whatever device they are."""
    return _comparable({key: each for key, each in saved.items() if key != "device"})


def _set_buffer(module: torch.nn.Module, name: str, saved: Mapping[str, Any]) -> None:
    if "gone" in saved:
        module._buffers.pop(name, None)
        return
    if "shape" in saved:
        value = torch.empty(saved["shape"], dtype=saved["dtype"], device=saved["device"])
    else:
        value = _restored(module._buffers.get(name), saved)
        module._non_persistent_buffers_set.add(name)
    vars(module).pop(name, None)
    module._buffers[name] = value


# --- attributes ---------------------------------------------------------------------------------------------
def _is_kept(value: Any) -> bool:
    """Whether it is saved: a plain value without tensors that belong to a model or to a graph."""
    if is_generator(value) or isinstance(value, enum.Enum):
        return True
    return is_plain(value) and all(map(_is_storable, _tensors(value)))


def _is_odd(value: Any) -> bool:
    return not (value is MISSING or is_generator(value) or is_plain(value) or isinstance(value, enum.Enum))


def _is_storable(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.is_leaf
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and tensor.dtype in SAFETENSORS
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in DICTS:
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple | deque):
        for item in value:
            yield from _tensors(item)


def _comparable(value: Any) -> Any:
    """Returns a form that is equal for equal values of one type, and holds no tensor."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return (value.dtype, value.shape, hashlib.sha256(byte_view(flat)).digest())
    if is_generator(value):
        return _comparable(generator_state(value))
    if is_array(value):
        return (value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).digest())
    if kind in DICTS:
        return (kind, tuple((key, _comparable(item)) for key, item in value.items()))
    if isinstance(value, list | tuple | deque):
        return (kind, tuple(map(_comparable, value)))
    return (kind, frozenset(value) if kind in SETS else value)


def _saved(value: Any) -> dict[str, Any]:
    if is_generator(value):
        return {"generator": generator_state(value)}
    if isinstance(value, enum.Enum):
        return {"member": value.name}
    device = next((each.device.type for each in _tensors(value)), "cpu")
    return {"value": stored(value)} | ({} if device == "cpu" else {"device": device})


def _set_attribute(attributes: dict[str, Any], name: str, saved: Mapping[str, Any]) -> None:
    here = attributes.get(name)
    if "value" in saved:
        attributes[name] = _restored(here, saved)
    elif "member" in saved and isinstance(here, enum.Enum):
        attributes[name] = type(here)[saved["member"]]
    elif "generator" in saved and is_generator(here):
        set_generator_state(here, saved["generator"])


def _restored(here: Any, saved: Mapping[str, Any]) -> Any:
    """Returns the saved value: in `here` where it fits in, else a new one on the device that it was on."""
    value = saved["value"]
    if isinstance(here, torch.Tensor) and getattr(value, "dtype", None) != here.dtype:
        here = None
    try:
        return restored(here, value)
    except (ValueError, TypeError, RuntimeError):  # it has another type, or another shape
        return devices.to_device(restored(None, value), torch.device(saved.get("device", "cpu")))
