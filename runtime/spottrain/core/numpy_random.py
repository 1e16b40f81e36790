"""A copy of NumPy's global random state for this process alone, in a few microseconds: each step needs one.

`numpy.random.get_state` and `set_state` take 74 and 58 us. Here the generator's words are copied where they
are (`BitGenerator.ctypes`). The other part of the state, a normal number that is kept for the next draw, is
found by drawing it. Where the generator is none that is known, NumPy's own functions do it, also for one that
the script has put in its place (`numpy.random.set_bit_generator`): which one it is belongs to the state.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

USUAL: Final = "MT19937"
"""Name of the Mersenne Twister, the generator that NumPy begins with."""
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
        return numpy.random.get_state(legacy=False)
    words = ctypes.string_at(address, WORDS)
    normal = numpy.random.standard_normal()
    if ctypes.string_at(address, WORDS) == words:  # the number was not drawn from the generator
        restore(found := Words(words, normal))
        return found
    ctypes.memmove(address, words, WORDS)
    numpy.random.standard_normal()  # the other one of the pair, which was kept
    return Words(words, None)


def plain(state: Any = None) -> Any:
    """Returns `state`, or the present one, in plain values, for `restore`; None if NumPy is not imported.

    That of the usual generator is the tuple of `numpy.random.get_state`, that of another one a dict.
    Only reads it, unlike `copied`: another thread of the script may draw numbers meanwhile.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(state, Words):
        usual = _usual(numpy, state)
        return usual[0], usual[1].tolist(), *usual[2:]
    state = lists(numpy.random.get_state(legacy=False) if state is None else state)
    if state["bit_generator"] != USUAL:
        return state
    words = state["state"]
    return USUAL, words["key"], int(words["pos"]), int(state["has_gauss"]), float(state["gauss"])


def lists(value: Any) -> Any:
    """Replaces arrays in the state of a generator by lists, which it accepts too."""
    if isinstance(value, Mapping):
        return {key: lists(item) for key, item in value.items()}
    return value.tolist() if type(value).__module__ == "numpy" and hasattr(value, "tolist") else value


def restore(state: Any) -> None:
    """Sets the state to a copy, and the generator to one of its kind.

    Raises ValueError if that is not one of NumPy's, and the script has not set it.
    """
    if state is None:
        return
    numpy = sys.modules["numpy"]
    if isinstance(state, Words):
        address = _address(numpy) if state.normal is None else None
        if address is not None:
            numpy.random.seed(0)  # which forgets a normal number
            ctypes.memmove(address, state.words, WORDS)
            return
        state = _usual(numpy, state)
    _use(numpy, state["bit_generator"] if isinstance(state, Mapping) else USUAL)
    numpy.random.set_state(state)


def _usual(numpy: Any, state: Words) -> tuple[str, Any, int, int, float]:
    """Returns the tuple of `numpy.random.get_state`."""
    keys, position = state.words[:-4], int.from_bytes(state.words[-4:], sys.byteorder)
    kept = (0, 0.0) if state.normal is None else (1, state.normal)
    return USUAL, numpy.frombuffer(keys, numpy.uint32), position, *kept


def _use(numpy: Any, kind: str) -> None:
    """Puts one of NumPy's generators in the place of the global one, if that is of another kind."""
    if not hasattr(numpy.random, "set_bit_generator"):  # before NumPy 1.24, where it is always the usual one
        return
    wanted: Any = getattr(numpy.random, kind, None)
    of_numpy = isinstance(wanted, type) and issubclass(wanted, numpy.random.BitGenerator)
    if of_numpy and type(numpy.random.get_bit_generator()) is not wanted:
        numpy.random.set_bit_generator(wanted())


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
