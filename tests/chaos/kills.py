"""The kill matrix: a signal at every place of a run, to every target, once and twice.

    python -m tests.chaos.kills [--lanes 2] [--only WORD ...]

`once`: the first attempt is hit. `twice`: SIGTERM comes a second time 50 ms later; SIGKILL hits the second
attempt too, at the same place. Then nobody disturbs it, and it must end like the run that nobody hit. The
last line is JSON; exit code 1 where a case is not as it must be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import time
from typing import Final

from spottrain.contract import Env, ExitCode

from tests.chaos.scene import Blow, Cell, Scene
from tests.chaos.stage import Act, stage

STEP: Final = 10
HOLD: Final = 0.3
"""Seconds that a run stands still at the place, so that the signal meets it there."""
PLACES: Final = (
    "import",
    "compile",
    "micro-step",
    "evaluation",
    "loader",
    "upload",
    "before manifest",
    "before HEAD",
    "after HEAD",
    "pruning",
    "release",
    "done",
)
TARGETS: Final = {1: ("pod", "group"), 2: ("pod", "rank0", "rank1", "ranks", "group")}
STEPLESS: Final = ("import", "compile", "done")


def scenes() -> list[Scene]:
    return [
        scene(place, sign, target, ranks, twice)
        for ranks, place, sign, twice in itertools.product((1, 2), PLACES, ("TERM", "KILL"), (False, True))
        for target in TARGETS[ranks]
    ]


def scene(place: str, sign: str, target: str, ranks: int, twice: bool = False) -> Scene:
    first = blows(place, sign, target)
    if twice and sign == "TERM":
        first += (Blow(signal=sign, target=target, delay=0.05),)
    again = (blows(place, sign, target, 2 * STEP),) if twice and sign == "KILL" else ()
    how = f"SIG{sign} to {target} of {ranks}, {'twice' if twice else 'once'}"
    return Scene(
        name=f"{place}: {how}",
        cell=_cell(place, ranks),
        blows=(first, *again),
        keep=2,
        pause=0.004,
        # Short, so that a loader that gives nothing is waited for no longer than it stands still.
        env={Env.GRACE_SECONDS: "20"} if place == "loader" else {},
    )


def _cell(place: str, ranks: int) -> Cell:
    return Cell(
        precision="bf16",
        accumulation=4,
        compile=place == "compile",
        workers=2 if place == "loader" else 0,
        ranks=ranks,
        evaluation=place == "evaluation",
        steps=40,
    )


def blows(place: str, sign: str, target: str, step: int = STEP) -> tuple[Blow, ...]:
    at = "release" if place == "done" else place
    when = 0 if place in STEPLESS else step
    hold = 3.0 if place == "loader" else HOLD
    blow = Blow(signal=sign, target=target, at=at, step=when, hold=hold, delay=0.02)
    if place == "release":  # what is released early was told to stop before
        return (Blow(signal="TERM", at="step", step=step), blow)
    return (blow,)


def lawful(act: Act) -> set[int]:
    """Exit codes of the first attempt. While rank 0 releases HEAD, rank 1 may have ended already."""
    blow, place = act.scene.blows[0][-1], act.scene.name.split(":")[0]
    undisturbed = int(ExitCode.DONE if place == "done" else ExitCode.INTERRUPTED)
    if blow.signal == "TERM":
        return {undisturbed}
    of_a_rank = act.scene.cell.ranks > 1 and blow.target.startswith("rank")
    killed = 128 + signal.SIGKILL if of_a_rank else -signal.SIGKILL
    return {killed, undisturbed} if of_a_rank and place in ("release", "done") else {killed}


def problems(act: Act) -> list[str]:
    found = list(act.verdict.problems)
    if act.codes[0] not in lawful(act):
        found.append(f"the first attempt ended with {act.codes[0]}, not with one of {sorted(lawful(act))}")
    if act.verdict.saved < act.verdict.noticed:
        found.append("the newest step was not durable after a SIGTERM")
    if act.codes[-1] != ExitCode.DONE:
        found.append(f"the last attempt ended with {act.codes[-1]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lanes", type=int, default=2, help="scenes at the same time")
    parser.add_argument("--only", nargs="*", default=[], help="words that a case's name must contain")
    options = parser.parse_args()
    chosen = [each for each in scenes() if all(word in each.name for word in options.only)]
    began = time.monotonic()
    failing = []
    with stage(lanes=options.lanes, compiled=any(each.cell.compile for each in chosen)) as opened:
        for act in opened.play_all(chosen):
            found = problems(act)
            print(f"{act.scene.name}: {'; '.join(found) or 'as it must be'}, {list(act.codes)}", flush=True)
            if found:
                failing.append({"case": act.scene.name, "problems": found})
                print(act.logs, file=sys.stderr, flush=True)
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"cases": len(chosen), "failing": failing, "seconds": seconds}))
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
