"""What a loader worker really holds of its own."""

from __future__ import annotations

import gc
import os

from spottrain.core.container import ContainerMemory
from spottrain.data import Batches, Plan
from spottrain.diagnostics.loader_memory import Look, private_bytes, warning
from spottrain.lifecycle.worker_signals import worker_pids

MIB = 2**20


class Leak:
    """Keeps what it has read, as a reader's cache without an end."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        self.kept.append(os.urandom(2 * MIB))
        return index


def test_a_reader_that_leaks_is_told_before_the_limit_is_reached() -> None:
    """By what Linux says of a real worker, after each step; the limit is as of a small container."""
    gc.freeze()  # else a collection in the worker copies this process, which other tests have made large
    batches = Batches(Leak(), Plan(size=200, global_batch_size=4, micro_batch_size=4), num_workers=1)
    stream, before, start, text = iter(batches), Look(), 0, ""
    steps = 0
    while not text and steps < 40:
        steps += 1
        step, parts = next(stream)
        list(parts)
        batches.done(step)
        found = {pid: private_bytes(pid) or 0 for pid in worker_pids()}
        start = start or sum(found.values())
        memory = ContainerMemory(limit=start + 150 * MIB, used=sum(found.values()))
        now = Look(private=found, memory=memory)
        text, before = warning(before, now, seconds=1), now
    stream.close()
    gc.unfreeze()
    assert text.startswith("1 loader worker(s) hold ") and memory.left > 0 and steps > 2, (steps, memory)
    assert not worker_pids(), "those that have ended are not asked"
