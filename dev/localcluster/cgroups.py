"""The control groups that each node's pods live under, cgroup v1 or v2.

Called by the supervisor and `down`.
"""

from __future__ import annotations

import time
from pathlib import Path

from localcluster import layout
from localcluster.shell import say

_ROOT = Path("/sys/fs/cgroup")


def version() -> int:
    return 2 if (_ROOT / "cgroup.controllers").exists() else 1


def hierarchies(kinds: tuple[str, ...] = ("cgroup",)) -> list[Path]:
    """The one root of v2, or every mounted hierarchy of v1."""
    if version() == 2:
        return [_ROOT]
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted({Path(words[1]) for words in mounts if words[2] in kinds})


def of_node(name: str) -> str:
    return f"/{layout.CGROUP}/{name}"


def make(name: str) -> None:
    """The kubelet refuses a cgroupRoot that is not there in every hierarchy."""
    for hierarchy in hierarchies():
        for group in (hierarchy / layout.CGROUP, hierarchy / layout.CGROUP / name):
            group.mkdir(exist_ok=True)
            _inherit(group)


def _inherit(group: Path) -> None:
    """v1's cpuset starts empty and takes no process; v2's children get only the controllers passed on."""
    for setting in ("cpuset.cpus", "cpuset.mems"):
        own = group / setting
        if version() == 1 and own.exists() and not own.read_text().strip():
            own.write_text((group.parent / setting).read_text())
    if version() == 2:
        wanted = (group.parent / "cgroup.controllers").read_text().split()
        (group.parent / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in wanted))


def remove(name: str | None = None, *, seconds: float = 5) -> None:
    """Takes away what a node, or without a name the whole cluster, left. Groups still in use stay."""
    below = f"{layout.CGROUP}/{name}" if name else layout.CGROUP
    end = time.monotonic() + seconds
    left = _remove_once(below)
    while left and time.monotonic() < end:  # the kernel lets go of a killed process's group a little later
        time.sleep(0.05)
        left = _remove_once(below)
    if left:
        say(f"control groups still in use, left in place: {left[0]} and {len(left) - 1} more")


def _remove_once(below: str) -> list[Path]:
    left = []
    for hierarchy in hierarchies(("cgroup", "cgroup2")):  # runc also makes groups in a v2 mounted beside v1
        groups = (
            [p for p in (hierarchy / below).rglob("*") if p.is_dir()] if (hierarchy / below).exists() else []
        )
        tops = [hierarchy / below] if (hierarchy / below).exists() else []
        for group in sorted([*groups, *tops], key=lambda p: len(p.parts), reverse=True):
            try:
                group.rmdir()
            except OSError:
                left.append(group)
    return left
