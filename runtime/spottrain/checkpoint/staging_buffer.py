"""Staging buffer: memory for the copy of a training state, shared with the upload process; how it is filled.

It is an anonymous file (memfd): its pages count as the container's memory, not against the size of /dev/shm.
A system without memfd has a temporary file.
Faulting in fresh pages costs many times what a copy costs. So a thread makes them resident before the first
save, and pins them with CUDA.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Collection, Sequence
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
"""Exists since Linux 5.14."""
SLICE: Final = 64 * 2**20
"""Bytes made resident per call."""
Copy = tuple[torch.Tensor, torch.Tensor]
"""Target and source."""
FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class StagingBuffer:
    """Staging buffer for the files of one layout.

    `fd`: the anonymous file.
    `freed`: bytes of the previous buffer, whose memory may not be returned yet.
    `ranks_here`: ranks of this pod that allocate as much at the same time.
    """

    def __init__(self, layout: Layout, *, pin: bool = False, freed: int = 0, ranks_here: int = 1) -> None:
        self.layout = layout
        self.size = max(layout.bytes, mmap.PAGESIZE)
        require_memory((self.size - freed) * ranks_here)
        self.fd = self._make_file()
        self.map = mmap.mmap(self.fd, self.size)
        self._bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self._pin = pin
        self._pinned = False
        self._ready = threading.Event()
        self._targets: dict[int, torch.Tensor] = {}
        threading.Thread(target=self._make_resident, name="spottrain-staging", daemon=True).start()

    def _make_file(self) -> int:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("spottrain-staging", os.MFD_CLOEXEC)
        else:
            fd, path = tempfile.mkstemp(prefix="spottrain-staging-")
            os.unlink(path)
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, self.size)
        return fd

    def fill(self, leaves: Sequence[Leaf], later: Collection[int] = ()) -> PendingCopy:
        """Copies the leaves to their places; the caller may change them once it returns.

        `later`: addresses of tensors that the caller leaves unchanged until the returned copy is finished.
        """
        self._ready.wait()
        devices: set[torch.device] = set()
        left: list[Copy] = []
        with torch.no_grad():
            for place in self.layout.places:
                source = local(leaves[place.number].tensor)
                target = self._target(place.number, place.offset, source)
                beside = source.data_ptr() in later and not source.is_inference()
                if beside and (self._pinned or not source.is_cuda):
                    left.append((target, source))
                    continue
                behind = source.is_cuda and self._pinned
                target.copy_(source, non_blocking=behind)
                if behind:
                    devices.add(source.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return PendingCopy(left)

    def has_nan(self, number: int) -> bool:
        """Returns whether this rank's copy of leaf `number` contains a NaN."""
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
        """Pins the memory; returns False if CUDA refuses, then copies are synchronous and slower."""
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self._bytes.data_ptr()
        code = cuda.cudaHostRegister(address, self.size, 0)
        if int(code) != 0:
            log.event("not-pinned", bytes=self.size, code=int(code))
            return False
        weakref.finalize(self, cuda.cudaHostUnregister, address)  # before the memory is unmapped
        return True

    def _touch(self, start: int, length: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)  # ctypes calls release the GIL
        address = ctypes.c_void_p(self._bytes.data_ptr() + start)
        populates = sys.platform == "linux"  # elsewhere this number has another meaning
        if not populates or libc.madvise(address, ctypes.c_size_t(length), MADV_POPULATE_WRITE) != 0:
            self._bytes[start : start + length].zero_()  # older kernel, or not Linux


class PendingCopy:
    """Copies that go on while the training does, of tensors that the next optimizer step changes.

    On a GPU a stream of its own makes them. On a CPU `finish` does, in a thread beside the training and in
    the training thread itself, one tensor at a time.
    """

    def __init__(self, copies: Sequence[Copy] = ()) -> None:
        self._copies = copies
        self._versions = [(source, source._version) for _, source in copies]
        self._left = deque((target, source) for target, source in copies if not source.is_cuda)
        self._events = _on_own_streams([copy for copy in copies if copy[1].is_cuda])
        self._turn = threading.Lock()
        self.done = not copies
        """Whether the tensors may be changed."""
        self.torn = False
        """Whether something has written to the tensors before they were copied."""

    def finish(self, *, wait: bool = True) -> None:
        """Copies what is left. Without `wait` a GPU's current streams wait for it, and not this thread."""
        for event, device in self._events:
            if wait:
                event.synchronize()
            else:
                torch.cuda.current_stream(device).wait_event(event)
        while not self.done:
            with self._turn:
                if self._left:
                    target, source = self._left.popleft()
                    with torch.no_grad():
                        target.copy_(source)
                elif not self.done:
                    self.torn = any(source._version != version for source, version in self._versions)
                    self.done = True

    @property
    def equal(self) -> bool:
        """Whether the tensors still are what was copied."""
        return all(torch.equal(target.to(source.device), source) for target, source in self._copies)


def _on_own_streams(copies: Sequence[Copy]) -> list[tuple[torch.cuda.Event, torch.device]]:
    """Begins the copies to pinned memory. Returns an event for the end of those of each GPU."""
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for target, source in copies:
        if source.device not in streams:
            streams[source.device] = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
            streams[source.device].wait_stream(torch.cuda.current_stream(source.device))
        with torch.no_grad(), torch.cuda.stream(streams[source.device]):
            target.copy_(source, non_blocking=True)
    return [(stream.record_event(), device) for device, stream in streams.items()]


def require_memory(needed: int, known: ContainerMemory | None = None) -> None:
    """Raises ConfigurationError if the container has less than `needed` bytes left; no limit, no check.

    `known`: the container's memory, by default read from the cgroup.
    """
    known = known or memory()
    if known is None or needed <= known.left:
        return
    raise ConfigurationError(
        f"a save needs {gib(needed)} of memory for a copy of the training state, but only "
        f"{gib(known.left)} are left of the container's limit of {gib(known.limit)}; raise "
        f"resources.limits.memory by {gib(needed - known.left)} or more. Nothing was overwritten",
        reason=Reason.OUT_OF_MEMORY,
    )
