"""The 124M GPT trained by Trainer and by the loop that a person writes, with the same data and optimizer."""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import spottrain
import torch
from spottrain.core.preemption import Preemption
from spottrain.core.progress import ProgressFacts
from spottrain.diagnostics.flops import counted
from spottrain.lifecycle.session import Session
from spottrain.techniques.precision import choose

from bench.gpu.model import GPT, GPT_124M, SMALL, Shape, Windows, loss_of

CUDA: Final = torch.cuda.is_available()
DEVICE: Final = torch.device("cuda" if CUDA else "cpu")
WARM: Final = 8
"""Steps that are not timed: they compile, and fill caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What is trained: sequences of an optimizer step and of a forward pass, and steps that are timed."""

    shape: Shape
    steps: int = 30
    batch: int = 64
    micro: int = 16


FULL: Final = Size(shape=GPT_124M)
TINY: Final = Size(shape=SMALL, steps=4, batch=8, micro=4)
"""To try this program without a GPU."""


def now() -> float:
    """Returns the time by the host's clock once the device has done what it was given."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(slots=True)
class Steps:
    """When each step was done, by the device, which is waited for on both sides alike."""

    times: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """Marks that model, data and trials are made, and nothing is compiled."""
        self.times = [now()]

    def done(self) -> None:
        self.times.append(now())

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times)]

    @property
    def timed(self) -> list[float]:
        return self.seconds[WARM:]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """One training."""

    steps: Steps
    micro: int
    peak: int
    facts: ProgressFacts = field(default_factory=ProgressFacts)
    """What the progress board said at the end; of ours alone."""

    def figures(self, size: Size, precision: str = "bf16") -> dict[str, Any]:
        seconds = statistics.median(self.steps.timed)
        share = utilisation(size, precision, seconds)
        return {
            "tokens_per_second": round(size.batch * size.shape.context / seconds),
            "step_s": round(seconds, 5),
            "first_step_s": round(self.steps.seconds[0], 2),
            "peak_mib": round(self.peak / 2**20),
            "micro_batch": self.micro,
            **({} if share is None else {"mfu": round(share, 3)}),
        }


@contextmanager
def alone() -> Iterator[Callable[[], int]]:
    """Yields what tells the peak of memory in bytes, without what the trainings before have left."""
    torch.compiler.reset()
    gc.unfreeze()  # Trainer freezes what is there when training begins
    gc.collect()
    if not CUDA:
        yield lambda: 0
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield lambda: torch.cuda.max_memory_allocated() - before


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=CUDA)


Between = Callable[[int, torch.nn.Module, torch.optim.Optimizer], None]
"""Called after each step with the number of steps done."""


def by_hand(
    size: Size, *, compiled: bool = True, between: Between | None = None, steps: Steps | None = None
) -> Ran:
    """As nanoGPT does it: bf16 autocast, torch.compile, fused AdamW, accumulation, clipping."""
    steps = steps or Steps()
    with alone() as peak:
        torch.manual_seed(1)
        torch.set_float32_matmul_precision("high")
        model = GPT(size.shape).to(DEVICE)
        optimizer = adamw(model)
        called: Any = torch.compile(model) if compiled else model
        data = Windows(size.shape, size.batch * 8)
        loader = torch.utils.data.DataLoader(data, batch_size=size.micro, shuffle=True, pin_memory=CUDA)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        times = size.batch // size.micro
        steps.begin()
        for number in range(1, size.steps + WARM + 1):
            for _ in range(times):
                batch = next(batches).to(DEVICE, non_blocking=True)
                with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                    loss = loss_of(called, batch) / times
                loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if between is not None:
                between(number, model, optimizer)
            steps.done()
        return Ran(steps=steps, micro=size.micro, peak=peak())


def ours(size: Size, training: dict[str, Any], *, interval: str = "1h", **other: Any) -> Ran:
    """The same by Trainer; `training` is spec.training. `other`: arguments in place of the GPT's."""
    steps = Steps()
    with alone() as peak, tempfile.TemporaryDirectory() as folder:
        environment = {
            "SPOTTRAIN_CHECKPOINT_URI": f"{folder}/checkpoints",
            "SPOTTRAIN_CHECKPOINT_INTERVAL": interval,
            "SPOTTRAIN_TRAINING": json.dumps(training),
        }
        session = Session(environment, Preemption(grace=30.0))
        session.prepare("bench.gpu")
        trainer = timed_trainer(steps.begin, steps.done, size, session=session, **other)
        trainer.fit()
        found = trainer.batches.plan.micro_batch_size  # type: ignore[union-attr]
        return Ran(steps=steps, micro=int(found), peak=peak(), facts=session.board.facts)


def timed_trainer(
    begin: Callable[[], None], done: Callable[[], None], size: Size, **other: Any
) -> spottrain.Trainer:
    """Returns a Trainer that calls `begin` before its first step, and `done` after each."""

    class Timed(spottrain.Trainer):
        def _assemble(self) -> None:
            super()._assemble()
            begin()

        def _boundary(self) -> bool:
            over = super()._boundary()
            done()
            return over

    spottrain.seed(1)
    arguments: dict[str, Any] = {
        "train_dataset": Windows(size.shape, size.batch * 8),
        "loss_fn": loss_of,
        "global_batch_size": size.batch,
        "micro_batch_size": size.micro,
        "clip_grad_norm": 1.0,
        "schedule": "constant",
        "max_steps": size.steps + WARM,
        "log_every": 1_000_000,
    } | other
    model = arguments.pop("model", None) or GPT(size.shape)
    return Timed(model=model, optimizer=adamw(model.to(DEVICE)), **arguments)


def utilisation(size: Size, precision: str, seconds: float) -> float | None:
    """Returns MFU, by FLOPs counted on one sequence: these have one length."""
    model = GPT(size.shape).to(DEVICE)
    sample = Windows(size.shape, 1).rows.long().to(DEVICE)
    with counted(DEVICE) as work, choose(precision, DEVICE).autocast(DEVICE):
        loss_of(model, sample).backward()  # type: ignore[no-untyped-call]
    return work.times(size.batch).mfu(seconds)


def longer(size: Size, steps: int) -> Size:
    return replace(size, steps=steps)
