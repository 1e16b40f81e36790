"""How sentences count. Used by `head`, `headcare`, `release` and `cli/`."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 checkpoint`, `2 checkpoints`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
