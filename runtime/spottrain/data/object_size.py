"""Bytes of one object that a loader worker comes to hold, without what is in it. Called by `copies`.

Nothing of the set's own classes is called: pandas, for one, answers `sys.getsizeof` with all that a frame
leads to, which is found (and counted) on the way as well.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Final

PAGE: Final = 4096
"""What a fork copies at a time: of a longer object the page with its reference count."""
TENSOR: Final = 512
"""Of a torch tensor the Python object, and the two C++ ones behind it; its numbers may lie between them."""
APART: Final = (list, dict, set, bytearray, deque)
"""The places for their items lie apart from the object, and nobody writes there ..."""
SMALL: Final = 512
"""... but so many bytes or less share their pages with objects of the same size (Python's own allocator)."""
COLLECTED: Final = 1 << 14
"""Of a type's flags: the collector's own two words lie before each object."""
OWN_WORDS: Final = 16
ANSWERED: Final = frozenset({"builtins", "collections", "array", "numpy"})
"""Whose classes say what they take themselves, alone, and by code that is nobody's of the set."""
COMMON: Final = frozenset({str, int, float, bytes, list, tuple, dict})
SENT_WHOLE: Final = ANSWERED | {"functools", "torch", "pyarrow"}
"""Whose `__reduce__` sends what is in them; another's may send a path, as a table that maps a file does."""
SENT_BY: Final = ("__reduce_ex__", "__reduce__", "__getstate__")


def touched(value: Any) -> int:
    """Bytes of `value` that a fork copies once its reference count is written."""
    kind = type(value)
    if is_a(kind, "torch", "Tensor"):
        return min(TENSOR + int(value.nbytes), PAGE)
    own = _rounded(kind.__basicsize__ + OWN_WORDS)
    if is_a(kind, "numpy", "ndarray"):
        return own
    whole = _rounded(_shallow(value))
    if issubclass(kind, APART) and whole - own > SMALL:
        return own
    return min(whole, PAGE)


def held(value: Any) -> int:
    """Bytes of `value` in a process that was sent it."""
    kind = type(value)
    if is_a(kind, "torch", "Tensor"):
        return TENSOR  # torch moves the numbers to shared memory, once for all
    size = _rounded(_shallow(value))
    if is_a(kind, "numpy", "ndarray") or _package(kind) == "pyarrow":
        # A view, or a map, is sent whole.
        return max(size, int(getattr(value, "nbytes", 0)) + kind.__basicsize__)
    return size


def sent_otherwise(value: Any) -> bool:
    """Whether its class has a say in what a spawned worker is sent: nobody else knows how much that is."""
    kind = type(value)
    for name in SENT_BY:
        owner = next((base for base in kind.__mro__ if name in base.__dict__), object)
        if owner is not object and _package(owner) not in SENT_WHOLE:
            return True
    return False


def is_a(kind: type, module: str, name: str) -> bool:
    """Whether it is that class or below it; asked without an import."""
    loaded = sys.modules.get(module)
    return loaded is not None and issubclass(kind, getattr(loaded, name))


def _shallow(value: Any) -> int:
    """As `sys.getsizeof`, by the first class above it that is Python's or numpy's."""
    kind = type(value)
    if kind in COMMON:
        return sys.getsizeof(value)
    answers: Any = next(base for base in kind.__mro__ if _package(base) in ANSWERED)
    return int(answers.__sizeof__(value)) + (OWN_WORDS if kind.__flags__ & COLLECTED else 0)


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _rounded(size: int) -> int:
    """Memory is given out in pieces of 16 bytes."""
    return -(-size // 16) * 16
