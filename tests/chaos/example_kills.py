"""Kills the examples at random moments, and starts them again.

    python -m tests.chaos.example_kills --points 20 --seed 1 --kinds gan ddp

Each kind runs once undisturbed, by the command of its manifest. Then, for each point, it is started, killed
at a random moment of that time, start and end included, and started again. Half of the points are SIGTERM, as
the kubelet sends it, to the first process of one pod, with 30 s until the deadline; the others SIGKILL, to
all processes of one pod. The second attempt is left to end.

A kind is added in tests/support/examples.py: its docstring says how.

The last line is JSON. By kind: `lines` changed in the script; `steps` of the undisturbed run; `points`; of
these `before_first_step`, `after_end`, and by signal `in_training`, with the steps that the next attempt had
to do again (`lost`); `equal`: points after which the final weights are those of the undisturbed run;
`failures`. Exit code 1 if there is one: an attempt that ended otherwise than it must, steps lost after a
SIGTERM, or other final weights.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from spottrain.contract import ExitCode

from tests.support.examples import KINDS, Attempt, Kind, Played, play
from tests.support.zygote import Zygote

MARGIN: Final = 0.05
"""Share of the undisturbed run's time after its end in which a point may lie."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    number: int
    signum: signal.Signals
    seconds: float
    """From the start of the attempt."""
    pod: int


@dataclass(kw_only=True, slots=True)
class Verdict:
    point: Point
    reached: int = 0
    ended: bool = False
    """Whether the attempt was done before the signal."""
    lost: int = 0
    equal: bool = False
    problems: list[str] = field(default_factory=list)


def points(kind: Kind, count: int, seed: int, seconds: float) -> list[Point]:
    """Random points; the moments are spread evenly, one in each part of the run's time."""
    chance = random.Random(f"{seed}-{kind.name}")
    moments = [(number + chance.random()) / count * seconds * (1 + MARGIN) for number in range(count)]
    signals = [signal.SIGTERM, signal.SIGKILL] * ((count + 1) // 2)
    return [
        Point(number=number, signum=signals[number], seconds=moment, pod=chance.randrange(kind.workers))
        for number, moment in enumerate(moments)
    ]


def strike(zygote: Zygote, kind: Kind, folder: Path, point: Point, whole: Played) -> Verdict:
    verdict = Verdict(point=point)
    began = time.monotonic()
    first = Attempt(zygote, kind, folder, 1)
    while first.running and time.monotonic() - began < point.seconds:
        time.sleep(0.002)
    verdict.ended = not first.running
    verdict.reached = kind.reached(first.first)
    first.kill(point.signum, point.pod)
    codes = first.wait()
    if all(code == ExitCode.DONE for code in codes):
        verdict.ended = True
    elif not lawful(point, codes):
        verdict.problems.append(f"the first attempt ended with {codes}")
    second = Attempt(zygote, kind, folder, 2)
    again = second.wait()
    if again != [ExitCode.DONE] * kind.workers:
        verdict.problems.append(f"the second attempt ended with {again}")
        print(f"{first.log}\n{second.log}", file=sys.stderr, flush=True)
        return verdict
    if not verdict.ended:
        verdict.lost = max(0, verdict.reached - kind.resumed(second.first))
    done = first if verdict.ended else second
    verdict.equal = kind.digest(done.first, folder) == whole.digest
    if not verdict.equal and kind.exact:
        verdict.problems.append("the final weights differ from those of the undisturbed run")
    if verdict.lost and point.signum is signal.SIGTERM:
        verdict.problems.append(f"{verdict.lost} steps were lost after a SIGTERM")
    return verdict


def lawful(point: Point, codes: list[int]) -> bool:
    """Whether a stopped attempt ended as it must; the other pods of a killed one may have lost steps."""
    if point.signum is signal.SIGTERM:
        return set(codes) == {ExitCode.INTERRUPTED}
    others = codes[: point.pod] + codes[point.pod + 1 :]
    may = {ExitCode.INTERRUPTED, ExitCode.INTERRUPTED_LOST, ExitCode.DONE}
    return codes[point.pod] == -signal.SIGKILL and may.issuperset(others)


def figures(kind: Kind, verdicts: list[Verdict], whole: Played) -> dict[str, object]:
    def lost(signum: signal.Signals) -> dict[str, float]:
        steps = [v.lost for v in verdicts if v.point.signum is signum and v.reached and not v.ended]
        name = signum.name.lower()
        return {
            f"{name}_in_training": len(steps),
            f"{name}_lost_max": max(steps, default=0),
            f"{name}_lost_mean": round(statistics.fmean(steps), 1) if steps else 0.0,
        }

    return {
        "lines": kind.lines,
        "steps": whole.steps,
        "points": len(verdicts),
        "before_first_step": sum(not v.reached and not v.ended for v in verdicts),
        "after_end": sum(v.ended for v in verdicts),
        **lost(signal.SIGTERM),
        **lost(signal.SIGKILL),
        "equal": sum(v.equal for v in verdicts),
        "failures": sum(bool(v.problems) for v in verdicts),
        "seconds_undisturbed": round(whole.seconds, 1),
    }


def strike_all(kind: Kind, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    zygote = Zygote()
    try:
        zygote.preload(*kind.preload)
        whole = play(zygote, kind, folder / "whole")
        chosen = points(kind, options.points, options.seed, whole.seconds)
        if options.only is not None:
            chosen = [chosen[options.only]]
        verdicts = []
        for point in chosen:
            verdict = strike(zygote, kind, folder / str(point.number), point, whole)
            verdicts.append(verdict)
            print(f"{kind.name} {_told(verdict)}", flush=True)
    finally:
        zygote.close()
    return figures(kind, verdicts, whole)


def _told(verdict: Verdict) -> str:
    point = verdict.point
    what = "; ".join(verdict.problems) or "as it must be"
    return (
        f"{point.number}: {point.signum.name} to pod {point.pod} after {point.seconds:.2f} s, at step "
        f"{verdict.reached}: {verdict.lost} lost, {what}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--points", type=int, default=20, help="kills of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="play this one of the points alone")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    options = parser.parse_args()
    began = time.monotonic()
    kinds = {}
    for name in options.kinds:
        with tempfile.TemporaryDirectory(prefix="spottrain-examples-") as folder:
            kinds[name] = strike_all(KINDS[name], Path(folder), options)
    failures = sum(int(str(each["failures"])) for each in kinds.values())
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"kinds": kinds, "failures": failures, "seed": options.seed, "seconds": seconds}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
