"""How much memory there is, and what a step took: of a GPU, or of this process on a CPU. See `batchsize`."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import torch

from spottrain.core import log
from spottrain.core.container import CGROUPS, memory_limit

SELF: Final = Path("/proc/self")


class StepMemory(Protocol):
    """Of one device."""

    device: torch.device
    limit: int
    """Bytes that this process may take."""
    fails_softly: bool
    """Whether going above ends in an exception; else the process is killed."""

    def begin(self) -> None:
        """From here on the peak counts anew."""

    def peak(self) -> int:
        """Bytes at most since `begin`, all that the process holds included."""


@dataclass(slots=True)
class CudaMemory:
    """What torch's allocator holds at most, of the GPU's memory that is not somebody else's.

    Written for a GPU and not measured on one.
    """

    device: torch.device
    limit: int
    fails_softly: bool = True

    @classmethod
    def of(cls, device: torch.device) -> CudaMemory:
        free, _ = torch.cuda.mem_get_info(device)
        return cls(device, free + torch.cuda.memory_reserved(device))

    def begin(self) -> None:
        torch.cuda.empty_cache()  # a peak is of what is reserved, and that includes what is kept for later
        torch.cuda.reset_peak_memory_stats(device=self.device)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_reserved(self.device))


@dataclass(slots=True)
class HostMemory:
    """The process's resident memory, as Linux counts it; `process` is its folder under /proc."""

    limit: int
    process: Path = SELF
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    fails_softly: bool = False

    def begin(self) -> None:
        """Linux forgets the peak so far when 5 is written to clear_refs. Where that is not allowed, a peak of
        before is taken for this one's, which makes sizes smaller, not larger; that is told."""
        try:
            # What was freed stays with the allocator, up to 32 MiB a piece, and so with the process: after a
            # large trial each smaller one would seem as large. This gives it back; glibc alone has it.
            ctypes.CDLL(None).malloc_trim(0)
            (self.process / "clear_refs").write_text("5")
        except (OSError, AttributeError) as error:
            log.event("batch-size", peak="of all trials so far", why=error)

    def peak(self) -> int:
        found = re.search(r"^VmHWM:\s+(\d+) kB", (self.process / "status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0


def memory_of(
    device: torch.device, *, ranks: int = 1, cgroups: Path = CGROUPS, process: Path = SELF
) -> StepMemory:
    """Of a GPU what is free; on a CPU the container's limit or, without one, the machine's memory.

    ranks: of this container, `World.local_size`; on a CPU they share it, of GPUs each has its own.
    """
    if device.type == "cuda":
        return CudaMemory.of(device)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit(cgroups, process / "cgroup")
    return HostMemory(min(limit or physical, physical) // ranks, process)
