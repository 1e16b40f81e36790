"""Overhead of our training loop over a bare hand-written one.

The same model, data, batches and optimizer, a line each ten steps on both sides, and on ours with checkpoints
(whose interval is never due). A pair is two processes that train in turns of TURN steps, one while the other
waits: what the machine does to both within a second or two cancels out. Both, with all their threads, have
one and the same core, so that its neighbours are the same and nothing of ours hides elsewhere. Which side
begins alternates.

The last line is JSON: overhead_percent is the median over the pairs, with its 95 % interval (by bootstrap).
It counts the pauses of Python's collector, which ours makes shorter; between_pauses_percent, the ratio of the
median turns, does not.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from bench.spread import interval, spread

WIDTH: Final = 256
BATCH: Final = 2048
MICRO: Final = 1024
WARM: Final = 20
"""Steps before the clock starts."""
TURN: Final = 5


def parts() -> tuple[Any, Any, Any, Any]:
    """(model, optimizer, samples, loss): a step of some 60 ms on one core; a GPU's are mostly longer."""
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = torch.nn.Sequential(*(m for layer in layers for m in (layer, torch.nn.ReLU())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(16 * BATCH, WIDTH), torch.randn(16 * BATCH, WIDTH)
    samples = torch.utils.data.TensorDataset(x, y)

    def loss(model: Any, batch: Any) -> Any:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    return model, optimizer, samples, loss


class Turns:
    """One side's: told by a line on standard input, it takes TURN steps and answers with their seconds."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        self._steps = 0
        self._began = 0.0

    def step_begins(self) -> None:
        """Before each step. Waits where a turn is over."""
        if self._steps % TURN == 0:
            if self._steps:
                self._answers.write(f"{json.dumps((time.perf_counter() - self._began) / TURN)}\n")
                self._answers.flush()
            if not sys.stdin.readline():
                os._exit(0)
            self._began = time.perf_counter()
        self._steps += 1


def bare(turns: Turns) -> None:
    """What a person would write."""
    import torch

    model, optimizer, samples, loss_of = parts()

    def batches() -> Any:
        while True:
            yield from torch.utils.data.DataLoader(samples, batch_size=MICRO, shuffle=True)

    stream = batches()
    for step in itertools.count(1):
        turns.step_begins()
        total = torch.zeros(())
        for _ in range(BATCH // MICRO):
            loss = loss_of(model, next(stream)) / (BATCH // MICRO)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step={step} loss={total.item():.9g}", file=sys.stderr, flush=True)


def ours(turns: Turns) -> None:
    """The same by `spottrain.Trainer`, with checkpoints in a folder."""
    import spottrain

    model, optimizer, samples, loss = parts()
    calls = itertools.count()

    def in_turns(model: Any, batch: Any) -> Any:
        if next(calls) % (BATCH // MICRO) == 0:
            turns.step_begins()
        return loss(model, batch)

    spottrain.Trainer(
        model=model,
        optimizer=optimizer,
        train_dataset=samples,
        loss_fn=in_turns,
        max_steps=1_000_000,
        global_batch_size=BATCH,
        micro_batch_size=MICRO,
        clip_grad_norm=1.0,
        schedule="constant",
    ).fit()


@contextlib.contextmanager
def side(name: str) -> Iterator[Callable[[], float]]:
    """Takes a turn at each call; answers the seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "SPOTTRAIN_CHECKPOINT_URI": f"{folder}/checkpoints",
            "SPOTTRAIN_CHECKPOINT_INTERVAL": "1h",
            "OMP_NUM_THREADS": "1",
        }
        with subprocess.Popen(
            [sys.executable, "-m", "bench.loop", "--child", name],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdin and process.stdout
            to, answers = process.stdin, process.stdout

            def turn() -> float:
                to.write("go\n")
                to.flush()
                while not (line := answers.readline()).startswith("0."):
                    if not line:
                        raise RuntimeError(f"the side {name} ended: {process.wait()}")
                return float(line)

            try:
                yield turn
            finally:
                process.kill()


@dataclass(frozen=True)
class Pair:
    """Seconds of a step, turn by turn."""

    bare: list[float]
    ours: list[float]

    @property
    def percent(self) -> float:
        return 100 * (sum(self.ours) / sum(self.bare) - 1)


def pair(number: int, turns: int) -> Pair:
    names = ("bare", "ours") if number % 2 else ("ours", "bare")
    taken: dict[str, list[float]] = {name: [] for name in names}
    with side(names[0]) as one, side(names[1]) as other:
        for count in range(WARM // TURN + turns):
            for name, turn in zip(names, (one, other), strict=True):
                seconds = turn()
                if count >= WARM // TURN:
                    taken[name].append(seconds)
    return Pair(**taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--turns", type=int, default=60, help=f"of {TURN} steps, for each side of a pair")
    parser.add_argument("--child", choices=["bare", "ours"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if arguments.child:
        {"bare": bare, "ours": ours}[arguments.child](Turns())
    pairs: list[Pair] = []
    for number in range(arguments.pairs):
        pairs.append(pair(number, arguments.turns))
        print(f"pair {number}: {pairs[-1].percent:.2f} %, {spread(pairs[-1].bare)} bare", flush=True)
    overheads = [each.percent for each in pairs]
    bare_steps = [seconds for each in pairs for seconds in each.bare]
    our_steps = [seconds for each in pairs for seconds in each.ours]
    between_pauses = 100 * (statistics.median(our_steps) / statistics.median(bare_steps) - 1)

    figures: dict[str, Any] = {
        "overhead_percent": round(statistics.median(overheads), 3),
        "interval_95": interval(overheads),
        "between_pauses_percent": round(between_pauses, 3),
        "pairs": arguments.pairs,
        "steps": arguments.turns * TURN,
        "bare_step_s": spread(bare_steps),
        "ours_step_s": spread(our_steps),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
