"""Checks, before loader workers start, whether their copies of the dataset fit into memory.

The size of a copy is estimated (`worker_copies`), and free memory is read from the cgroup, so messages say
"about". `diagnostics.loader_memory` measures the workers' real memory while they run.
"""

from __future__ import annotations

from collections.abc import Callable
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
        self._told = False

    def most(self, wanted: int) -> int:
        """Returns how many of the `wanted` workers fit, maybe 0. For `workers="auto"`."""
        found = self._known(wanted)
        if found is None or wanted <= (fit := self._fit(found)):
            return wanted
        what = "no loader worker" if fit == 0 else f"{fit} loader worker(s)"
        self._tell(f"{what} instead of {wanted}: {self._why(wanted, found)}; {self._fix(wanted, found)}")
        return fit

    def warn(self, workers: int) -> None:
        """Logs an advice if `workers` do not fit. For a given number, which is kept."""
        found = self._known(workers)
        if found is None or workers <= (fit := self._fit(found)):
            return
        ends = "the kernel will kill this process or a worker when the memory is used up"
        fewer = f", or set training.data.numWorkers to {fit}"
        self._tell(f"{self._why(workers, found)}: {ends}; {self._fix(workers, found)}{fewer}")

    # --- inside -------------------------------------------------------------------------------------
    def _known(self, workers: int) -> ContainerMemory | None:
        """Returns the container's memory; None if there is nothing to check."""
        if workers < 1:
            return None
        found = self._memory()
        if found is None:
            self._give_up("this system has neither cgroups nor /proc/meminfo")
            return None
        try:
            self._copy = self._copy or copy_of(*self._held, method=start_method(self._context))
        except Exception as error:  # from a class of the script: it must not end the training
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        return found

    def _give_up(self, why: str) -> None:
        if not self._told:
            self._told = True
            log.event(
                "loader-memory",
                why=why,
                next="whether the copies in the workers fit into memory is not checked",
            )

    @property
    def _each(self) -> int:
        """Estimated bytes of one worker."""
        assert self._copy is not None
        return self._copy.bytes + (FORKED if self._forked else STARTED)

    @property
    def _forked(self) -> bool:
        return self._copy is not None and self._copy.method == "fork"

    def _fit(self, found: ContainerMemory) -> int:
        return max(found.left, 0) // (self._each * self._ranks)

    def _why(self, workers: int, found: ContainerMemory) -> str:
        assert self._copy is not None
        least = "" if self._copy.whole else "at least "
        size = f"{least}about {gib(self._copy.bytes)}"
        if self._forked:
            cause = (
                f"each will hold a copy of {size} of the Python objects in {self._name}, because a fork "
                "copies the memory pages whose reference counts change"
            )
        else:
            cause = f"each is sent {self._name}, {size}, because workers are started by {self._copy.method}"
        ranks = f" in each of {self._ranks} ranks" if self._ranks > 1 else ""
        return (
            f"{workers} worker(s){ranks} will take about {gib(self._of(workers))}, but of {found.whose} of "
            f"{gib(found.limit)} {gib(max(found.left, 0))} are left; {cause}"
        )

    def _fix(self, workers: int, found: ContainerMemory) -> str:
        keep = KEEP if self._forked else KEEP_SENT
        more = self._of(workers) - found.left
        return f"{keep}, or raise resources.limits.memory by about {gib(more)}"

    def _of(self, workers: int) -> int:
        return workers * self._each * self._ranks

    def _tell(self, text: str) -> None:
        if not self._told:
            self._told = True
            log.event("advice", about="data", text=text)
