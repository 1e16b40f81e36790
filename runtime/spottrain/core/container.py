"""Cores and memory that this container may use, not the host's, and its volumes. Does not import torch."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")
MOUNTS: Final = Path("/proc/self/mountinfo")
NO_VOLUMES: Final = ("dev", "proc", "sys")
"""Folders of each container that are mounts and hold no files of a user."""
UNLIMITED: Final = 1 << 60
"""cgroup v1 writes about 2^63 where there is no limit."""
LIMITS: Final = ("memory.max", "memory.limit_in_bytes")
USES: Final = ("memory.current", "memory.usage_in_bytes")
"""Files of cgroup v2 and v1."""


def cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Returns the CPU cores that this container may use: its quota, not the host's number.

    The smallest quota of the process's cgroup and its parents applies; see `memory_limit`.
    """
    # macOS has no affinity call.
    scheduled = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(scheduled), *map(_quota, _groups(cgroups, membership, "cpu")))


def _quota(group: Path) -> float:
    """Cores that the group may use at once (cgroup v2, else v1); infinite if there is no limit."""
    words = _text(group / "cpu.max").split()
    try:
        quota, period = words or (_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except ValueError:  # absent, or the word max
        return math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerMemory:
    """`limit`: bytes that may be used. `used`: bytes in use that the kernel cannot reclaim."""

    limit: int
    used: int

    @property
    def left(self) -> int:
        return self.limit - self.used


def memory_limit(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Returns the bytes that the cgroup of this process may use, v1 or v2; None if there is no limit.

    The smallest limit of the group and its parents applies. cgroups: mount point of the cgroup file systems.
    membership: /proc/self/cgroup; in a container it mostly says "/", since the mount is the container's own.
    """
    limits = (_number(group, LIMITS) for group in _groups(cgroups, membership, "memory"))
    return min((limit for limit in limits if limit is not None), default=None)


def memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> ContainerMemory | None:
    """Returns the group with the least memory left, of the process's and its parents; None without any limit.

    `used` counts all processes of the group, but not clean page cache, which the kernel reclaims first.
    """
    found = []
    for group in _groups(cgroups, membership, "memory"):
        limit, used = _number(group, LIMITS), _number(group, USES)
        if limit is not None and used is not None:
            found.append(ContainerMemory(limit=limit, used=used - _reclaimable(group)))
    return min(found, key=lambda each: each.left, default=None)


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _groups(cgroups: Path, membership: Path, controller: str) -> set[Path]:
    """Groups by which the controller (of v1; v2 has one tree for all) may limit this process."""
    folders = {cgroups, cgroups / controller}
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        inside = root / path.lstrip("/")
        folders |= {each for each in (inside, *inside.parents) if each.is_relative_to(root)}
    return folders


def _number(group: Path, names: tuple[str, str]) -> int | None:
    """Returns what the first of these files says that has a number; None where there is no limit."""
    found = (int(text) for name in names if (text := _text(group / name)).isdecimal())
    return next((number for number in found if number < UNLIMITED), None)


def _reclaimable(group: Path) -> int:
    """Bytes of clean page cache. v1 counts those of child groups under separate names (`total_*`)."""
    stat: dict[str, str] = dict(re.findall(r"^(\w+) (\d+)$", _text(group / "memory.stat"), re.MULTILINE))
    names = ("inactive_file", "active_file")
    return sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in names)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape").strip()
    except OSError:
        return ""


def mount_fields(mounts: Path = MOUNTS) -> list[list[str]]:
    """Returns the fields of each mount, as proc_pid_mountinfo(5) lists them; none if unknown, as on macOS."""
    return [line.split() for line in _text(mounts).splitlines()]


def mount_points(mounts: Path = MOUNTS) -> list[Path]:
    """Returns all mount points, bind mounts too, which `os.path.ismount` does not know; none if unknown."""
    paths = [fields[4] for fields in mount_fields(mounts)]
    # A space in a path is written as \040.
    return [Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), each)) for each in paths]


def on_volume(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Whether a folder, which need not exist yet, is below the mount of a volume; True if that is unknown."""
    where = folder.resolve()
    above = [each for each in mount_points(mounts) if where.is_relative_to(each)]
    nearest = max(above, key=lambda each: len(each.parts), default=None)
    return nearest is None or (len(nearest.parts) > 1 and nearest.parts[1] not in NO_VOLUMES)
