"""Gradients of one model by several real ranks: as DDP averages them, and by our timed hook."""

from __future__ import annotations

import multiprocessing
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from spottrain.diagnostics.step_timer import Seconds, StepTimer

CPU = torch.device("cpu")
WIDTH = 100
PATIENCE = 60.0


def gradients(size: int) -> tuple[torch.Tensor, torch.Tensor, Seconds]:
    """Of rank 0: without the hook, with it, and what its split says. Raises EOFError where a rank failed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=_act, args=(rank, size, folder, theirs), daemon=True)
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        theirs.close()
        found = mine.recv() if mine.poll(PATIENCE) else None
        for rank in ranks:
            rank.join(10)
            rank.kill()
    assert found is not None, f"no gradients within {PATIENCE} s"
    plain, hooked, seconds = found
    return torch.tensor(plain), torch.tensor(hooked), seconds


def _act(rank: int, size: int, folder: str, end: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    split = StepTimer(CPU)
    found = [_trained(rank, None), _trained(rank, split)]
    if rank == 0:
        end.send((*found, split.whole().seconds))
    dist.barrier()
    dist.destroy_process_group()


def _trained(rank: int, split: StepTimer | None) -> list[float]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    replica = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    if split is not None:
        replica.register_comm_hook(None, split.timed())
    torch.manual_seed(rank)
    for _ in range(2):  # after the first step DDP sorts its buckets again
        model.zero_grad()
        loss = replica(torch.randn(8, WIDTH)).square().mean()
        if split is None:
            loss.backward()
            continue
        with split.backward():
            loss.backward()
        split.step_done()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).tolist()
