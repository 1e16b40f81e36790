"""How many loader processes a rank has where their number is `auto`."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from spottrain.core import container, log

MAX_WORKERS: Final = 8
"""Loader processes of a rank that `auto` starts at most: each soon holds its own copy of Python objects."""


def cores(cgroups: Path = container.CGROUPS, local_ranks: int = 1) -> float:
    """Returns the CPU cores for this rank: the container's cores, divided by its `local_ranks`."""
    return container.cores(cgroups) / max(local_ranks, 1)


def workers(wanted: int | Literal["auto"], *, local_ranks: int) -> int:
    """Returns the number of loader processes; "auto": this rank's cores less one, from 1 to `MAX_WORKERS`.

    One core is kept for the training process, which launches kernels and must not wait.
    """
    if isinstance(wanted, int):
        return wanted
    available = cores(local_ranks=local_ranks)
    found = max(1, min(int(available) - 1, MAX_WORKERS))
    log.event("loader-workers", workers=found, cores=available)
    return found
