"""What only a GPU can tell, in 14 minutes (all but `techniques` in seven); --small tries it on any machine.

Each group is a process, and each figure is printed as it comes, so that a machine that is taken away early
leaves what was measured. The order is that of the goals:

    loop         the 124M GPT by Trainer beside a loop written by hand: tokens/s, MFU, the device's ceilings
    restart      from the start of the process to the first step: cold, with the stored compile cache, by hand
                 with torch's own; from SIGTERM to the exit; final weights against an undisturbed run's
    saves        the copy of a save beside one into pinned memory; what a training loses by each save: ours,
                 torch.save, torch's distributed checkpoint
    verdict      trainings that are slow for one known reason, what is said of them, and what NVML saw
    nccl         one rank: start, all_reduce, DDP, FSDP2
    loops        a loop of one's own, Hugging Face's Trainer and Lightning, stopped and resumed: final weights
                 against an undisturbed run's (with transformers, accelerate and lightning)
    techniques   precision, micro-batch auto, activation checkpointing, compile and its modes

But for `loops` it needs torch and the folders runtime/ and bench/ alone, so it can be taken to a machine
without the rest: `PYTHONPATH=runtime:. python -m bench.gpu | tee out`, and here
`python -m bench.record gpu --read out`.
What there was no time for is in `not_reached`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from typing import Any, Final

from bench.record import machine

ORDER: Final = ("loop", "restart", "saves", "verdict", "nccl", "loops", "techniques")
LEAST: Final = 20.0
"""Seconds without which no group is begun: it takes as long to import torch and to make a model."""
LATE: Final = 5.0


def merged(into: dict[str, Any], figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        if isinstance(value, dict):
            merged(into.setdefault(name, {}), value)
        elif isinstance(value, list):
            into.setdefault(name, []).extend(value)
        else:
            into[name] = value


def play(group: str, seconds: float, options: argparse.Namespace, into: dict[str, Any], scratch: str) -> None:
    """Runs a group, prints its figures as they come, and ends it when its time is over."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor"}
    words = [group, f"{seconds:.0f}", *(["tiny"] if options.small else [])]
    command = [sys.executable, "-m", "bench.gpu.groups", *words]
    log, last = os.path.join(scratch, f"{group}.log"), deque[str](maxlen=20)
    with (
        open(log, "w") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as process,
    ):
        over = threading.Timer(seconds + LATE, os.killpg, (process.pid, 9))
        over.start()
        assert process.stdout
        for line in process.stdout:
            last.append(line)
            if line.startswith("{"):
                print(f"{group}: {line}", end="", flush=True)
                merged(into, json.loads(line))
        code = process.wait()
        over.cancel()
    if code:
        with open(log) as errors:
            print(f"{group} ended with {code}:\n{''.join(last)}{errors.read()[-3000:]}", flush=True)
        merged(into, {"not_reached": [f"{group} (ended with {code})"]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ORDER, default=ORDER, help="these groups")
    parser.add_argument("--minutes", type=float, default=14.0, help="in which all must be done")
    parser.add_argument(
        "--small", action="store_true", help="a tiny model, to try this program without a GPU"
    )
    options = parser.parse_args()
    began = time.monotonic()
    figures: dict[str, Any] = {"machine": machine(), "model": "tiny" if options.small else "GPT 124M"}
    with tempfile.TemporaryDirectory() as scratch:
        for group in options.only:
            left = 60 * options.minutes - (time.monotonic() - began)
            if left < LEAST:
                merged(figures, {"not_reached": [group]})
                continue
            start = time.monotonic()
            play(group, left, options, figures, scratch)
            merged(figures, {"group_s": {group: round(time.monotonic() - start)}})
    print(json.dumps(figures | {"seconds": round(time.monotonic() - began)}))
    return 1 if figures.get("exact_differing") or figures.get("loops_differing") else 0


if __name__ == "__main__":
    sys.exit(main())
