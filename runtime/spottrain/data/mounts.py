"""What /proc says of the file system below a path. Used by `locks` and `durable`."""

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
    """The mounts of its device. None where there is no /proc: a laptop."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()]
        device = path.stat().st_dev
    except OSError:
        return []
    number = f"{os.major(device)}:{os.minor(device)}"
    return [_mount(row) for row in rows if row[2] == number]


def _mount(row: list[str]) -> Mount:
    """A row of mountinfo: ... options, optional fields, `-`, kind, source, options of the file system."""
    dash = row.index("-", 6)
    return Mount(row[dash + 1], frozenset([*row[5].split(","), *row[dash + 3].split(",")]))
