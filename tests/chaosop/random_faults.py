"""Random adversity against the real operator: `python -m tests.chaosop.random_faults --runs 500 --seed 1`.

Each run is a scene of this folder: one job of one to four workers on a real etcd, API server and scheduler,
on nodes of kwok's whose kubelet is ours. A seeded script says how each of its attempts ends: with 0, 64, 75,
79, 1, 137, OOMKilled, by eviction, deletion, notice or silence. Half of the jobs are SpotFirst or Cheapest,
and move between spot and on-demand. Meanwhile a proxy before the API server drops, delays and repeats the
operator's watch events, answers it 409, 410, 429 and 500, loses requests and replies, and kills the process
between writes; and its clock jumps. In the end all is deleted around the finished job.

The last line is JSON. Exit code 1 where one of these is not 0: duplicate_ranks (scenes in which a pod's name
was POSTed twice with success, or an attempt claimed before another had released), stuck_jobs (or pods),
miscounted (failures, interruptions or phase against what was done), resurrected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "dev"))

from tests.chaosop import chance
from tests.chaosop.stage import Act, Stage, blows, stage


def summary(acts: list[Act], opened: Stage, seed: int, seconds: float) -> dict[str, object]:
    verdicts = [act.verdict for act in acts]
    lasted = sorted(act.seconds for act in acts)
    return {
        "runs": len(acts),
        "duplicate_ranks": sum(bool(v.duplicates) for v in verdicts),
        "stuck_jobs": sum(bool(v.stuck) for v in verdicts),
        "miscounted": sum(bool(v.miscounted) for v in verdicts),
        "resurrected": sum(bool(v.resurrected) for v in verdicts),
        "failed_scenes": sorted(act.scene.number for act in acts if act.verdict.problems),
        "attempts": sum(act.attempts for act in acts),
        "workers": dict(sorted(Counter(act.scene.workers for act in acts).items())),
        "capacity": dict(sorted(Counter(act.scene.policy.capacity for act in acts).items())),
        "moves_to_spot": sum(act.moves for act in acts),
        "ends": dict(blows(acts).most_common()),
        "faults": {str(fault): count for fault, count in opened.proxy.counts.most_common()},
        "operator_starts": opened.operator.starts,
        "operator_kills": opened.operator.kills,
        "operator_deaths": opened.operator.deaths,
        "operator_hangs": opened.operator.hangs,
        "clock_jumps": opened.operator.jumps,
        "median_scene_seconds": round(lasted[len(lasted) // 2], 1) if lasted else None,
        "seed": seed,
        "seconds": round(seconds, 1),
    }


def tell(act: Act, began: float, number: int, runs: int) -> None:
    for problem in act.verdict.problems:
        print(f"{act.scene.name}: {problem}", flush=True)
    if act.log is not None:
        print(f"{act.scene.name}: all that happened is in {act.log}", flush=True)
    if number % 25 == 0:
        print(f"{number} of {runs} runs, {time.monotonic() - began:.0f} s", flush=True)


async def play(options: argparse.Namespace) -> int:
    numbers = range(options.runs) if options.only is None else [options.only]
    scenes = [chance.scene(options.seed, number, workers=options.workers) for number in numbers]
    folder = Path(tempfile.mkdtemp(prefix="chaos-operator-"))
    acts: list[Act] = []
    async with stage(folder, seed=options.seed, longest_jump=options.longest_jump) as opened:
        opened.journal.loud = options.only is not None
        began = time.monotonic()
        async for act in opened.play_all(scenes, options.lanes):
            acts.append(act)
            tell(act, began, len(acts), len(scenes))
        figures = summary(acts, opened, options.seed, time.monotonic() - began)
    if options.only is not None or any(act.verdict.problems for act in acts):
        print(f"the operator's log: {opened.operator.log}", flush=True)
    print(json.dumps(figures))
    return 1 if any(act.verdict.problems for act in acts) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=30, help="runs at the same time")
    parser.add_argument("--workers", type=int, default=4, help="of a job, at most")
    parser.add_argument("--longest-jump", type=float, default=600, help="of the operator's clock, in seconds")
    parser.add_argument(
        "--only", type=int, help="play this one of the runs alone, with the same seed, and say all"
    )
    return asyncio.run(play(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
