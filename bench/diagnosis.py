"""Whether the diagnosis is right, and what it costs: `make bench-diagnosis`.

    python bench/diagnosis.py --seeds 5 --turns 1500

Verdicts: each fixture of tests/support/slowtrainings.py, a real small training that is slow for one known
reason, is played with several seeds (other sizes, other pauses), and judged by what was measured of it.

Overhead: one small GPT in one process on one core trains in turns of TURN steps, with a StepTimer and without
it; which of a pair begins alternates. overhead_percent is the median over the pairs of turns, with its 95 %
interval (by bootstrap). marks_us is what the marks of one step take by themselves, phases empty, and
marks_percent that of a step: the same overhead without the noise of the machine.

The last line is JSON. Exit code 1 where fewer than 95 % of the verdicts are right, or overhead is over 2 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from spottrain.core.device import settle_memory
from spottrain.diagnostics.bottleneck import Name
from spottrain.diagnostics.step_timer import StepTimer

from tests.support.slowtrainings import play

RIGHT: Final = 0.95
OVERHEAD: Final = 2.0
"""Percent."""
TURN: Final = 4
WARM: Final = 5
WIDTH, CONTEXT, VOCABULARY, MICRO, ACCUMULATED = 64, 32, 256, 4, 2
"""Of the GPT: a step of some 8 ms on one core: a GPU's are mostly longer."""


# --- verdicts ---------------------------------------------------------------------------------------
def played(name: Name, seed: int) -> dict[str, Any]:
    began = time.perf_counter()
    verdict, facts = play(name, seed)
    return {
        "fixture": name,
        "seed": seed,
        "right": verdict is not None and verdict.name is name,
        "verdict": verdict and verdict.name,
        "gain": verdict and round(verdict.gain, 2),
        "shares": {phase: round(share, 3) for phase, share in facts.shares.shares.items()},
        "step_s": round(facts.shares.step_seconds, 4),
        "seconds": round(time.perf_counter() - began, 1),
    }


def verdicts(seeds: int) -> dict[str, Any]:
    by_name: dict[str, list[bool]] = {name: [] for name in Name}
    for seed in range(1, seeds + 1):
        for name in Name:
            told = played(name, seed)
            by_name[name].append(told["right"])
            print(json.dumps(told), flush=True)
    return {
        "verdicts_right": sum(map(sum, by_name.values())),
        "verdicts": sum(map(len, by_name.values())),
        "by_name": {name: f"{sum(right)}/{len(right)}" for name, right in by_name.items()},
    }


# --- overhead ---------------------------------------------------------------------------------------
class GPT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        self.mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.tokens(tokens), mask=self.mask, is_causal=True)
        found: torch.Tensor = self.head(hidden)
        return found


class Loop:
    """One model, trained by the same statements with a StepTimer and without."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.timer = StepTimer(torch.device("cpu"))

    def batch(self) -> torch.Tensor:
        return torch.randint(VOCABULARY, (MICRO, CONTEXT + 1))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        output = self.model(batch[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(output, batch[:, 1:].flatten()) / ACCUMULATED

    def bare(self) -> None:
        for _ in range(ACCUMULATED):
            batch = self.batch()
            loss = self.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def marked(self) -> None:
        timer = self.timer
        for _ in range(ACCUMULATED):
            with timer.data():
                batch = self.batch()
            with timer.h2d():
                pass
            with timer.compute():
                loss = self.loss(batch)
            with timer.backward():
                loss.backward()  # type: ignore[no-untyped-call]
        with timer.compute():
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        with timer.checkpoint():
            pass
        timer.step_done()

    def marks(self) -> None:
        """As often as in `marked`, with nothing in them."""
        timer = self.timer
        for _ in range(ACCUMULATED):
            for phase in (timer.data, timer.h2d, timer.compute, timer.backward):
                with phase():
                    pass
        with timer.compute():
            pass
        with timer.checkpoint():
            pass
        timer.step_done()


def seconds_of(step: Callable[[], None], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        step()
    return (time.perf_counter() - began) / times


def overhead(turns: int) -> dict[str, Any]:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    loop = Loop()
    seconds_of(loop.bare, WARM)
    settle_memory()  # as Trainer does
    loop.timer.restart()
    ratios, bare = [], []
    for number in range(turns):
        order = (loop.bare, loop.marked) if number % 2 else (loop.marked, loop.bare)
        taken = {step.__name__: seconds_of(step, TURN) for step in order}
        ratios.append(100 * (taken["marked"] / taken["bare"] - 1))
        bare.append(taken["bare"])
        loop.timer.restart()
    gc.unfreeze()  # else the interpreter's end finds leaks
    low, high = interval(ratios)
    marks, step = min(seconds_of(loop.marks, 200) for _ in range(20)), min(bare)
    return {
        "overhead_percent": round(statistics.median(ratios), 3),
        "interval_95": [round(low, 3), round(high, 3)],
        "marks_us": round(1e6 * marks, 2),
        "marks_percent": round(100 * marks / step, 3),
        "turns": turns,
        "bare_step_s": {"median": round(statistics.median(bare), 5), "least": round(step, 5)},
    }


def interval(values: list[float], level: float = 0.95, draws: int = 5000) -> tuple[float, float]:
    """Of the median, by bootstrap; the seed is fixed."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    cut = int((1 - level) / 2 * draws)
    return medians[cut], medians[-cut - 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="for each of the verdicts")
    parser.add_argument("--turns", type=int, default=1500, help=f"pairs of turns of {TURN} steps")
    arguments = parser.parse_args()
    figures = verdicts(arguments.seeds) | overhead(arguments.turns)  # first those, for the other pins a core
    print(json.dumps(figures))
    right = figures["verdicts_right"] >= RIGHT * figures["verdicts"]
    return 0 if right and figures["overhead_percent"] <= OVERHEAD else 1


if __name__ == "__main__":
    sys.exit(main())
