"""Figures that only a GPU can give; see `__main__`."""

from __future__ import annotations

from typing import Final

WARM: Final = 8
"""Steps that are not timed: they compile, and fill caches."""
