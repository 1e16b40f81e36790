"""Estimates how much memory one loader worker needs for its copy of the dataset.

Workers are forked on Linux (torch's DataLoader takes Python's default: fork, and forkserver from Python 3.14
on). A fork shares all memory until one side writes, and reading a Python object writes its reference count.
So, page by page, each worker gets a copy of every str, tuple, dict and list item that samples come from.
Memory without reference counts stays shared: buffers of numpy arrays and torch tensors, memory maps, Arrow
tables. A spawned worker receives the whole dataset pickled; only torch tensors go through shared memory.
See the warning under "Multi-process data loading" in torch's documentation of torch.utils.data,
https://github.com/pytorch/pytorch/issues/13246 and its comment 905703662.

Visiting every object would take longer than an epoch. So a random sample of each container's items stands for
the rest. An item that has several references counts in part at each, so records that are in several indices
count once, and so does a vocabulary that all records refer to. What the script also holds elsewhere therefore
counts in part only: the estimate is then too small, as it is for module variables and caches.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from spottrain.data.object_size import held as size_if_sent
from spottrain.data.object_size import is_a, sent_otherwise, touched

MOST: Final = 2048
"""Items of one container that are sampled at most."""
TOGETHER: Final = 16384
"""Items of all containers of one level that are sampled at most, but at least one of each."""
OBJECTS: Final = 100_000
"""After this many objects the walk ends. Takes half a second."""
PASSED_OVER: Final = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
    weakref.ref,
)
"""Types that are skipped, because they lead to the whole interpreter."""
CONTAINERS: Final = (list, tuple, set, frozenset, deque)
OURS: Final = 4
"""References to an item that this module itself holds while it counts them."""


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
    collects = gc.isenabled()
    gc.disable()  # else the many new objects trigger a collection over the whole dataset, a second or more
    try:
        size, whole = _walk(held, forked=method == "fork")
    finally:
        if collects:
            gc.enable()
    return Copy(bytes=int(size), method=method, whole=whole)


def _walk(held: Sequence[Any], *, forked: bool) -> tuple[float, bool]:
    """Returns the bytes of all that is reachable, breadth first, and whether all of it was visited."""
    chance = random.Random(0)  # not the global one, which the training uses
    references: dict[int, int] = {}
    """References to each object when it was first met, by `id`."""
    alive: list[Any] = []
    """Keeps the objects that were met, because an `id` is unique only during the object's lifetime."""
    total, whole, room = 0.0, True, OBJECTS
    level = [(value, 1.0) for value in held]
    while level:
        whole = whole and len(level) <= room
        level = level[:room]
        room -= len(level)
        containers = []
        for value, weight in level:
            total += weight * (touched(value) if forked else size_if_sent(value))
            if not forked and sent_otherwise(value):
                whole = False
            elif (inside := _inside(value))[0]:
                containers.append((weight, *inside))
        level = []
        for value, times in _sampled(containers, chance):
            new = id(value) not in references
            if new:
                references[id(value)] = max(1, sys.getrefcount(value) - OURS)
                alive.append(value)
            times = max(1.0, times / references[id(value)])
            if new or times > 1:
                level.append((value, times))
    return total, whole


def _sampled(
    containers: Sequence[tuple[float, int, Any]], chance: random.Random
) -> Iterator[tuple[Any, float]]:
    """Yields random items of each container, and how many items each one stands for."""
    most = MOST
    if sum(min(size, MOST) for _, size, _ in containers) > TOGETHER:
        most = max(1, min(MOST, TOGETHER // len(containers)))
    for weight, size, items in containers:
        found = list(items) if size <= most else _sample(items, size, most, chance)
        for value in found:
            if not issubclass(type(value), PASSED_OVER):
                yield value, weight * size / len(found)


def _sample(items: Any, size: int, count: int, chance: random.Random) -> list[Any]:
    """Returns `count` random items; equally spaced ones could all be the same field of a record."""
    places = chance.sample(range(size), count)
    if hasattr(items, "__getitem__"):
        return [items[place] for place in places]
    wanted = set(places)
    return [item for place, item in enumerate(items) if place in wanted]


def _inside(value: Any) -> tuple[int, Any]:
    """Returns the number of items of `value`, and the items. Calls no methods of a subclass."""
    kind = type(value)
    if kind in (list, tuple):
        return len(value), value
    for base in CONTAINERS:
        if issubclass(kind, base):
            its: Any = base
            return its.__len__(value), its.__iter__(value)
    if issubclass(kind, dict):
        return 2 * dict.__len__(value), chain(dict.keys(value), dict.values(value))
    if is_a(kind, "numpy", "ndarray"):
        return (int(value.size), value.flat) if value.dtype == object else (0, ())
    if issubclass(kind, types.FunctionType):  # not the variables of its module
        found = [*(value.__closure__ or ()), *(value.__defaults__ or ())]
    else:
        found = gc.get_referents(value) if gc.is_tracked(value) else []
    return len(found), iter(found)  # which lets go of the list at its end
