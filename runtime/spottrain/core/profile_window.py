"""Where profiles are stored, and which this process has made. Does not import torch."""

from __future__ import annotations

from typing import Final

from spottrain.contract import PROFILES_PREFIX

MADE: Final[list[str]] = []
"""Keys of the folders in which this process has stored a profile."""


def profile_key(attempt: int, rank: int, name: str) -> str:
    """Key below the checkpoint URI; attempts and ranks are numbered as in logs."""
    return f"{PROFILES_PREFIX}attempt-{attempt:06d}/rank-{rank:05d}/{name}"
