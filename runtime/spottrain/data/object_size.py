"""Computes the bytes that one object takes in a loader worker, without the objects it contains.

No method of the dataset's own classes is called. For example, `sys.getsizeof` of a pandas frame includes all
that it contains, which would then count twice.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Final

PAGE: Final = 4096
"""Bytes that a fork copies at a time. Of a longer object only the page with the reference count is copied."""
TENSOR: Final = 512
"""Bytes of a torch tensor's Python object and the two C++ objects behind it, without its elements."""
APART: Final = (list, dict, set, bytearray, deque)
"""Types whose item slots are allocated apart from the object. Reading does not write there ..."""
SMALL: Final = 512
"""... but slots of at most this many bytes share pages with other objects (Python's own allocator)."""
COLLECTED: Final = 1 << 14
"""Type flag Py_TPFLAGS_HAVE_GC: the garbage collector puts two words before each object."""
OWN_WORDS: Final = 16
ANSWERED: Final = frozenset({"builtins", "collections", "array", "numpy"})
"""Packages whose `__sizeof__` returns the size of the object alone, and runs no code of the dataset."""
COMMON: Final = frozenset({str, int, float, bytes, list, tuple, dict})
SENT_WHOLE: Final = ANSWERED | {"functools", "torch", "pyarrow"}
"""Packages whose `__reduce__` sends the contents. Others may send a path, such as that of a mapped file."""
SENT_BY: Final = ("__reduce_ex__", "__reduce__", "__getstate__")


def touched(value: Any) -> int:
    """Returns the bytes of `value` that a fork copies once its reference count is written."""
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
    """Returns the bytes of `value` in a process that received it pickled."""
    kind = type(value)
    if is_a(kind, "torch", "Tensor"):
        return TENSOR  # torch moves the elements to shared memory, once for all workers
    size = _rounded(_shallow(value))
    if is_a(kind, "numpy", "ndarray") or _package(kind) == "pyarrow":
        # A view or a memory map is sent with its elements.
        return max(size, int(getattr(value, "nbytes", 0)) + kind.__basicsize__)
    return size


def sent_otherwise(value: Any) -> bool:
    """Whether its class customises pickling, so that the size sent to a spawned worker is unknown."""
    kind = type(value)
    for name in SENT_BY:
        owner = next((base for base in kind.__mro__ if name in base.__dict__), object)
        if owner is not object and _package(owner) not in SENT_WHOLE:
            return True
    return False


def is_a(kind: type, module: str, name: str) -> bool:
    """Whether `kind` is that class or a subclass. Does not import the module."""
    loaded = sys.modules.get(module)
    return loaded is not None and issubclass(kind, getattr(loaded, name))


def _shallow(value: Any) -> int:
    """Like `sys.getsizeof`, but by the first base class of a package in `ANSWERED`."""
    kind = type(value)
    if kind in COMMON:
        return sys.getsizeof(value)
    answers: Any = next(base for base in kind.__mro__ if _package(base) in ANSWERED)
    return int(answers.__sizeof__(value)) + (OWN_WORDS if kind.__flags__ & COLLECTED else 0)


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _rounded(size: int) -> int:
    """Rounds up to 16 bytes, the granularity of the allocator."""
    return -(-size // 16) * 16
