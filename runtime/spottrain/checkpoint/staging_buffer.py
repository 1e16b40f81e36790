"""The memory that a snapshot is copied into: shared with the uploader, made before the first save.

An anonymous file (memfd): its pages count as the container's memory, not against the size of /dev/shm. Fresh
pages cost many times what a copy costs, so they are made resident beforehand, in a thread; with CUDA they are
pinned as well. Called by `saver`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch

from spottrain.checkpoint.layout import Layout
from spottrain.checkpoint.tree import Leaf
from spottrain.contract import Reason
from spottrain.core import log
from spottrain.core.container import ContainerMemory, gib, memory
from spottrain.distributed.dtensor import local
from spottrain.errors import ConfigurationError

MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14."""
SLICE: Final = 64 * 2**20
"""Bytes made resident at once."""
FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Arena:
    """Memory for the files of one layout. `fd`: the anonymous file, for the uploader; -1 where the system has
    none, and uploads are made by this process.

    `freed`: bytes of one before it, which may not be back yet; `ranks_here`: that need as much now.
    """

    def __init__(self, layout: Layout, *, pin: bool = False, freed: int = 0, ranks_here: int = 1) -> None:
        self.layout = layout
        self.size = max(layout.bytes, mmap.PAGESIZE)
        require_memory((self.size - freed) * ranks_here)
        self.fd = self._make_file() if hasattr(os, "memfd_create") else -1
        self.map = mmap.mmap(self.fd, self.size)  # without a file it is this process's own memory
        self._bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self._pin = pin
        self._pinned = False
        self._ready = threading.Event()
        self._targets: dict[int, torch.Tensor] = {}
        threading.Thread(target=self._make_resident, name="spottrain-arena", daemon=True).start()

    def _make_file(self) -> int:
        fd = os.memfd_create("spottrain-arena", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, self.size)
        return fd

    def fill(self, leaves: Sequence[Leaf]) -> None:
        """Copies the leaves to their places. When it returns the caller may change them."""
        self._ready.wait()
        devices: set[torch.device] = set()
        with torch.no_grad():
            for place in self.layout.places:
                source = local(leaves[place.number].tensor)
                behind = source.is_cuda and self._pinned
                self._target(place.number, place.offset, source).copy_(source, non_blocking=behind)
                if behind:
                    devices.add(source.device)
        for device in devices:
            torch.cuda.synchronize(device)

    def has_nan(self, number: int) -> bool:
        """Whether the copy of leaf `number`, as far as this rank holds it, has a NaN."""
        target = self._targets.get(number)
        if target is None or target.dtype not in FLOATS or not target.numel():
            return False
        return bool(torch.linalg.vector_norm(target.reshape(-1), ord=float("inf")).isnan())

    def _target(self, number: int, offset: int, source: torch.Tensor) -> torch.Tensor:
        if number not in self._targets:
            flat = self._bytes[offset : offset + source.nbytes]
            self._targets[number] = flat.view(source.dtype).view(source.shape)
        return self._targets[number]

    def _make_resident(self) -> None:
        try:
            for start in range(0, self.size, SLICE):
                self._touch(start, min(SLICE, self.size - start))
            for shard in self.layout.shards:
                self.map[shard.offset : shard.offset + len(shard.header)] = shard.header
            if self._pin:
                self._pinned = self._register()
        finally:
            self._ready.set()

    def _register(self) -> bool:
        """Pins it. Where CUDA will not, copies are waited for one by one, which is slower and right."""
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self._bytes.data_ptr()
        code = cuda.cudaHostRegister(address, self.size, 0)
        if int(code) != 0:
            log.event("not-pinned", bytes=self.size, code=int(code))
            return False
        weakref.finalize(self, cuda.cudaHostUnregister, address)  # before the memory is unmapped
        return True

    def _touch(self, start: int, length: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)  # its calls let other threads run
        address = ctypes.c_void_p(self._bytes.data_ptr() + start)
        populates = sys.platform == "linux"  # elsewhere this number has another meaning
        if not populates or libc.madvise(address, ctypes.c_size_t(length), MADV_POPULATE_WRITE) != 0:
            self._bytes[start : start + length].zero_()  # an older kernel


def require_memory(needed: int, known: ContainerMemory | None = None) -> None:
    """`known`: of the container; default: as the cgroup says. Without a limit nothing is refused."""
    known = known or memory()
    if known is None or needed <= known.left:
        return
    raise ConfigurationError(
        f"a save needs {gib(needed)} of memory for a copy of the training state, and the container has "
        f"{gib(known.left)} left of its limit of {gib(known.limit)}; raise resources.limits.memory "
        f"by {gib(needed - known.left)} or more. Nothing was overwritten",
        reason=Reason.OUT_OF_MEMORY,
    )
