"""Whether the copies of the set in the loader workers fit into memory: `Room`. Asked before workers start, by
`batches`, `stream`, `sampler` and, through `parts`, for the evaluation.

What a copy takes is estimated (`copies`), and what is left is read from the cgroup, so the words say "about".
What the workers then really hold is measured while they run: `diagnosis.loadermemory`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from spottrain.core import log
from spottrain.core.container import ContainerMemory, gib, memory_here
from spottrain.data.worker_copies import Copy, copy_of, start_method

FORKED: Final = 20 * 2**20
"""Bytes of a worker's own, whatever the set is: measured 13 to 18 MiB (torch 2.15, Python 3.11)."""
STARTED: Final = 300 * 2**20
"""The same of one that is started anew and imports torch: measured 294 MiB, without the script's imports."""
CERTAIN: Final = 0.9
"""Of the estimate: where the least is less, both are told."""
KEEP: Final = "keep the samples in one numpy array or torch tensor, a memory map or an Arrow table"
"""The way out where workers are forked: what has no reference counts is not copied."""
KEEP_SENT: Final = "keep the samples in one torch tensor, or have each worker open the files itself"
"""The same where each is sent the set."""


class Room:
    """For the workers of one loader. Estimates once, when it is first asked; tells once.

    held: the set, and its collate function. name: of the set, in what is told. ranks: of this container,
    which share its memory and do the same. context: how workers are started, as the DataLoader was told.
    memory: how much there is; None: as cgroups and the machine say.
    """

    def __init__(
        self,
        *held: Any,
        name: str = "train_set",
        ranks: int = 1,
        context: Any = None,
        memory: Callable[[], ContainerMemory | None] | None = None,
    ) -> None:
        self._held, self._name, self._ranks = held, name, max(ranks, 1)
        self._context, self._memory = context, memory or memory_here
        self._copy: Copy | None = None
        self._told = False

    def most(self, wanted: int) -> int:
        """As many of the `wanted` workers as fit, 0 included; for where nobody has given a number."""
        found = self._known(wanted)
        if found is None or wanted <= (fit := self._fit(found, self._least)):
            return wanted  # that it is less than the least is certain, that it is less than the rest is not
        what = "no loader worker" if fit == 0 else f"{fit} loader worker(s)"
        self._tell(f"{what} instead of {wanted}: {self._why(wanted, found)}; {self._fix(wanted, found)}")
        return fit

    def warn(self, workers: int) -> None:
        """A given number is kept; where it does not fit, what will happen is told."""
        found = self._known(workers)
        if found is None or workers <= (fit := self._fit(found, self._each)):
            return
        will = "may" if workers <= self._fit(found, self._least) else "will"
        ends = f"the kernel {will} kill this process or a worker when the memory is used up"
        fewer = f", or set workers (training.data.workers) to {fit}"
        self._tell(f"{self._why(workers, found)}: {ends}; {self._fix(workers, found)}{fewer}")

    # --- inside -------------------------------------------------------------------------------------
    def _known(self, workers: int) -> ContainerMemory | None:
        """What memory there is; None where nothing is to be held against it."""
        if workers < 1:
            return None
        found = self._memory()
        if found is None:
            self._give_up("this system has neither cgroups nor /proc/meminfo")
            return None
        try:
            self._copy = self._copy or copy_of(*self._held, method=start_method(self._context))
        except Exception as error:  # of a class that answers for itself: no training is to end by it
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        return found

    def _give_up(self, why: str) -> None:
        if not self._told:
            self._told = True
            log.event("loader-memory", why=why, next="the copies in the workers are not held against a limit")

    @property
    def _each(self) -> int:
        """Bytes of one worker."""
        assert self._copy is not None
        return self._copy.bytes + (FORKED if self._forked else STARTED)

    @property
    def _least(self) -> int:
        """The same, if what may be held in common is."""
        assert self._copy is not None
        return self._each - self._copy.bytes + self._copy.least

    @property
    def _forked(self) -> bool:
        return self._copy is not None and self._copy.method == "fork"

    def _fit(self, found: ContainerMemory, each: int) -> int:
        return max(found.left, 0) // (each * self._ranks)

    def _why(self, workers: int, found: ContainerMemory) -> str:
        assert self._copy is not None
        least = "" if self._copy.whole else "at least "
        size = f"{least}about {gib(self._copy.bytes)}"
        if self._copy.least < CERTAIN * self._copy.bytes:
            size = f"{gib(self._copy.least)} to {gib(self._copy.bytes)}"
        if self._forked:
            cause = (
                f"each comes to hold a copy of {size} of the Python objects in {self._name}, because a fork "
                "copies the pages whose reference counts are written"
            )
        else:
            cause = f"each is sent {self._name}, {size}, because workers are started by {self._copy.method}"
        ranks = f" in each of {self._ranks} ranks" if self._ranks > 1 else ""
        return (
            f"{workers} worker(s){ranks} will take about {gib(self._of(workers))}, and of {found.whose} of "
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
