"""A copy of NumPy's global random state for this process alone, in a few microseconds: each step needs one.

`numpy.random.get_state` and `set_state` take 74 and 58 us. Here the generator's words are copied where they
are (`BitGenerator.ctypes`). The other part of the state, a normal number that is kept for the next draw, is
found by drawing it. Where the generator is none that is known, NumPy's own functions do it.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final, NamedTuple

KEYS: Final = 624
WORDS: Final = 4 * (KEYS + 1)
"""Bytes of the Mersenne Twister: its keys, and the position in them."""

_known: Any = None
"""The generator whose words were compared with what NumPy says."""


class Words(NamedTuple):
    """The words of a generator, and the normal number that it keeps; None: it keeps none."""

    words: bytes
    normal: float | None


def copied() -> Any:
    """Returns a copy of the state, for `restore`; None if NumPy is not imported."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    address = _address(numpy)
    if address is None:
        return numpy.random.get_state()
    words = ctypes.string_at(address, WORDS)
    normal = numpy.random.standard_normal()
    kept = ctypes.string_at(address, WORDS) == words  # the number was not drawn from the generator
    found = Words(words, normal if kept else None)
    restore(found)
    return found


def plain() -> tuple[str, list[int], int, int, float] | None:
    """Returns the state as `numpy.random.get_state` does, in plain values; None if NumPy is not imported.

    Only reads it, unlike `copied`: another thread of the script may draw numbers meanwhile.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, words, position, has_gauss, gauss = numpy.random.get_state()
    return kind, words.tolist(), int(position), int(has_gauss), float(gauss)


def restore(state: Any) -> None:
    """Sets the state to a copy."""
    if state is None:
        return
    numpy = sys.modules["numpy"]
    address = _address(numpy) if isinstance(state, Words) and state.normal is None else None
    if address is not None:
        numpy.random.seed(0)  # which forgets a normal number
        ctypes.memmove(address, state.words, WORDS)
    elif isinstance(state, Words):
        keys, position = state.words[:-4], int.from_bytes(state.words[-4:], sys.byteorder)
        kept = (0, 0.0) if state.normal is None else (1, state.normal)
        numpy.random.set_state(("MT19937", numpy.frombuffer(keys, numpy.uint32), position, *kept))
    else:
        numpy.random.set_state(state)


def _address(numpy: Any) -> int | None:
    """Returns where the words of the global generator are; None if they are not as they are known."""
    global _known
    if not hasattr(numpy.random, "get_bit_generator"):  # before NumPy 1.24
        return None
    generator = numpy.random.get_bit_generator()
    if type(generator) is not numpy.random.MT19937:
        return None
    address: int = generator.ctypes.state_address
    if generator is not _known:
        words, said = ctypes.string_at(address, WORDS), generator.state["state"]
        if words != said["key"].tobytes() + int(said["pos"]).to_bytes(4, sys.byteorder):
            return None
        _known = generator
    return address
