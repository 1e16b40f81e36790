"""Scenes drawn at random, each from a seed of its own, for random_kills.py."""

from __future__ import annotations

import random
from typing import Final

from tests.chaos.scene import Blow, Cell, Scene

STEPS: Final = 60
CELLS: Final = (
    (Cell(precision="fp32", accumulation=4), 3),
    (Cell(precision="bf16", accumulation=1), 3),
    (Cell(precision="fp16", accumulation=4), 3),
    (Cell(precision="bf16", accumulation=4, evaluation=True), 3),
    (Cell(precision="fp16", accumulation=1, workers=2), 1),
    (Cell(precision="fp32", accumulation=1, ranks=2), 2),
    (Cell(precision="bf16", accumulation=4, ranks=2), 2),
    (Cell(precision="fp16", accumulation=4, ranks=2, evaluation=True), 1),
    (Cell(precision="bf16", accumulation=1, ranks=2, workers=2), 1),
    (Cell(own_loop=True), 4),
    (Cell(own_loop=True, workers=2), 1),
)
"""With weights."""
OF_COMMIT: Final = ("before manifest", "before HEAD", "after HEAD", "pruning", "release", "after release")
PLACES: Final = ("micro-step", "upload", *OF_COMMIT)
RACES: Final = 0.2
OUTAGES: Final = 0.15
"""Share of the scenes on S3 in which the store cannot be reached while an attempt starts."""
ON_S3: Final = 0.25
OUTAGE_SECONDS: Final = (3.0, 10.0, 40.0)
FRESH: Final = 0.1
"""Share of the scenes in which real processes are hit in their first two seconds."""
FIRST_SECONDS: Final = 2.0
STARTUP_SECONDS: Final = 1.5
"""In which a blow by the clock falls: about what a start takes, and a part of the training."""


def scene(seed: int, number: int, *, s3: bool = True) -> Scene:
    chance = random.Random(f"{seed}/{number}")
    if chance.random() < FRESH:
        return fresh(chance, number)
    cell = chance.choices([cell for cell, _ in CELLS], [weight for _, weight in CELLS])[0]
    race = chance.random() < RACES
    on_s3 = s3 and chance.random() < ON_S3
    dark = on_s3 and not race and chance.random() < OUTAGES
    count = chance.choices([1, 2, 3], [65, 30, 5])[0]
    steps = sorted(chance.sample(range(1, STEPS), count))
    attempts = [blows(chance, cell, step) for step in steps]
    if race:
        attempts[0] = ghost(chance, cell, steps[0])
    return Scene(
        name=f"run {number}",
        cell=cell,
        blows=tuple(attempts),
        on_s3=on_s3,
        faults=f"{seed}/{number}" if on_s3 else "",
        keep=chance.choice([2, 3]),
        interval=chance.choice(["3steps", "5steps", "8steps"]),
        pause=chance.choice([0.002, 0.004]),
        outage=chance.choice(OUTAGE_SECONDS) if dark else 0.0,
        outage_at=chance.randint(1, count + 1),
    )


def fresh(chance: random.Random, number: int) -> Scene:
    """Told to stop as soon as it starts, or soon after, once or twice in a row."""
    cell = Cell(own_loop=chance.random() < 0.5)
    hits = tuple(
        (Blow(signal="TERM", at="start", delay=chance.uniform(0, FIRST_SECONDS)),)
        for _ in range(chance.choice([1, 2]))
    )
    return Scene(name=f"run {number}", cell=cell, blows=hits, fresh=True)


def places(cell: Cell) -> list[str]:
    if cell.own_loop:  # a place that most resumes went wrong at is drawn more often
        return [*PLACES, "evaluation", *["epoch's last step"] * 4]
    return [*PLACES, "evaluation"] if cell.evaluation else list(PLACES)


def targets(cell: Cell, sign: str) -> list[str]:
    all_ = ["pod", "group"] if cell.ranks == 1 else ["pod", "rank0", "rank1", "ranks", "group"]
    return [*all_, "node"] if sign == "KILL" else all_


def blows(chance: random.Random, cell: Cell, step: int) -> tuple[Blow, ...]:
    """Of one attempt: a signal, and at times a second one."""
    sign = chance.choices(["TERM", "KILL"], [6, 4])[0]
    first = _first(chance, cell, sign, step)
    if sign == "KILL" or chance.random() < 0.75:
        return (first,)
    again = chance.choice(["TERM", "TERM", "KILL"])
    target = chance.choice(targets(cell, again))
    return (first, Blow(signal=again, target=target, delay=chance.uniform(0, 0.2)))


def _first(chance: random.Random, cell: Cell, sign: str, step: int) -> Blow:
    target = chance.choice(targets(cell, sign))
    how = chance.choices(["clock", "step", "place"], [25, 45, 30])[0]
    if how == "clock":
        return Blow(signal=sign, target=target, at="start", delay=chance.uniform(0, STARTUP_SECONDS))
    rank = chance.randrange(cell.ranks)
    if how == "step":
        return Blow(
            signal=sign, target=target, at="step", step=step, rank=rank, delay=chance.uniform(0, 0.01)
        )
    at = chance.choice(places(cell))
    return Blow(
        signal=sign,
        target=target,
        at=at,
        step=step,
        rank=rank if at == "micro-step" else 0,
        hold=0.1,
        delay=chance.uniform(0, 0.1),
    )


def ghost(chance: random.Random, cell: Cell, step: int) -> tuple[Blow, ...]:
    """A successor is started while this attempt runs, or stands still for a while and then wakes up."""
    start = Blow(signal="NEXT", at="step", step=step, delay=chance.uniform(0, 0.01))
    if chance.random() < 0.4:  # the node was cut off, or its clock stood still
        frozen = (
            Blow(signal="STOP", target="node", at="step", step=step, delay=chance.uniform(0, 0.02)),
            Blow(signal="NEXT"),
            Blow(signal="CONT", target="node", delay=chance.uniform(0.1, 1.0)),
        )
        return frozen
    if chance.random() < 0.5:
        return (start,)
    sign = chance.choice(["TERM", "KILL"])
    return (
        start,
        Blow(signal=sign, target=chance.choice(targets(cell, sign)), delay=chance.uniform(0, 0.6)),
    )
