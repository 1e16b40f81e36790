"""A scene from a seed and a number, the same each time. Pure; called by random_faults.py."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

from tests.chaosop.scene import POLITE, Act, Blow, Farewell, Kill, Policy, Scene
from tests.chaosop.truth import CHARGES, Charge, Deed, truth

LONGEST: Final = 5
"""Attempts that are hit; the one after them is left to get done."""
WEIGHTS: Final = {blow: 2.0 if CHARGES[blow] is Charge.INTERRUPTION else 1.5 for blow in Blow} | {
    Blow.NOTICE: 8.0,
    Blow.VANISHED: 4.0,
    Blow.SILENT: 4.0,
    Blow.DELETED: 4.0,
    Blow.CRASHED: 3.0,
    Blow.OUT_OF_MEMORY: 3.0,
    Blow.DONE: 3.0,
    Blow.DONE_BARE: 1.0,
    Blow.REFUSED: 0.7,
    Blow.REFUSED_BARE: 0.7,
    Blow.LOST_AT_DONE: 1.0,
}
WEBHOOK_FAILS: Final = 0.15
"""Share of the scenes."""
CAPACITY: Final = {"Spot": 2.0, "SpotFirst": 1.0, "Cheapest": 1.0}
LONG: Final = {"SpotFirst": (85.0, 100.0), "Cheapest": (30.0, 60.0)}
"""Seconds that one attempt of a job may train: enough for its return to spot."""
DEADLINE: Final = (1500.0, 3000.0)
"""Seconds: on both sides of where a job goes on demand, for the operator's clock jumps by ten minutes."""
FAREWELLS: Final = {
    Farewell.SAVES: 10.0,
    Farewell.LOSES: 2.0,
    Farewell.LEAVES: 1.5,
    Farewell.CRASHES: 1.5,
    Farewell.DEAF: 1.5,
    Farewell.FINISHES: 1.0,
}


def scene(seed: int, number: int, *, workers: int = 1) -> Scene:
    """`workers`: at most; 1 to that many."""
    random = Random(f"{seed}/{number}")
    policy = Policy(
        failures=random.choice((0, 1, 2, 3)),
        interruptions=random.choice((100, 100, 100, 1, 2, 3)),
        backoff=random.choice((0, 1)),
    )
    made = Scene(
        seed=seed,
        number=number,
        workers=random.randint(1, workers),
        policy=policy,
        grace=random.choice((3, 6, 12)),
    )
    acts, kills, edited = _acts(random, made), _kills(random), random.random() < 0.5
    down = random.uniform(3, 20) if random.random() < WEBHOOK_FAILS else 0.0
    made = replace(made, acts=acts, kills=kills, edited=edited, webhook_down=down)
    return _with_capacity(Random(f"{seed}/{number}/capacity"), made)


def _with_capacity(random: Random, scene: Scene) -> Scene:
    """Where the job runs on demand for a while, one of its later attempts trains for long."""
    capacity = random.choices(tuple(CAPACITY), tuple(CAPACITY.values()))[0]
    deadline = random.uniform(*DEADLINE) if capacity == "Cheapest" else 0.0
    scene = replace(scene, policy=replace(scene.policy, capacity=capacity, deadline=deadline))
    if not scene.policy.mixes or len(scene.acts) == 1:
        return scene
    acts, long = list(scene.acts), random.randrange(1, len(scene.acts))
    acts[long] = replace(acts[long], after=random.uniform(*LONG[capacity]))
    return replace(scene, acts=tuple(acts))


def _acts(random: Random, scene: Scene) -> tuple[Act, ...]:
    """Until one of them ends the job."""
    acts: list[Act] = []
    while not _ends(acts, scene.policy):
        acts.append(_act(random, scene, first=not acts) if len(acts) < LONGEST else Act(blow=Blow.DONE))
        if acts[-1].blow is Blow.LOST_AT_DONE:  # whoever comes next finds that all is done
            acts.append(Act(blow=Blow.DONE))
    return tuple(acts)


def _ends(acts: list[Act], policy: Policy) -> bool:
    """Whether it is over after these acts. A trainer that may finish when it is told to stop may also not."""
    deeds = (Deed(attempt=n, blow=a.blow) for n, a in enumerate(acts, 1))
    return bool(truth(deeds, policy).phase)


def _act(random: Random, scene: Scene, *, first: bool) -> Act:
    blow = random.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
    farewell = random.choices(tuple(FAREWELLS), tuple(FAREWELLS.values()))[0]
    if blow not in POLITE or (blow is Blow.NOTICE and scene.policy.interruptions < 100):
        # A notice may use up the budget before the trainer says done, or after it: either would be right.
        farewell = Farewell.SAVES if farewell is Farewell.FINISHES else farewell
    saving = random.choice((0.0, random.uniform(0, 2), random.uniform(1, 5), random.uniform(2, 8)))
    if farewell is Farewell.FINISHES and scene.workers > 1:
        saving = min(
            saving, 1.0
        )  # else the rank that was told is killed before rank 0 has said that all is done
    return Act(
        blow=blow,
        after=random.choice((0.0, random.uniform(0, 3))),
        rank=random.randrange(scene.workers),
        farewell=farewell,
        saving=saving,
        warning=random.choice((random.uniform(1, 5), random.uniform(5, 15))),
        told=random.random() < 0.5,
        evicts=random.random() < 0.5,
        cleaning=random.uniform(0, 8),
        peers_hang=random.random() < 0.5,
    )


def _kills(random: Random) -> tuple[Kill, ...]:
    """About one: a scene has some 10 to 40 writes of the operator's."""
    writes = sorted(random.sample(range(1, 41), random.choice((0, 1, 1, 2))))
    return tuple(Kill(write=write, before=random.random() < 0.5) for write in writes)
