"""Random kills of real training runs: `python -m tests.chaos.random_kills --runs 1000 --seed 1 --lanes 2`.

Each run is a scene of tests/chaos: a tiny training of 60 steps, alone or by two ranks, on a folder or on the
real S3 server behind a proxy that delays, drops, repeats and breaks requests; killed at a random moment up to
three times, at times with a successor started while it still runs; then left to end. It is judged by what
lies in the store and by the digests of every step against a run that nobody disturbed.

The last line is JSON. Exit code 1 where a HEAD was unreadable or named what is not whole, where a digest
differs, where a stale commit succeeded, or where an attempt hung or ended otherwise than it must.

`noticed`: attempts that were told to stop by SIGTERM alone, had steps to lose and a notice of 30 s, ten times
what a save takes. `saved_of_noticed`: share of them whose newest step was durable in the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter

from tests.chaos import chance
from tests.chaos.runs import Verdict
from tests.chaos.stage import Act, stage


def summary(acts: list[Act], seed: int, seconds: float) -> dict[str, object]:
    verdicts = [act.verdict for act in acts]
    noticed = sum(v.noticed for v in verdicts)
    done = sum(v.done for v in verdicts)
    return {
        "runs": len(acts),
        "unreadable_heads": sum(bool(v.unreadable) for v in verdicts),
        "digest_mismatches": sum(bool(v.mismatches) for v in verdicts),
        "noticed": noticed,
        "saved_of_noticed": sum(v.saved for v in verdicts) / noticed if noticed else None,
        "races": sum(act.scene.race for act in acts),
        "contended_races": sum(v.contended for v in verdicts),
        "ambiguous_replies": sum(v.ambiguous for v in verdicts),
        "stale_commits": sum(len(v.stale) for v in verdicts),
        "wrong_ends": sum(bool(v.ends) for v in verdicts),
        "attempts": sum(len(act.codes) for act in acts),
        "exit_codes": dict(Counter(str(code) for act in acts for code in act.codes)),
        "on_s3": sum(act.scene.on_s3 for act in acts),
        "steps": done,
        "lost_steps_percent": round(100 * sum(v.lost for v in verdicts) / done, 2) if done else None,
        "seed": seed,
        "seconds": round(seconds, 1),
    }


def wrong(verdicts: list[Verdict]) -> bool:
    return any(v.problems for v in verdicts)


def tell(act: Act, began: float, number: int, runs: int) -> None:
    for problem in act.verdict.problems:
        print(f"{act.scene.name}: {problem}", flush=True)
    if act.verdict.saved < act.verdict.noticed:
        print(f"{act.scene.name}: its newest step was not durable at the end of the notice", flush=True)
    if act.logs:
        print(f"{act.scene}\n{act.logs}", file=sys.stderr, flush=True)
    if number % 25 == 0:
        print(f"{number} of {runs} runs, {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=2, help="runs at the same time")
    parser.add_argument("--only", type=int, help="play this one of the runs alone, with the same seed")
    parser.add_argument("--no-s3", action="store_true", help="folders alone: no S3 server is needed")
    options = parser.parse_args()
    numbers = range(options.runs) if options.only is None else [options.only]
    scenes = [chance.scene(options.seed, number, s3=not options.no_s3) for number in numbers]
    began = time.monotonic()
    acts: list[Act] = []
    with stage(lanes=options.lanes, s3=any(scene.on_s3 for scene in scenes)) as opened:
        for number, act in enumerate(opened.play_all(scenes), 1):
            acts.append(act)
            tell(act, began, number, len(scenes))
    figures = summary(acts, options.seed, time.monotonic() - began)
    print(json.dumps(figures))
    return 1 if wrong([act.verdict for act in acts]) else 0


if __name__ == "__main__":
    sys.exit(main())
