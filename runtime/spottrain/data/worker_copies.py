"""Estimates how much memory one loader worker needs for its copy of the dataset.

Workers are forked on Linux (torch's DataLoader takes Python's default: fork, and forkserver from Python 3.14
on). A fork shares all memory until one side writes, and reading a Python object writes its reference count.
So, page by page, each worker gets a copy of every str, tuple, dict and list item that samples come from.
Memory without reference counts stays shared: buffers of numpy arrays and torch tensors, memory maps, Arrow
tables. A spawned worker receives the whole dataset pickled; only torch tensors go through shared memory.
See the warning under "Multi-process data loading" in torch's documentation of torch.utils.data,
https://github.com/pytorch/pytorch/issues/13246 and its comment 905703662.

Visiting every object would take longer than an epoch. So some items of each container are sampled and stand
for the rest. Objects that several items share, such as keys or a vocabulary, count once; so do objects in
several large containers. The result is an estimate. It is too large if many records refer to objects that
are in no large container. It is too small if the dataset finds its samples in module variables, or caches
what it has read.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import Any, Final

from spottrain.data.object_size import held as size_if_sent
from spottrain.data.object_size import is_a, sent_otherwise, touched

MOST: Final = 2048
"""Items of one container that are sampled at most ..."""
LEAST: Final = 4
"""... and at least."""
COMMON: Final = 512
"""Items sampled at least of a container that several records share, such as a vocabulary."""
TOGETHER: Final = 16384
"""Items sampled at most of all containers of a level together."""
OBJECTS: Final = 40_000
"""After this many objects, new ones are not entered; after twice as many, none is. Takes half a second."""
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
ROWS: Final = (list, tuple)
LOOSE: Final = (set, frozenset, deque)
"""Containers without fast access by index."""
GONE_THROUGH: Final = 8_000_000
"""Items of large containers that are compared, in total, with objects met elsewhere: 0.3 s."""
DEEP: Final = 30
"""Nesting depth from which on references from elsewhere are not tracked."""
OURS: Final = 2
"""References to an object that this module itself holds while it counts them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Estimated size of one worker's copy."""

    bytes: int
    """The most likely size."""
    least: int
    """Lower bound. References from elsewhere in the script look like references from other records; here
    they count as the latter, so that the object is shared."""
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
    walk = _Walk(forked=method == "fork")
    collects = gc.isenabled()
    gc.disable()  # else the many new objects trigger a collection over the whole dataset, a second or more
    try:
        walk.go(held)
        most, least = walk.bytes()
    finally:
        walk.let_go()
        if collects:
            gc.enable()
    return Copy(bytes=int(most), least=int(least), method=method, whole=walk.whole)


# --- inside -------------------------------------------------------------------------------------------
@dataclass(eq=False, slots=True)
class _Item:
    """A sampled item of `container`, which stands for `times` of its items."""

    container: _Node | None = None
    """None: the root, that is, what the worker gets."""
    times: float = 1.0
    share: float = 1.0
    """Part of its size that is its own, if all other references to it come from the dataset too."""

    @property
    def above(self) -> _Item | None:
        """The item that contains the container. Looked up each time: the container may become shared."""
        return None if self.container is None else self.container.of

    @property
    def weight(self) -> float:
        """How many times objects below this item count."""
        return self.times if self.above is None else self.times * self.above.weight

    @property
    def least(self) -> float:
        """Like `weight`, if everything that may be shared is shared."""
        return self.times * self.share * (1.0 if self.above is None else self.above.least)

    @property
    def path(self) -> list[_Item]:
        """The items from the root to this one."""
        found, item = [self], self.above
        while item is not None:
            found.append(item)
            item = item.above
        return found[::-1]


_ELSEWHERE: Final = _Item(times=0.0)
"""Marks objects that are counted in another, large container that also holds them."""


@dataclass(eq=False, slots=True)
class _Node:
    value: Any
    """Kept alive, because an `id` is unique only during the object's lifetime."""
    size: int
    of: _Item
    inside: list[_Node] = field(default_factory=list)

    @property
    def references(self) -> int:
        return sys.getrefcount(self.value) - OURS


@dataclass(frozen=True, slots=True)
class _Large:
    """A container that is reached without sampling, but whose own items are sampled."""

    node: _Node
    size: int
    most: int


class _Walk:
    """Walks through the objects that are reachable from the dataset, breadth first.

    First it finds all large containers, then it goes level by level into sampled items of them. Two large
    containers often hold the same objects, such as an index of the records. So a sampled object is searched
    for in all of them, and weighted by its chance to be sampled in any. An object that is met deeper, and is
    also in a large container, is counted there.
    """

    def __init__(self, *, forked: bool) -> None:
        self.whole = True
        self._forked = forked
        self._size = touched if forked else size_if_sent
        self._nodes: dict[int, _Node] = {}
        self._random = random.Random(0)  # not the global one, which the training uses
        self._root = _Node(None, 0, _Item())
        self._large: list[_Large] = []
        self._parts: list[float] = []
        """Share of the items that were sampled, for each large container; empty before `_choose`."""
        self._level: list[tuple[_Node, int]] = []
        self._fresh: list[tuple[_Node, _Node]] = []
        """Objects first met on this level, each with the node it was met in."""
        self._left = GONE_THROUGH

    def bytes(self) -> tuple[float, float]:
        """Returns the most likely size and the lower bound."""
        counted = [(node.size, node.of) for node in self._nodes.values()]
        return sum(size * of.weight for size, of in counted), sum(size * of.least for size, of in counted)

    def let_go(self) -> None:
        """Drops all references to the dataset now: cycles would keep them until the next collection."""
        for node in (self._root, *self._nodes.values()):
            node.inside.clear()

    def go(self, held: Iterable[Any]) -> None:
        for each in held:
            self._meet(each, self._root, self._root.of, 1)
        self._descend()
        self._choose()
        self._descend()

    def _descend(self) -> None:
        while self._level:
            level, self._level, self._fresh = self._level, [], []
            for node, beside in level:
                self._enter(node, beside)
            if self._parts:
                self._settle()

    def _choose(self) -> None:
        """Samples items of each large container, more of the larger ones."""
        whole, self._fresh = sum(each.size for each in self._large), []
        counts = [max(LEAST, min(each.most, TOGETHER * each.size // whole)) for each in self._large]
        for each, count in zip(self._large, counts, strict=True):
            taken = self._take(each.node, count, sum(counts))
            self._parts.append(count / each.size if taken else 0.0)
        self._settle()

    def _meet(self, value: Any, inside: _Node, of: _Item, beside: int) -> None:
        """Registers `value`. beside: number of objects on its level, an estimate."""
        if issubclass(type(value), PASSED_OVER):
            return
        known = self._nodes.get(id(value))
        if known is not None:
            _again(known, of)
            inside.inside.append(known)
            return
        node = self._nodes[id(value)] = _Node(value, self._size(value), of)
        inside.inside.append(node)
        self._fresh.append((node, inside))
        if not self._forked and sent_otherwise(value):
            self.whole = False
        elif len(self._nodes) <= OBJECTS:
            self._level.append((node, beside))
        elif _holds(value):
            self.whole = False

    def _enter(self, node: _Node, beside: int) -> None:
        if node.of is _ELSEWHERE:
            return
        count = max(LEAST, min(MOST, TOGETHER // beside))
        if self._parts and node.of is self._root.of:
            count = max(count, COMMON)
        size, _ = _inside(node.value)
        if size > count and not self._parts:
            self._large.append(_Large(node, size, count))
        else:
            self._take(node, count, beside * min(size, count))

    def _take(self, node: _Node, count: int, beside: int) -> bool:
        """Meets at most `count` items of `node`. Returns False if the limit of objects is reached."""
        if len(self._nodes) > 2 * OBJECTS:
            self.whole = self.whole and not _holds(node.value)
            return False
        found, size = _looked_at(node.value, count, self._random)
        for value in found:
            of = _Item(node, size / len(found)) if size > len(found) else node.of
            self._meet(value, node, of, beside)
        return True

    # --- what is held in several places ----------------------------------------------------------------
    def _settle(self) -> None:
        shared = [each for each in self._fresh if each[0].of is not self._root.of and each[0].references > 1]
        missed = self._missed([node for node, _ in shared])
        large = {id(each.node) for each in self._large}
        for node, inside in shared:
            chance = 0.0 if missed is None else 1 - missed[id(node.value)]
            if chance and id(inside) in large:
                node.of.times = 1 / chance
            elif chance:
                node.of = _ELSEWHERE
            elif node.of.container is inside:
                node.of.share = 1 / node.references
            elif len(node.of.path) <= DEEP:
                node.of = _Item(inside, share=1 / node.references)

    def _missed(self, nodes: list[_Node]) -> dict[int, float] | None:
        """Returns each object's chance to be sampled in no large container; None if that takes too long."""
        whole = sum(each.size for each in self._large)
        if not nodes or whole > self._left:
            return None
        self._left -= whole
        found = {id(node.value): 1.0 for node in nodes}
        for each, part in zip(self._large, self._parts, strict=True):
            for number in filter(found.__contains__, map(id, _inside(each.node.value)[1])):
                found[number] *= 1 - part
        return found


def _again(node: _Node, of: _Item) -> None:
    """Moves an object that two items of a container share to the container, with all that it contains."""
    waiting = [(node, of)]
    while waiting:
        node, of = waiting.pop()
        common = _common(node.of, of)
        if common is not node.of:
            node.of = common
            # Sampled items in it follow by themselves: see `_Item.above`.
            waiting += [(child, common) for child in node.inside if child.of.container is not node]


def _common(one: _Item, other: _Item) -> _Item:
    """Returns the item that an object met in both belongs to."""
    if one is other or one is _ELSEWHERE:
        return one
    first, second = one.path, other.path
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(first, second, strict=False)))
    if alike == min(len(first), len(second)):
        return first[alike - 1]  # one is above the other
    if first[alike].container is second[alike].container:
        return first[alike - 1]  # two items of the same container
    return min(one, other, key=lambda item: item.weight)  # containers beside each other


def _looked_at(value: Any, count: int, chance: random.Random) -> tuple[Sequence[Any], int]:
    """Samples at most `count` items of `value`. Returns them and the number of all items."""
    size, items = _inside(value)
    if size <= count:
        return list(items), size
    places = sorted(
        chance.sample(range(size), count)
    )  # uniform: a stride could always hit the same field of a record
    if hasattr(items, "__getitem__"):
        return [items[place] for place in places], size
    found: list[Any] = []
    items, at = iter(items), 0
    for place in places:
        found += islice(items, place - at, place - at + 1)
        at = place + 1
    return found, size


def _inside(value: Any) -> tuple[int, Any]:
    """Returns the number of items of `value`, and the items. Calls no methods of a subclass."""
    kind = type(value)
    if kind in ROWS:
        return len(value), value
    for base in (*ROWS, *LOOSE):
        if issubclass(kind, base):
            its: Any = base
            return its.__len__(value), its.__iter__(value)
    if issubclass(kind, dict):
        return 2 * dict.__len__(value), chain(dict.keys(value), dict.values(value))
    if is_a(kind, "numpy", "ndarray"):
        return (int(value.size), value.flat) if value.dtype == object else (0, ())
    found = _referents(value)
    return len(found), found


def _referents(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):  # not the variables of its module
        return [*(value.__closure__ or ()), *(value.__defaults__ or ())]
    return gc.get_referents(value) if gc.is_tracked(value) else []


def _holds(value: Any) -> bool:
    """Whether `value` may contain objects. The collector untracks tuples and dicts of plain values."""
    return isinstance(value, tuple | dict) or gc.is_tracked(value)
