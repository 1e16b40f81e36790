"""Estimates how much memory one loader worker needs for its copy of the dataset.

Workers are forked on Linux (torch's DataLoader takes Python's default: fork, and forkserver from Python 3.14
on). A fork shares all memory until one side writes, and reading a Python object writes its reference count.
So, page by page, each worker gets a copy of every str, tuple, dict and list item that samples come from.
Memory without reference counts stays shared: buffers of numpy arrays and torch tensors, memory maps, Arrow
tables. A spawned worker receives the whole dataset pickled; only torch tensors go through shared memory.
See the warning under "Multi-process data loading" in torch's documentation of torch.utils.data,
https://github.com/pytorch/pytorch/issues/13246 and its comment 905703662.

Visiting every object would take longer than an epoch. So random items of each container stand for the rest.
An item that has several references counts in part at each, so records that are in several indices count once,
and so does a vocabulary that all records refer to. What the script also holds elsewhere therefore counts in
part only: the estimate is then too small, as it is for module variables and caches.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

LEVEL: Final = 8192
"""Items that are sampled of all containers of one level together, but at least one of each."""
OBJECTS: Final = 100_000
"""After this many objects the walk ends. Takes half a second."""
PASSED_OVER: Final = (type, types.ModuleType, types.FrameType, types.GeneratorType)
"""Types that are skipped, because they lead to the whole interpreter."""
OURS: Final = 4
"""References to an item that this module itself holds while it counts them."""
PAGE: Final = 4096
"""Bytes that a fork copies at a time. Of a longer object only the page with the reference count is copied."""
TENSOR: Final = 512
"""Bytes of a torch tensor's Python object and the two C++ objects behind it, without its elements."""
COLLECTED: Final = 1 << 14
"""Type flag Py_TPFLAGS_HAVE_GC: instances may hold other objects, behind two words of the collector."""
OWN_WORDS: Final = 16
PLAIN: Final = frozenset({"builtins", "collections", "array", "numpy"})
"""Packages whose `__sizeof__` returns the size of the object alone, and runs no code of the dataset."""
SENT_WHOLE: Final = PLAIN | {"functools", "torch", "pyarrow"}
"""Packages whose `__reduce__` sends the contents. Others may send a path, such as that of a mapped file."""
SENT_BY: Final = frozenset({"__reduce_ex__", "__reduce__", "__getstate__"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Estimated size of one worker's copy."""

    bytes: int
    method: str
    """How the worker is started: fork, forkserver or spawn."""
    whole: bool = True
    """False: there were too many objects to visit, or classes that customise pickling. Then `bytes` is a
    lower bound."""


def start_method(context: Any = None) -> str:
    """Returns how workers are started. Asking without `allow_none` would fix the method for the script.

    context: the DataLoader's `multiprocessing_context`.
    """
    if context is not None:
        return context if isinstance(context, str) else str(context.get_start_method())
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def copy_of(*held: Any, method: str) -> Copy:
    """Estimates the copy of `held`, the dataset and its collate function. Runs no code of the dataset."""
    forked = method == "fork"
    chance = random.Random(0)  # not the global one, which the training uses
    met: dict[int, tuple[Any, int]] = {}
    """By `id`, which is unique only as long as the object is held here: the object, and its references."""
    total, whole = 0.0, True
    level = [(value, 1.0) for value in held]
    while level:
        containers = []
        for value, weight in level:
            total += weight * (_touched(value) if forked else _sent(value))
            if not forked and _customises_pickling(type(value)):
                whole = False
            elif type(value).__flags__ & COLLECTED or _is_a(value, "numpy", "ndarray"):
                containers.append((value, weight))
        if len(met) > OBJECTS:
            whole = whole and not containers
            break
        level = []
        for container, weight in containers:
            size, found = _sampled(container, max(1, LEVEL // len(containers)), chance)
            for value in found:
                if issubclass(type(value), PASSED_OVER):
                    continue
                known = id(value) in met
                _, references = met.setdefault(id(value), (value, max(1, sys.getrefcount(value) - OURS)))
                stands_for = max(1.0, weight * size / len(found) / references)
                if not known or stands_for > 1:
                    level.append((value, stands_for))
    return Copy(bytes=int(total), method=method, whole=whole)


def _sampled(container: Any, most: int, chance: random.Random) -> tuple[int, list[Any]]:
    """Returns the number of items, and at most `most` random ones: every n-th could be the same field."""
    items = _items(container)
    if len(items) <= most:
        return len(items), list(items)
    return len(items), [items[place] for place in chance.sample(range(len(items)), most)]


def _items(container: Any) -> Sequence[Any]:
    """Returns the objects that `container` refers to. Calls no method of its class, unless it is Python's."""
    kind = type(container)
    if kind in (list, tuple):
        return container  # type: ignore[no-any-return]
    if issubclass(kind, dict):  # gc leaves out keys that are strings
        return [*dict.keys(container), *dict.values(container)]
    if _is_a(container, "numpy", "ndarray"):
        return container.flat if container.dtype == object else ()
    if issubclass(kind, types.FunctionType):  # not the variables of its module
        return [*(container.__closure__ or ()), *(container.__defaults__ or ())]
    return gc.get_referents(container)


# --- one object, without those that it refers to ------------------------------------------------------
def _touched(value: Any) -> int:
    """Returns the bytes that a fork copies once the reference count is written."""
    if _is_a(value, "torch", "Tensor"):
        return min(TENSOR + int(value.nbytes), PAGE)
    if _is_a(value, "numpy", "ndarray"):
        return int(type(value).__basicsize__) + OWN_WORDS
    return min(_shallow(value), PAGE)


def _sent(value: Any) -> int:
    """Returns the bytes in a process that received the object pickled."""
    if _is_a(value, "torch", "Tensor"):
        return TENSOR  # torch moves the elements to shared memory, once for all workers
    size = _shallow(value)
    if _is_a(value, "numpy", "ndarray") or _package(type(value)) == "pyarrow":
        return max(size, int(getattr(value, "nbytes", 0)))  # a view or a memory map is sent with its elements
    return size


def _shallow(value: Any) -> int:
    """Like `sys.getsizeof`, but by the first base class in PLAIN: that of a pandas frame adds its columns."""
    kind = type(value)
    base: Any = next(base for base in kind.__mro__ if _package(base) in PLAIN)
    size = int(base.__sizeof__(value)) + (OWN_WORDS if kind.__flags__ & COLLECTED else 0)
    return -(-size // 16) * 16  # what the allocator takes


def _customises_pickling(kind: type) -> bool:
    """Whether the size that is sent to a spawned worker is unknown."""
    return any(SENT_BY & base.__dict__.keys() and _package(base) not in SENT_WHOLE for base in kind.__mro__)


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _is_a(value: Any, module: str, name: str) -> bool:
    """Whether the type is that class or a subclass. Does not import the module."""
    loaded = sys.modules.get(module)
    return loaded is not None and issubclass(type(value), getattr(loaded, name))
