"""Overhead of our training loop over a bare hand-written one: `make bench-loop`.

The same model, data, batches and optimizer, a line each ten steps on both sides, and on ours with checkpoints
(whose interval is never due). Each measurement is a process of its own, the two sides alternate.

The last line is JSON: overhead_percent is the median over the pairs, with its 95 % interval (by bootstrap).
Exit code 1 when the median is above the goal of 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Final

GOAL_PERCENT: Final = 1.0
WIDTH: Final = 1024
BATCH: Final = 128
MICRO: Final = 64
WARM: Final = 20
"""Steps before the clock starts."""


def parts() -> tuple[Any, Any, Any, Any]:
    """(model, optimizer, samples, loss): a step of some 60 ms on one core; a GPU's are mostly longer."""
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = torch.nn.Sequential(*(m for layer in layers for m in (layer, torch.nn.ReLU())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(4096, WIDTH), torch.randn(4096, WIDTH)
    samples = torch.utils.data.TensorDataset(x, y)

    def loss(model: Any, batch: Any) -> Any:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    return model, optimizer, samples, loss


def bare(steps: int) -> float:
    """Seconds per step of what a person would write."""
    import torch

    model, optimizer, samples, loss_of = parts()

    def batches() -> Any:
        while True:
            yield from torch.utils.data.DataLoader(samples, batch_size=MICRO, shuffle=True)

    stream = batches()
    began = 0.0
    for step in range(1, steps + WARM + 1):
        total = torch.zeros(())
        for _ in range(BATCH // MICRO):
            loss = loss_of(model, next(stream)) / (BATCH // MICRO)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step={step} loss={total.item():.9g}", flush=True)
        if step == WARM:
            began = time.perf_counter()
    return (time.perf_counter() - began) / steps


def ours(steps: int) -> float:
    """The same by `spottrain.Trainer`, with checkpoints in a folder."""
    import spottrain

    model, optimizer, samples, loss = parts()
    marks: dict[int, float] = {}
    calls = 0

    def timed(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % (BATCH // MICRO) == 1:
            marks[calls // (BATCH // MICRO)] = time.perf_counter()
        return loss(model, batch)

    spottrain.Trainer(
        model=model,
        optimizer=optimizer,
        train_set=samples,
        loss=timed,
        max_steps=steps + WARM + 1,
        batch_size=BATCH,
        micro_batch_size=MICRO,
        clip_grad_norm=1.0,
        schedule="constant",
    ).fit()
    return (marks[steps + WARM] - marks[WARM]) / steps


def child(side: str, steps: int) -> None:
    print(json.dumps({"seconds": {"bare": bare, "ours": ours}[side](steps)}), flush=True)


def measured(side: str, steps: int) -> float:
    """In a process of its own; Python reads its name as the script's."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "SPOTTRAIN_CHECKPOINT_URI": f"{folder}/checkpoints",
            "SPOTTRAIN_CHECKPOINT_INTERVAL": "1h",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, __file__, "--child", side, "--steps", str(steps)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    return float(json.loads(answers[-1])["seconds"])


def interval(values: list[float], level: float = 0.95, draws: int = 10_000) -> tuple[float, float]:
    """Of the median, by bootstrap; the seed is fixed."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    cut = int((1 - level) / 2 * draws)
    return medians[cut], medians[-cut - 1]


def told(seconds: list[float]) -> dict[str, float]:
    median, least, greatest = statistics.median(seconds), min(seconds), max(seconds)
    return {"median": round(median, 6), "least": round(least, 6), "greatest": round(greatest, 6)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--child", choices=["bare", "ours"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.steps)
        return 0
    overheads: list[float] = []
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for pair in range(arguments.pairs):
        order = ["bare", "ours"] if pair % 2 else ["ours", "bare"]
        found = {side: measured(side, arguments.steps) for side in order}
        overheads.append(100 * (found["ours"] / found["bare"] - 1))
        for side, seconds in found.items():
            times[side].append(seconds)
        print(f"pair {pair}: {found} overhead {overheads[-1]:.2f} %", flush=True)
    low, high = interval(overheads)
    print(
        json.dumps(
            {
                "overhead_percent": round(statistics.median(overheads), 3),
                "interval_95": [round(low, 3), round(high, 3)],
                "overhead_us_per_step": round(
                    1e6 * statistics.median(o - b for o, b in zip(times["ours"], times["bare"], strict=True)),
                    1,
                ),
                "pairs": arguments.pairs,
                "steps": arguments.steps,
                "bare_step_s": told(times["bare"]),
                "ours_step_s": told(times["ours"]),
            }
        )
    )
    return 1 if statistics.median(overheads) > GOAL_PERCENT else 0


if __name__ == "__main__":
    sys.exit(main())
