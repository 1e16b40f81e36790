"""A handful of scenes of `random_faults.py`, with faults and kills, to know that its parts work.

Scenes by the hundred are for that program; these are written out, each for what it does to its job.
Of no level of `make test`, for which kwok is not built: `python -m pytest tests/chaosop` plays them.
"""

from __future__ import annotations

from pathlib import Path

from tests.chaosop.scene import Act, Blow, Farewell, Kill, Policy, Scene
from tests.chaosop.stage import stage

SEED = 5
DONE = Act(blow=Blow.DONE, after=0.5)
SCENES = (
    Scene(
        seed=SEED,
        number=0,
        acts=(Act(blow=Blow.NOTICE, saving=2.0), Act(blow=Blow.OUT_OF_MEMORY), DONE),
        kills=(Kill(write=6, before=False),),
        edited=True,
    ),
    Scene(seed=SEED, number=1, acts=(Act(blow=Blow.SILENT), Act(blow=Blow.LOST_AT_DONE), DONE)),
    Scene(
        seed=SEED,
        number=2,
        policy=Policy(failures=1, backoff=0),
        acts=(
            Act(blow=Blow.CRASHED),
            Act(blow=Blow.EVICTED, farewell=Farewell.LEAVES),
            Act(blow=Blow.KILLED),
        ),
        kills=(Kill(write=9, before=True),),
    ),
    Scene(
        seed=SEED,
        number=3,
        workers=3,
        policy=Policy(interruptions=2),
        acts=(Act(blow=Blow.VANISHED, rank=1), Act(blow=Blow.DELETED, rank=2), Act(blow=Blow.REJECTED)),
    ),
)


async def test_jobs_under_random_adversity_are_counted_right_and_end_once(tmp_path: Path) -> None:
    async with stage(tmp_path, seed=SEED, longest_jump=0) as opened:
        acts = [act async for act in opened.play_all(SCENES, lanes=len(SCENES))]
        assert opened.operator.kills and opened.proxy.counts.total(), "nothing was in the operator's way"
    assert [problem for act in acts for problem in act.verdict.problems] == []
    assert {act.scene.number: [deed.blow for deed in act.deeds] for act in acts} == {
        scene.number: [act.blow for act in scene.acts] for scene in SCENES
    }, "the world has done what the scenes say"
