"""Memory limit, and peak memory of a step: of a GPU, or of this process on a CPU."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Final

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


class StepMemory:
    """Peak of a GPU's memory reserved by torch's allocator, or of the process' resident memory on a CPU.

    Args:
        device: a GPU, of which other processes' memory is left out; or a CPU.
        ranks: ranks in this container (`World.local_size`), which share the limit of a CPU.
        cgroups: folder of the container's limit.
        process: folder of this process under /proc.
    """

    def __init__(
        self, device: torch.device, *, ranks: int = 1, cgroups: Path = CGROUPS, process: Path = SELF
    ) -> None:
        self.device, self._process = device, process
        self.fails_softly = device.type == "cuda"
        """Whether exceeding the limit raises an exception; else the process is killed."""
        if self.fails_softly:
            limit = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        else:
            physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            limit = min(memory_limit(cgroups, process / "cgroup") or physical, physical) // ranks
        self.limit = limit
        """Bytes that this process may use."""

    def begin(self) -> None:
        """Resets the peak. If that fails, the earlier one counts too, which only makes sizes smaller."""
        if self.fails_softly:
            torch.cuda.empty_cache()  # the peak is of reserved memory, which includes cached blocks
            torch.cuda.reset_peak_memory_stats(device=self.device)
            return
        try:
            # Returns freed blocks to the system, else a smaller trial would seem as large as the one before.
            # Only glibc has it.
            ctypes.CDLL(None).malloc_trim(0)
            (self._process / "clear_refs").write_text("5")
        except (OSError, AttributeError) as error:
            log.event("batch-size", peak="of all trials so far", why=error)

    def peak(self) -> int:
        """Returns the peak in bytes since `begin`, including all that the process held before."""
        if self.fails_softly:
            return int(torch.cuda.max_memory_reserved(self.device))
        status = (self._process / "status").read_text()
        found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
