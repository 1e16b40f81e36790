"""`LoaderMemory`: measures the private memory of loader workers, and warns before the container's limit.

Private memory of a worker is its copy-on-write copies after the fork, and its own allocations. Batches in
transit are in shared memory and do not count; nor do pages of mapped files, which the kernel can reclaim.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from spottrain.core import log
from spottrain.core.container import ContainerMemory, gib, memory_here

EVERY: Final = 20.0
"""Seconds between two measurements. Each takes 20 to 35 ms for each GiB of a worker, in a thread."""
AHEAD: Final = 2
"""Warns if the memory left is at most this many times the growth between two measurements."""
PROC: Final = Path("/proc")
OF_A_MAPPING: Final = re.compile(
    rb"^Private_Clean: +(\d+) kB\nPrivate_Dirty: +(\d+) kB\n(?:.*\n)*?Anonymous: +(\d+) kB$", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One measurement. `private`: bytes by process id; `memory`: of the container, None if unknown."""

    private: Mapping[int, int] = field(default_factory=dict)
    memory: ContainerMemory | None = None

    @property
    def bytes(self) -> int:
        return sum(self.private.values())

    def growth(self, before: Look) -> int:
        """Returns growth in bytes of the workers that `before` also has; new workers do not count."""
        return sum(now - before.private[pid] for pid, now in self.private.items() if pid in before.private)


def warning(before: Look, now: Look, *, seconds: float, ranks: int = 1) -> str:
    """Returns a warning if the limit is near at the present growth; else "".

    `seconds`: between the two measurements. `ranks`: ranks in this container, assumed to grow alike.
    """
    grown, memory = now.growth(before) * ranks, now.memory
    if memory is None or grown <= 0 or memory.left > AHEAD * grown:
        return ""
    until = max(memory.left, 0) / grown * seconds
    of = f" in this rank, one of {ranks} here" if ranks > 1 else ""
    return (
        f"{len(now.private)} loader worker(s){of} hold {gib(now.bytes)} of private memory, "
        f"{gib(now.growth(before))} more than {seconds:.0f} s ago; {gib(max(memory.left, 0))} of "
        f"{memory.whose} of {gib(memory.limit)} are left, enough for about {until:.0f} s at this "
        "rate; then the kernel kills the process. Lower training.data.numWorkers, keep the "
        "samples in one numpy array or torch tensor, a memory map or an Arrow table instead of "
        "Python objects, or raise resources.limits.memory"
    )


class LoaderMemory:
    """Measures in a thread until `close`, and warns once.

    `pids` returns the process ids of the current workers. `report` is called with their private bytes after
    each measurement. `ranks`: ranks in this container. The other arguments are for tests.
    """

    def __init__(
        self,
        pids: Callable[[], Iterable[int]],
        report: Callable[[int], None],
        *,
        ranks: int = 1,
        memory: Callable[[], ContainerMemory | None] = memory_here,
        proc: Path = PROC,
        every: float = EVERY,
    ) -> None:
        self._pids, self._report, self._ranks = pids, report, ranks
        self._memory, self._proc, self._every = memory, proc, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spottrain-loader-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Does not wait for a running measurement: a notice is short."""
        self._over.set()

    def join(self) -> None:
        """Waits until the thread ends, after `close` or because nothing can be measured."""
        self._thread.join()

    def _run(self) -> None:
        before, warned = Look(), False
        while not self._over.wait(self._every):
            if not (pids := tuple(self._pids())):
                continue
            if not (self._proc / "self" / "smaps").exists():
                why = "this system has no /proc/<pid>/smaps"
                log.event("loader-memory", why=why, next="the memory of the workers is not measured")
                return
            found = {pid: private for pid in pids if (private := private_bytes(pid, self._proc)) is not None}
            now = Look(private=found, memory=self._memory())
            self._report(now.bytes)
            if not warned and (text := warning(before, now, seconds=self._every, ranks=self._ranks)):
                log.event("advice", about="data", text=text)
                warned = True
            before = now


def private_bytes(pid: int, proc: Path = PROC) -> int | None:
    """Returns private bytes of a process without file pages; None if it has ended or is inaccessible.

    `smaps_rollup` is faster, but its sums include file pages.
    """
    try:
        mappings = (proc / str(pid) / "smaps").read_bytes()
    except OSError:
        return None
    found = (tuple(map(int, each)) for each in OF_A_MAPPING.findall(mappings))
    return 1024 * sum(min(clean + dirty, anonymous) for clean, dirty, anonymous in found)
