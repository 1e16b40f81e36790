"""What the loader workers really hold of their own, against the container's limit: `LoaderMemory`. Made by
`watch` and `loop`; `close` ends it.

Private to a worker is what a fork had to copy for it, and what it made itself. Batches on their way are in
shared memory, and not among it; neither are the pages of a file that is mapped, which the kernel takes back.
`data.room` estimates beforehand; this sees what that cannot: variables of modules, caches, a reader that
leaks. Linux walks all that a worker has mapped to answer, which was measured at 18 ms for 0.3 GiB and 83 to
140 ms for 4 GiB (two shared cores, busy), so a thread asks, and every 30 s.
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
from spottrain.core.progress import Board
from spottrain.distributed.world import World

FIRST: Final = 1.0
"""Seconds to the first look; the copies grow fastest in the first epoch, so pauses grow from this ..."""
EVERY: Final = 30.0
"""... to this."""
AHEAD: Final = 4
"""Times that the growth between two looks must go into what is left."""
IN_A_ROW: Final = 2
"""Looks that must find it: copies of a small set fill quickly, and that is all."""
PROC: Final = Path("/proc")
OF_A_MAPPING: Final = re.compile(
    rb"^Private_Clean: +(\d+) kB\nPrivate_Dirty: +(\d+) kB\n(?:.*\n)*?Anonymous: +(\d+) kB$", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """`private`: bytes of each worker, by process. `memory`: of the container; None: not known."""

    private: Mapping[int, int] = field(default_factory=dict)
    memory: ContainerMemory | None = None

    @property
    def bytes(self) -> int:
        return sum(self.private.values())

    def growth(self, before: Look) -> int:
        """Bytes, of those workers that were there before: a start is no growth that goes on."""
        return sum(now - before.private[pid] for pid, now in self.private.items() if pid in before.private)


def warning(before: Look, now: Look, *, seconds: float, ranks: int = 1) -> str:
    """Empty, or what will happen: the workers of `ranks` ranks grow as they did in the `seconds` between."""
    grown, memory = now.growth(before) * ranks, now.memory
    if memory is None or grown <= 0 or memory.left > AHEAD * grown:
        return ""
    until = max(memory.left, 0) / grown * seconds
    of = f" in this rank, one of {ranks} here" if ranks > 1 else ""
    return (
        f"{len(now.private)} loader worker(s){of} hold {gib(now.bytes)} of their own, "
        f"{gib(now.growth(before))} more than {seconds:.0f} s ago, and of {memory.whose} of "
        f"{gib(memory.limit)} {gib(max(memory.left, 0))} are left: at this pace for about {until:.0f} s, and "
        "then the kernel kills. Lower workers (training.data.workers), keep the samples in one numpy array "
        "or torch tensor, a memory map or an Arrow table instead of Python objects, or raise "
        "resources.limits.memory"
    )


class LoaderMemory:
    """pids: of the workers that there are now. told: given their private bytes after each look.

    ranks: of this container. The rest are parameters so that a test needs no small container.
    """

    def __init__(
        self,
        pids: Callable[[], Iterable[int]],
        told: Callable[[int], None],
        *,
        ranks: int = 1,
        memory: Callable[[], ContainerMemory | None] = memory_here,
        proc: Path = PROC,
        first: float = FIRST,
        every: float = EVERY,
    ) -> None:
        self._pids, self._told, self._ranks = pids, told, ranks
        self._memory, self._proc = memory, proc
        self._first, self._every = first, every
        self._before = Look()
        self._found = 0
        """Looks in a row by which the limit is near."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spottrain-loader-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Does not wait for a look that is under way: a notice is short."""
        self._over.set()

    def join(self) -> None:
        """Until it has ended, after `close` or because nothing can be measured."""
        self._thread.join()

    def _run(self) -> None:
        pause = self._first
        while not self._over.wait(pause):
            pids = tuple(self._pids())
            if pids and not (self._proc / "self" / "smaps").exists():
                why = "this system has no /proc/<pid>/smaps"
                log.event("loader-memory", why=why, next="what the workers hold is not measured")
                return
            if pids:
                longer = min(2 * pause, self._every)
                self._look(pids, pause, longer)
                pause = longer

    def _look(self, pids: Iterable[int], seconds: float, following: float) -> None:
        """seconds: since the look before. following: to the next one."""
        found = {pid: private for pid in pids if (private := private_bytes(pid, self._proc)) is not None}
        now, before = Look(private=found, memory=self._memory()), self._before
        self._before = now
        self._told(now.bytes)
        text = warning(before, now, seconds=seconds, ranks=self._ranks)
        if not text:
            self._found = 0  # it has recovered, and may come again
            return
        told, self._found = self._found >= IN_A_ROW, self._found + 1
        # The next look would come too late to be the second.
        if (
            now.memory is not None
            and now.memory.left * seconds <= now.growth(before) * self._ranks * following
        ):
            self._found = max(self._found, IN_A_ROW)
        if not told and self._found >= IN_A_ROW:
            log.event("advice", about="data", text=text)


def watched(world: World, board: Board, pids: Callable[[], Iterable[int]]) -> LoaderMemory | None:
    """In the first rank of a pod: the others do the same, and it is this one that has /metrics."""
    if not world.first_here:
        return None
    return LoaderMemory(pids, lambda found: board.update(loader_bytes=found), ranks=world.local_size)


def private_bytes(pid: int, proc: Path = PROC) -> int | None:
    """Of one process, without the pages of files; None where it has ended, or is another user's.

    The sums of `smaps_rollup`, which is quicker, do not tell those pages from the others.
    """
    try:
        mappings = (proc / str(pid) / "smaps").read_bytes()
    except OSError:
        return None
    found = (tuple(map(int, each)) for each in OF_A_MAPPING.findall(mappings))
    return 1024 * sum(min(clean + dirty, anonymous) for clean, dirty, anonymous in found)
