"""The exactness matrix: every way to train, killed at random moments, against the run that nobody kills.

    python -m tests.chaos.matrix [--seed 1] [--lanes 2] [--only WORD ...]

Each cell is one uninterrupted run and one that is stopped by SIGTERM once or twice within its first 20 steps;
after the last stop there are at least 50 steps. Compared is all that the next step depends on, after every
step and in every checkpoint. The last line is JSON; exit code 1 where a cell differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from typing import Any, Final

from tests.chaos.scene import Blow, Cell, Scene
from tests.chaos.stage import Act, stage

STEPS: Final = 90
LAST_STOP: Final = 15
"""Step of the last SIGTERM, counted so that a slow answer to it leaves 50 more."""
LEAST: Final = 50
FACTORS: Final[dict[str, tuple[Any, ...]]] = {
    "precision": ("bf16", "fp16", "fp32"),
    "accumulation": (1, 4),
    "compile": (False, True),
    "workers": (0, 2, 8),
    "ranks": (1, 2),
}


def cells() -> list[Cell]:
    """All of them, in an order in which equal graphs are compiled one after another."""
    return [
        Cell(
            precision=precision,
            accumulation=accumulation,
            compile=compiled,
            workers=workers,
            ranks=ranks,
            steps=STEPS,
        )
        for compiled, ranks, precision, accumulation, workers in itertools.product(
            FACTORS["compile"],
            FACTORS["ranks"],
            FACTORS["precision"],
            FACTORS["accumulation"],
            FACTORS["workers"],
        )
    ]


PAIRWISE: Final = (
    ("fp32", 1, False, 8, 1),
    ("bf16", 4, False, 0, 1),
    ("fp32", 1, False, 2, 2),
    ("fp16", 4, False, 2, 1),
    ("fp16", 4, False, 8, 2),
    ("fp16", 1, False, 0, 2),
    ("bf16", 1, True, 8, 2),
    ("fp32", 4, True, 0, 1),
)
"""Eight cells, two of them compiled, with 54 of the 57 pairs of values: with two compiled cells a precision
and a number of workers are never compiled, and nine pairs of these two do not fit into eight cells."""


def pairwise() -> list[Cell]:
    return [
        Cell(precision=p, accumulation=a, compile=c, workers=w, ranks=r, steps=STEPS)
        for p, a, c, w, r in PAIRWISE
    ]


def scene(cell: Cell, seed: int) -> Scene:
    chance = random.Random(f"{seed}/{cell.name}")
    targets = ["pod", "group"] if cell.ranks == 1 else ["pod", "rank0", "rank1", "ranks", "group"]
    stops = sorted(chance.sample(range(2, LAST_STOP), chance.choice([1, 2])))
    blows = tuple(
        (
            Blow(
                signal="TERM",
                target=chance.choice(targets),
                at="step",
                step=step,
                rank=chance.randrange(cell.ranks),
                delay=chance.uniform(0, 0.01),
            ),
        )
        for step in stops
    )
    return Scene(name=cell.name, cell=cell, blows=blows, interval="4steps", keep=100, pause=0.004)


def problems(act: Act) -> list[str]:
    """Of one cell; empty where it is equal."""
    found = list(act.verdict.problems)
    if not found and act.verdict.compared < LEAST:
        found.append(f"only {act.verdict.compared} steps were compared after the first stop")
    if not found and act.verdict.lost:
        found.append(f"{act.verdict.lost} steps were done again after a SIGTERM")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=2, help="cells at the same time")
    parser.add_argument("--only", nargs="*", default=[], help="words that a cell's name must contain")
    options = parser.parse_args()
    chosen = [cell for cell in cells() if all(word in cell.name for word in options.only)]
    began = time.monotonic()
    differing = []
    with stage(lanes=options.lanes, compiled=any(cell.compile for cell in chosen)) as opened:
        for act in opened.play_all([scene(cell, options.seed) for cell in chosen]):
            found = problems(act)
            print(f"{act.scene.name}: {'; '.join(found) or 'equal'}, exits {list(act.codes)}", flush=True)
            if found:
                differing.append({"cell": act.scene.name, "problems": found})
                print(act.logs, file=sys.stderr, flush=True)
    figures = {
        "cells": len(chosen),
        "equal": len(chosen) - len(differing),
        "differing": differing,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(figures))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
