"""About how much memory one loader worker comes to hold of its own for the set. Called by `room`.

Workers are forked on Linux (torch's DataLoader takes Python's default: fork, and forkserver from Python 3.14
on). A fork shares all memory until one side writes, and to read a Python object is to write its reference
count: page by page each worker gets a copy of every str, tuple, dict and list item that samples come from.
What has no reference counts inside stays shared: the buffers of numpy arrays and torch tensors, memory maps,
Arrow tables. A spawned worker is sent the whole set, pickled, at once; torch's tensors alone go as shared
memory. See the warning under "Multi-process data loading" in torch's documentation of torch.utils.data,
https://github.com/pytorch/pytorch/issues/13246 and its comment 905703662.

To look at every object would take longer than an epoch. So of each container some items are looked at and
taken for the rest; what several of them hold in common, such as keys or a vocabulary, is counted once, and so
is what several large containers hold. The result is an estimate. It is too large where what many records
refer to is in no large container, and too small where a set finds its samples in variables of a module, or
keeps in memory what it has read.
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
"""Items of one container that are looked at ..."""
LEAST: Final = 4
COMMON: Final = 512
"""The least of a container that several records refer to, such as a vocabulary: there are few."""
TOGETHER: Final = 16384
"""... as long as those of all containers beside it are no more than this."""
OBJECTS: Final = 40_000
"""After so many what is met is not entered, and after twice as many nothing is: half a second."""
PASSED_OVER: Final = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
    weakref.ref,
)
"""What leads to the whole interpreter, which is no part of the set."""
ROWS: Final = (list, tuple)
LOOSE: Final = (set, frozenset, deque)
"""What has no place by number that is quickly reached."""
GONE_THROUGH: Final = 8_000_000
"""Items of large containers that are asked in all whether they are one that was met elsewhere: 0.3 s."""
DEEP: Final = 30
"""Containers in containers from which on it is not kept who else refers to what is in them."""
OURS: Final = 2
"""References to an object while it is asked how many there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """Of one worker."""

    bytes: int
    """The most likely."""
    least: int
    """So much at least: where what several records refer to cannot be told from what others of the script do,
    this takes it for the former."""
    method: str
    """How the worker is started: fork, forkserver or spawn."""
    whole: bool = True
    """False: there were too many different objects to look at, or some that say themselves what a worker is
    sent, so it is at least this."""


def start_method(context: Any = None) -> str:
    """Of workers; context: of the DataLoader. To ask without `allow_none` would settle it for the script."""
    if context is not None:
        return context if isinstance(context, str) else str(context.get_start_method())
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def copy_of(*held: Any, method: str) -> Copy:
    """held: the set, its collate function. Reads no sample and calls nothing of the set."""
    walk = _Walk(forked=method == "fork")
    collects = gc.isenabled()
    gc.disable()  # else so many new objects have it go through the whole set, for a second or more
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
    """One of the items of `container` that are looked at, each of which stands for `times` of them."""

    container: _Node | None = None
    """None: the root, which is what the worker is given."""
    times: float = 1.0
    share: float = 1.0
    """Of what it stands for, the part that is its own if all other references to it are of the set, too."""

    @property
    def above(self) -> _Item | None:
        """That which the container is in: by the container, for it may turn out to be shared itself."""
        return None if self.container is None else self.container.of

    @property
    def weight(self) -> float:
        """Times that what is found below counts."""
        return self.times if self.above is None else self.times * self.above.weight

    @property
    def least(self) -> float:
        """The same where what may be shared is."""
        return self.times * self.share * (1.0 if self.above is None else self.above.least)

    @property
    def path(self) -> list[_Item]:
        """From the root to this one."""
        found, item = [self], self.above
        while item is not None:
            found.append(item)
            item = item.above
        return found[::-1]


_ELSEWHERE: Final = _Item(times=0.0)
"""Of what is counted with a large container that holds it as well."""


@dataclass(eq=False, slots=True)
class _Node:
    value: Any
    """Kept, because the number of an object is its own only while it lives."""
    size: int
    of: _Item
    inside: list[_Node] = field(default_factory=list)

    @property
    def references(self) -> int:
        return sys.getrefcount(self.value) - OURS


@dataclass(frozen=True, slots=True)
class _Large:
    """A container that is reached without a choice, and of whose items some are chosen."""

    node: _Node
    size: int
    most: int


class _Walk:
    """Through what can be reached from the set: first to all large containers, then level by level into
    those of their items that are chosen.

    Two large ones often hold the same objects (an index of the records by something), and so does what is in
    the records. What is chosen is therefore looked for in all large ones, and counts by its chance to be
    chosen in any of them; what is met further below and is in a large one is counted there.
    """

    def __init__(self, *, forked: bool) -> None:
        self.whole = True
        self._forked = forked
        self._size = touched if forked else size_if_sent
        self._nodes: dict[int, _Node] = {}
        self._random = random.Random(0)  # its own: the training's must not be touched
        self._root = _Node(None, 0, _Item())
        self._large: list[_Large] = []
        self._parts: list[float] = []
        """Of the items of each large one those that were chosen; empty before the choice."""
        self._level: list[tuple[_Node, int]] = []
        self._fresh: list[tuple[_Node, _Node]] = []
        """First met on this level, each with what it was met in."""
        self._left = GONE_THROUGH

    def bytes(self) -> tuple[float, float]:
        """The most likely, the least."""
        counted = [(node.size, node.of) for node in self._nodes.values()]
        return sum(size * of.weight for size, of in counted), sum(size * of.least for size, of in counted)

    def let_go(self) -> None:
        """Of the set, at once: what is in a circle waits for the collector, and would be a reference more."""
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
        """Some items of each large container: of the larger ones more."""
        whole, self._fresh = sum(each.size for each in self._large), []
        counts = [max(LEAST, min(each.most, TOGETHER * each.size // whole)) for each in self._large]
        for each, count in zip(self._large, counts, strict=True):
            taken = self._take(each.node, count, sum(counts))
            self._parts.append(count / each.size if taken else 0.0)
        self._settle()

    def _meet(self, value: Any, inside: _Node, of: _Item, beside: int) -> None:
        """beside: how many were met on this level for one of the set."""
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
        """Whether there was time left for it."""
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
        """The chance of each to be chosen in no large container; None where to look would take too long."""
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
    """What is met from two items of a container belongs to the container; so does what is in it."""
    waiting = [(node, of)]
    while waiting:
        node, of = waiting.pop()
        common = _common(node.of, of)
        if common is not node.of:
            node.of = common
            # Those that stand for others in it follow by themselves: see `_Item.above`.
            waiting += [(child, common) for child in node.inside if child.of.container is not node]


def _common(one: _Item, other: _Item) -> _Item:
    """Where something belongs that was met in both."""
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
    """At most `count` of what is in `value`, and how many there are."""
    size, items = _inside(value)
    if size <= count:
        return list(items), size
    places = sorted(
        chance.sample(range(size), count)
    )  # each is as likely: not always the same field of a record
    if hasattr(items, "__getitem__"):
        return [items[place] for place in places], size
    found: list[Any] = []
    items, at = iter(items), 0
    for place in places:
        found += islice(items, place - at, place - at + 1)
        at = place + 1
    return found, size


def _inside(value: Any) -> tuple[int, Any]:
    """How much is in `value`, and what. Methods of a subclass are not called."""
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
    if isinstance(value, types.FunctionType):  # not its module's variables
        return [*(value.__closure__ or ()), *(value.__defaults__ or ())]
    return gc.get_referents(value) if gc.is_tracked(value) else []


def _holds(value: Any) -> bool:
    """Whether there may be more in it. The collector lets go of tuples and dicts of plain values."""
    return isinstance(value, tuple | dict) or gc.is_tracked(value)
