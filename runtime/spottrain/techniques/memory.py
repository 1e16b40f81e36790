"""Memory limit, and peak memory of a step: of a GPU, or of this process on a CPU."""

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
OUT_OF_MEMORY: Final = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|CUDA error: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_(ALLOC|INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION)_FAILED"
)
"""Messages of a RuntimeError that mean out of memory (torch 2.15); CUDA's allocator has its own class."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means out of memory, so that a smaller batch may help."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


class StepMemory(Protocol):
    """Memory limit and peak of one device."""

    device: torch.device
    limit: int
    """Bytes that this process may use."""
    fails_softly: bool
    """Whether exceeding the limit raises an exception; else the process is killed."""

    def begin(self) -> None:
        """Resets the peak."""

    def peak(self) -> int:
        """Returns the peak in bytes since `begin`, including all that the process held before."""


@dataclass(slots=True)
class CudaMemory:
    """Peak memory reserved by torch's allocator. The limit leaves out what other processes use."""

    device: torch.device
    limit: int
    fails_softly: bool = True

    def begin(self) -> None:
        torch.cuda.empty_cache()  # the peak is of reserved memory, which includes cached blocks
        torch.cuda.reset_peak_memory_stats(device=self.device)

    def peak(self) -> int:
        return int(torch.cuda.max_memory_reserved(self.device))


@dataclass(slots=True)
class HostMemory:
    """Peak resident memory of the process, as Linux counts it. `process`: its folder under /proc."""

    limit: int
    process: Path = SELF
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    fails_softly: bool = False

    def begin(self) -> None:
        """Resets the peak. If that fails, the earlier one counts too, which only makes sizes smaller."""
        try:
            # Returns freed blocks to the system, else a smaller trial would seem as large as the one before.
            # Only glibc has it.
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
    """Returns the memory of a GPU, limited by what is free; or of a CPU, limited by the container or machine.

    ranks: ranks in this container (`World.local_size`), which share the limit of a CPU.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return CudaMemory(device, free + torch.cuda.memory_reserved(device))
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit(cgroups, process / "cgroup")
    return HostMemory(min(limit or physical, physical) // ranks, process)
