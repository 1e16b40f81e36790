"""Wording of messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Returns `1 checkpoint`, `2 checkpoints` and so on."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
