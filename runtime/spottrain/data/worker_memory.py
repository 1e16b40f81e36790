"""Checks, before loader workers start, whether their copies of the dataset fit into memory.

The size of a copy is estimated (`worker_copies`), and free memory is read from the cgroup, so messages say
"about". `diagnostics.loader_memory` measures the workers' real memory while they run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from spottrain.core import log
from spottrain.core.container import ContainerMemory, gib, memory_here
from spottrain.data.worker_copies import Copy, copy_of, start_method

FORKED: Final = 20 * 2**20
"""Bytes of a forked worker without the dataset: measured 13 to 18 MiB (torch 2.15, Python 3.11)."""
STARTED: Final = 300 * 2**20
"""Bytes of a spawned worker, which imports torch: measured 294 MiB, without the script's imports."""
KEEP: Final = "keep the samples in one numpy array or torch tensor, a memory map or an Arrow table"
"""Fix for forked workers: memory without reference counts is not copied."""
KEEP_SENT: Final = "keep the samples in one torch tensor, or have each worker open the files itself"
"""Fix for spawned workers, each of which is sent the dataset."""


@dataclass(frozen=True, slots=True)
class _Shortage:
    fit: int
    """Workers that fit."""
    why: str
    fix: str


class WorkerMemoryLimit:
    """Memory check for the workers of one loader. Estimates once, at the first question; logs once.

    held: the dataset and its collate function. name: of the dataset, for messages. ranks: ranks in this
    container, which share its memory. context: the DataLoader's `multiprocessing_context`.
    memory: returns the container's memory; None: as cgroups and the machine say.
    """

    def __init__(
        self,
        *held: Any,
        name: str = "train_dataset",
        ranks: int = 1,
        context: Any = None,
        memory: Callable[[], ContainerMemory | None] | None = None,
    ) -> None:
        self._held, self._name, self._ranks = held, name, max(ranks, 1)
        self._context, self._memory = context, memory or memory_here
        self._copy: Copy | None = None
        self._logged = False

    def most(self, wanted: int) -> int:
        """Returns how many of the `wanted` workers fit, maybe 0. For `workers="auto"`."""
        found = self._shortage(wanted)
        if found is None:
            return wanted
        what = "no loader worker" if found.fit == 0 else f"{found.fit} loader worker(s)"
        self._log("advice", about="data", text=f"{what} instead of {wanted}: {found.why}; {found.fix}")
        return found.fit

    def warn(self, workers: int) -> None:
        """Logs an advice if `workers` do not fit. For a given number, which is kept."""
        found = self._shortage(workers)
        if found is None:
            return
        ends = "the kernel will kill this process or a worker when the memory is used up"
        fewer = f"or set training.data.numWorkers to {found.fit}"
        self._log("advice", about="data", text=f"{found.why}: {ends}; {found.fix}, {fewer}")

    # --- private ------------------------------------------------------------------------------------
    def _shortage(self, workers: int) -> _Shortage | None:
        """Returns None if the workers fit, and if that is unknown."""
        if workers < 1:
            return None
        memory = self._memory()
        if memory is None:
            self._log_unchecked("this system has neither cgroups nor /proc/meminfo")
            return None
        try:
            self._copy = self._copy or copy_of(*self._held, method=start_method(self._context))
        except Exception as error:  # from a class of the script: it must not end the training
            self._log_unchecked(f"{type(error).__name__}: {error}")
            return None
        copy, forked = self._copy, self._copy.method == "fork"
        each = (copy.bytes + (FORKED if forked else STARTED)) * self._ranks
        fit, needed = max(memory.left, 0) // each, workers * each
        if workers <= fit:
            return None
        size = f"{'' if copy.whole else 'at least '}about {gib(copy.bytes)}"
        if forked:
            cause = (
                f"each will hold a copy of {size} of the Python objects in {self._name}, because a fork "
                "copies the memory pages whose reference counts change"
            )
        else:
            cause = f"each is sent {self._name}, {size}, because workers are started by {copy.method}"
        ranks = f" in each of {self._ranks} ranks" if self._ranks > 1 else ""
        why = (
            f"{workers} worker(s){ranks} will take about {gib(needed)}, but of {memory.whose} of "
            f"{gib(memory.limit)} {gib(max(memory.left, 0))} are left; {cause}"
        )
        more = f"or raise resources.limits.memory by about {gib(needed - memory.left)}"
        return _Shortage(fit, why, f"{KEEP if forked else KEEP_SENT}, {more}")

    def _log_unchecked(self, why: str) -> None:
        unchecked = "whether the copies in the workers fit into memory is not checked"
        self._log("loader-memory", why=why, next=unchecked)

    def _log(self, event: str, **fields: str) -> None:
        if not self._logged:
            self._logged = True
            log.event(event, **fields)
