"""Cores and memory that this container may use, not the host's, and its volumes. Does not import torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")
MEMINFO: Final = Path("/proc/meminfo")
MOUNTS: Final = Path("/proc/self/mountinfo")
NO_VOLUMES: Final = ("dev", "proc", "sys")
"""Folders of each container that are mounts and hold no files of a user."""
UNLIMITED: Final = 1 << 60
"""cgroup v1 writes about 2^63 where there is no limit."""
V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2: Final = ("memory.max", "memory.current")
FILES: Final = ("inactive_file", "active_file")


# --- cores --------------------------------------------------------------------------------------------
def cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Returns the CPU cores that this container may use: its quota, not the host's number.

    The smallest quota of the process's cgroup and its parents applies; see `memory_limit`.
    """
    quotas = map(_quota, _groups(cgroups, membership, "cpu"))
    return min(float(_scheduled()), *quotas)


def _scheduled() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity call


def _quota(group: Path) -> float:
    """Cores that the group may use at once (cgroup v2, else v1); infinite if there is no limit."""
    words = _text(group / "cpu.max").split()
    try:
        quota, period = words or (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except ValueError:  # absent, or the word max
        return math.inf


# --- memory -------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerMemory:
    """`limit`: bytes that may be used. `used`: bytes in use that the kernel cannot reclaim."""

    limit: int
    used: int
    whose: str = "the container's limit"

    @property
    def left(self) -> int:
        return self.limit - self.used


def memory_limit(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Returns the bytes that the cgroup of this process may use, v1 or v2; None if there is no limit.

    The smallest limit of the group and its parents applies. cgroups: mount point of the cgroup file systems.
    membership: /proc/self/cgroup; in a container it mostly says "/", since the mount is the container's own.
    """
    return min((limit for limit, _ in _limited(cgroups, membership)), default=None)


def memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> ContainerMemory | None:
    """Returns the group with the least memory left, of the process's and its parents; None without any limit.

    `used` counts all processes of the group, but not clean page cache, which the kernel reclaims first.
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
    """The container's memory, or the machine's if that has less left: exceeding either kills the process."""
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
    """Groups by which the controller (of v1; v2 has one tree for all) may limit this process."""
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
        if text.isdecimal() and int(text) < UNLIMITED:  # else absent, or the word max
            return int(text)
    return None


def _used(folder: Path) -> int | None:
    for _, name in (V2, V1):
        text = _text(folder / name)
        if text.isdecimal():
            return int(text) - _reclaimable(_numbers(_text(folder / "memory.stat")))
    return None


def _reclaimable(stat: Mapping[str, int]) -> int:
    """Bytes of clean page cache. v1 counts those of child groups under separate names (`total_*`)."""
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


# --- volumes ------------------------------------------------------------------------------------------
def on_volume(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Whether a folder, which need not exist yet, is below the mount of a volume; True if that is unknown."""
    lines = _text(mounts).splitlines()
    points = [Path(re.sub(r"\\(\d{3})", _character, line.split()[4])) for line in lines]
    where = folder.resolve()
    above = [each for each in points if where.is_relative_to(each)]
    nearest = max(above, key=lambda each: len(each.parts), default=None)
    return nearest is None or (len(nearest.parts) > 1 and nearest.parts[1] not in NO_VOLUMES)


def _character(octal: re.Match[str]) -> str:
    """Returns the character of an escape in mountinfo, such as \\040 for a space."""
    return chr(int(octal[1], 8))
