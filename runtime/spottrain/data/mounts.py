"""Reads the file system type and mount options of a path from /proc/self/mountinfo."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOUNTS: Final = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    kind: str
    options: frozenset[str]


def below(path: Path, table: Path = MOUNTS) -> list[Mount]:
    """Returns the mounts of the device that holds `path`. Empty without /proc, as on macOS."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()]
        device = path.stat().st_dev
    except OSError:
        return []
    number = f"{os.major(device)}:{os.minor(device)}"
    return [_mount(row) for row in rows if row[2] == number]


def _mount(row: list[str]) -> Mount:
    """Parses a row: ... mount options, optional fields, `-`, type, source, options of the file system."""
    dash = row.index("-", 6)
    return Mount(row[dash + 1], frozenset([*row[5].split(","), *row[dash + 3].split(",")]))
