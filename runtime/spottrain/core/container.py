"""What this container may use and what it does use: cores and memory, not the host's. No torch.

Read by whoever shares it out or must not exceed it: `process.gang` (threads), `data` (loader workers),
`checkpoint.arena` (the copy of a save), `techniques.memory` (a step on a CPU), `diagnosis.loadermemory`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")
MEMINFO: Final = Path("/proc/meminfo")
UNLIMITED: Final = 1 << 60
"""cgroup v1 writes some 2^63 where there is no limit."""
V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2: Final = ("memory.max", "memory.current")
FILES: Final = ("inactive_file", "active_file")


# --- cores --------------------------------------------------------------------------------------------
def cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """CPU cores that this container may use: its quota, not the host's number.

    The least quota of the process's group and all above it; see `memory_limit`.
    """
    quotas = map(_quota, _groups(cgroups, membership, "cpu"))
    return min(float(_scheduled()), *quotas)


def _scheduled() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS does not say which ones


def _quota(group: Path) -> float:
    """Cores that the group may use at once (cgroup v2, else v1); infinite where there is no limit."""
    words = _text(group / "cpu.max").split()
    try:
        quota, period = words or (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except ValueError:  # absent, or the word max
        return math.inf


# --- memory -------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerMemory:
    """`limit`: bytes that may be used. `used`: those that are, and that the kernel cannot take back."""

    limit: int
    used: int
    whose: str = "the container's limit"

    @property
    def left(self) -> int:
        return self.limit - self.used


def memory_limit(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that the cgroup of this process may use, v1 or v2; None where there is no limit.

    cgroups: where they are mounted. membership: /proc/self/cgroup; in a container it mostly says "/", and
    the mount is the container's own. The least of the process's group and all above it counts.
    """
    return min((limit for limit, _ in _limited(cgroups, membership)), default=None)


def memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> ContainerMemory | None:
    """Of the process's group and those above it, the one with the least left; None where none has a limit.

    `used` is of all processes in the group, and without the clean files that the kernel drops first.
    """
    found = [
        ContainerMemory(limit=limit, used=used)
        for limit, folder in _limited(cgroups, membership)
        if (used := _used(folder)) is not None
    ]
    return min(found, key=lambda each: each.left, default=None)


def memory_here(
    cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP, meminfo: Path = MEMINFO
) -> ContainerMemory | None:
    """The container's, or the machine's where that has less left: both end in a kill. None: not known."""
    found = [each for each in (memory(cgroups, membership), _of_machine(meminfo)) if each is not None]
    return min(found, key=lambda each: each.left, default=None)


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _limited(cgroups: Path, membership: Path) -> Iterator[tuple[int, Path]]:
    for folder in _groups(cgroups, membership, "memory"):
        limit = _limit(folder)
        if limit is not None:
            yield limit, folder


def _groups(cgroups: Path, membership: Path, controller: str) -> set[Path]:
    """Those that the controller (of v1; v2 has one tree for all) may limit this process by."""
    folders = {cgroups, cgroups / controller}
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        inside = root / path.lstrip("/")
        folders |= {each for each in (inside, *inside.parents) if each.is_relative_to(root)}
    return folders


def _limit(folder: Path) -> int | None:
    for name, _ in (V2, V1):
        text = _text(folder / name)
        if text.isdecimal() and int(text) < UNLIMITED:  # else it is absent, or the word max
            return int(text)
    return None


def _used(folder: Path) -> int | None:
    for _, name in (V2, V1):
        text = _text(folder / name)
        if text.isdecimal():
            return int(text) - _reclaimable(_numbers(_text(folder / "memory.stat")))
    return None


def _reclaimable(stat: Mapping[str, int]) -> int:
    """Bytes of clean files. v1 counts those of the groups below under names of their own."""
    return sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in FILES)


def _of_machine(meminfo: Path) -> ContainerMemory | None:
    kib = _numbers(_text(meminfo).replace(":", "").replace(" kB", ""))
    if "MemTotal" not in kib or "MemAvailable" not in kib:
        return None
    whole, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    return ContainerMemory(limit=whole, used=whole - free, whose="the machine's memory")


def _numbers(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
