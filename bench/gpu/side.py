"""One training of `bench.gpu`, in a process of its own: ours by Trainer, or the loop that a person writes.

The last line is JSON: tokens_per_second (of the steps after the first ones), peak_bytes, first_step_seconds,
micro_batch, and mfu where the device's peak is known.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
from spottrain.diagnostics.flops import counted, mfu
from spottrain.techniques.precision import choose

from bench.gpu import WARM
from bench.gpu.model import GPT, GPT_124M, SMALL, Shape, Windows, loss_of


class Steps:
    """When each step was done, by the device's clock: it is waited for, on both sides alike."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.times: list[float] = []

    def begin(self) -> None:
        """Where the first step begins: model, data and trials are made, and nothing is compiled."""
        self.times = [self._now()]

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def done(self) -> None:
        self.times.append(self._now())

    def seconds(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def adamw(model: torch.nn.Module, fused: bool) -> torch.optim.Optimizer:
    """The same on both sides."""
    return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


def bare(shape: Shape, steps: Steps, options: argparse.Namespace, device: torch.device) -> int:
    """As nanoGPT does it: bf16 autocast, torch.compile, fused AdamW, accumulation, clipping."""
    torch.manual_seed(1)
    model = GPT(shape).to(device)
    fused = device.type == "cuda"
    optimizer = adamw(model, fused)
    compiled: Any = torch.compile(model)
    torch.set_float32_matmul_precision("high")
    loader = torch.utils.data.DataLoader(
        Windows(shape, options.batch * 8), batch_size=options.micro, shuffle=True, pin_memory=fused
    )
    batches = iter(loader)
    times = options.batch // options.micro
    steps.begin()
    for _ in range(options.steps):
        for _ in range(times):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            batch = batch.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = loss_of(compiled, batch) / times
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps.done()
    return int(options.micro)


def ours(shape: Shape, steps: Steps, options: argparse.Namespace) -> int:
    """The same by Trainer; spec.training says what is tried."""
    import spottrain

    class Timed(spottrain.Trainer):
        def _assemble(self) -> None:
            super()._assemble()
            steps.begin()

        def _boundary(self) -> bool:
            steps.done()
            return super()._boundary()

    spottrain.seed(1)
    model = GPT(shape)
    trainer = Timed(
        model=model,
        optimizer=adamw(model, torch.cuda.is_available()),
        train_dataset=Windows(shape, options.batch * 8),
        loss_fn=loss_of,
        global_batch_size=options.batch,
        micro_batch_size=options.micro,
        clip_grad_norm=1.0,
        schedule="constant",
        max_steps=options.steps,
        log_every=1_000_000,
    )
    trainer.fit()
    return int(trainer.batches.plan.micro_batch_size)  # type: ignore[attr-defined]


def utilisation(
    shape: Shape, precision: str, seconds: float, batch: int, device: torch.device
) -> float | None:
    """MFU, by FLOPs counted on one sequence: these have one length, and a whole micro-batch might not fit."""
    model = GPT(shape).to(device)
    sample = Windows(shape, 1).rows.long().to(device)
    with counted() as work, choose(precision, device).autocast(device):
        loss_of(model, sample).backward()  # type: ignore[no-untyped-call]
    return mfu(work.times(batch), seconds, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("steps", "batch", "micro"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args()
    shape = SMALL if options.small else GPT_124M
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = Steps(device)
    micro = bare(shape, steps, options, device) if options.bare else ours(shape, steps, options)
    lasted = steps.seconds()
    seconds = statistics.median(lasted[WARM:])
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    answer = {
        "tokens_per_second": options.batch * shape.context / seconds,
        "first_step_seconds": lasted[0],
        "peak_bytes": peak,
        "micro_batch": micro,
    }
    sys.stdout.write(f"\n{json.dumps(answer)}\n")  # now: what follows may want memory that is not there
    sys.stdout.flush()
    precision = json.loads(os.environ.get("SPOTTRAIN_TRAINING", "{}")).get("precision", "bf16")
    answer["mfu"] = utilisation(shape, precision, seconds, options.batch, device)
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
