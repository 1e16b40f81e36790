"""What each lever costs and saves in time and memory on a CPU, on the GPT of examples/: `make bench-levers`.

    python bench/levers.py --rounds 3 --steps 12

Each lever is a process of its own that trains the same GPT with `spottrain.Trainer`, in rounds, so that
what the machine does to one it does to all; the first steps (which compile, and open files) are not timed.
Memory is the most that was resident, less what was before the model was made. A CPU's figures say nothing
about a GPU: nothing in the README rests on them.

The last line is JSON: seconds of a step (median over rounds of the median step) and MiB by lever, and both
as ratios to `plain`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
WARM: Final = 4
"""Steps that are not timed."""
BATCH: Final = 16
LEVERS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "accumulation 4": {"microBatchSize": BATCH // 4},
    "activation checkpointing, every 2nd": {"activationCheckpointing": {"policy": "every", "every": 2}},
    "activation checkpointing, all": {"activationCheckpointing": {"policy": "all"}},
    "compile": {"compile": True},
    "fused AdamW": {"optimizer": {"name": "adamw", "learningRate": 3e-4}},
    "sgd": {"optimizer": {"name": "sgd", "learningRate": 0.1}},
    "adafactor": {"optimizer": {"name": "adafactor", "learningRate": 0.01}},
    "average of the weights": {"emaDecay": 0.999},
    "2 loader workers": {"data": {"workers": 2}},
    "together: bf16, compile, fused AdamW, average": {
        "precision": "bf16",
        "compile": True,
        "optimizer": {"name": "adamw", "learningRate": 3e-4},
        "emaDecay": 0.999,
    },
}


def child(steps: int) -> None:
    """Trains, and answers with a line of JSON."""
    import spottrain
    import torch

    gpt = example()
    spottrain.seed(1)
    samples = gpt["Windows"](torch.randint(0, gpt["BYTES"], (2**20,), dtype=torch.uint8))
    before = resident("VmRSS")
    model = gpt["GPT"]()
    times: list[float] = []

    class Timed(spottrain.Trainer):
        def _judge(self) -> None:
            times.append(time.perf_counter())
            super()._judge()

    Timed(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True),
        train_set=samples,
        loss=gpt["loss"],
        batch_size=BATCH,
        max_steps=steps + WARM,
        schedule="constant",
        log_every=1000,
    ).fit()
    lasted = [after - begun for begun, after in itertools.pairwise(times)][WARM:]
    answer = {"seconds": statistics.median(lasted), "bytes": resident("VmHWM") - before}
    sys.__stdout__.write(f"\n{json.dumps(answer)}\n")  # type: ignore[union-attr]


def example() -> dict[str, Any]:
    """Model, data and loss of the example, without the training that it goes on with."""
    path = ROOT / "examples" / "gpt_stdlib.py"
    text, found, _ = path.read_text().partition("spottrain.seed(1)\n")
    assert found, f"{path} no longer has the line that parts its definitions from its run"
    names: dict[str, Any] = {}
    exec(compile(text, path, "exec"), names)
    return names


def resident(name: str) -> int:
    """Bytes: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def measured(training: dict[str, Any], steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "SPOTTRAIN_CHECKPOINT_URI": f"{folder}/checkpoints",
            "SPOTTRAIN_CHECKPOINT_INTERVAL": "1h",
            "SPOTTRAIN_TRAINING": json.dumps(training),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--child", "--steps", str(steps)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{training}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]  # its last words come after
    found: dict[str, float] = json.loads(answers[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.steps)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in LEVERS}
    for number in range(options.rounds):
        for name, training in LEVERS.items():
            rounds[name].append(found := measured(training, options.steps))
            print(f"round {number + 1} {name}: {found['seconds']:.4f} s, {found['bytes'] / 2**20:.0f} MiB")
    plain = {key: statistics.median(each[key] for each in rounds["plain"]) for key in ("seconds", "bytes")}
    levers = {}
    for name, each in rounds.items():
        seconds, size = ([one[key] for one in each] for key in ("seconds", "bytes"))
        levers[name] = {
            "seconds": round(statistics.median(seconds), 4),
            "seconds_least_most": [round(min(seconds), 4), round(max(seconds), 4)],
            "mib": round(statistics.median(size) / 2**20),
            "time_over_plain": round(statistics.median(seconds) / plain["seconds"], 3),
            "memory_over_plain": round(statistics.median(size) / plain["bytes"], 3),
        }
    print(json.dumps({"device": "cpu", "processor": platform.machine(), "threads": 1, "levers": levers}))


if __name__ == "__main__":
    main()
