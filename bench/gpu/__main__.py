"""Every lever on a GPU, and the 124M GPT beside nanoGPT's loop: `python -m bench.gpu`; --small runs anywhere.

Each figure is a process of its own, in rounds, so that what the machine does to one it does to all:

    precision      bf16, fp16, fp32, tf32: tokens/s, peak memory
    compile        off, default, reduce-overhead, max-autotune: tokens/s after the compilation, its seconds
    activations    none, every 2nd, all: tokens/s, peak memory
    batch          the micro-batch that `auto` finds, and its tokens/s against the given one
    nanogpt        ours against a hand-written loop with the same model, data, optimizer and precision (goal:
                   >= 1.0 x), and MFU by counted FLOPs

The last line is JSON, with the device's name. bench/checkpoint.py and bench/restart.py are run beside it,
with their own last lines. No figure of this file was taken yet: bench/RESULTS.md says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any, Final

from bench.gpu import WARM
from bench.gpu.model import GPT_124M, SMALL, Shape

CASES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "precision": {name: {"precision": name} for name in ("fp32", "tf32", "fp16", "bf16")},
    "compile": {
        "off": {"precision": "bf16"},
        "default": {"precision": "bf16", "compile": True},
        "reduce-overhead": {"precision": "bf16", "compile": True, "compileMode": "reduce-overhead"},
        "max-autotune": {"precision": "bf16", "compile": True, "compileMode": "max-autotune"},
    },
    "activations": {
        "none": {"precision": "bf16"},
        "every 2nd": {"precision": "bf16", "activationCheckpointing": {"policy": "every", "every": 2}},
        "all": {"precision": "bf16", "activationCheckpointing": {"policy": "all"}},
    },
    "batch": {
        "given": {"precision": "bf16"},
        "auto": {"precision": "bf16", "microBatchSize": "auto"},
    },
    "nanogpt": {"ours": {"precision": "bf16", "compile": True}, "hand-written": {"bare": True}},
}


def measured(training: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """One process. Raises SystemExit with what it said where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        bare = training.get("bare", False)
        env = os.environ | {
            "SPOTTRAIN_CHECKPOINT_URI": f"{folder}/checkpoints",
            "SPOTTRAIN_CHECKPOINT_INTERVAL": "1h",
            "SPOTTRAIN_TRAINING": "{}" if bare else json.dumps(training),
            "OMP_NUM_THREADS": "1",  # torchrun's default; two on a busy machine were three times as slow
        }
        words = ["--steps", str(options.steps + WARM), "--batch", str(options.batch)]
        words += ["--micro", str(options.micro)] + ["--small"] * options.small + ["--bare"] * bare
        command = [sys.executable, "-m", "bench.gpu.side", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]  # its last words come after
    if not answers:
        raise SystemExit(f"{training}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    print(json.dumps({"training": training, **json.loads(answers[-1])}), flush=True)  # whatever comes later
    if done.returncode:
        print(f"its MFU was not counted: {done.stderr[-300:]}", flush=True)
    found: dict[str, float] = json.loads(answers[-1])
    return found


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    speeds = [each["tokens_per_second"] for each in rounds]
    return {
        "tokens_per_second": round(statistics.median(speeds), 1),
        "least_most": [round(min(speeds), 1), round(max(speeds), 1)],
        "peak_mib": round(max(each["peak_bytes"] for each in rounds) / 2**20),
        "first_step_seconds": round(statistics.median(each["first_step_seconds"] for each in rounds), 2),
        "micro_batch": int(rounds[-1]["micro_batch"]),
        "mfu": rounds[-1].get("mfu"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="one of the groups")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="sequences of one optimizer step")
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try this file without a GPU")
    options = parser.parse_args()
    shape: Shape = SMALL if options.small else GPT_124M
    groups = {name: cases for name, cases in CASES.items() if options.only in (None, name)}
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        g: {c: [] for c in cases} for g, cases in groups.items()
    }
    for number in range(options.rounds):
        for group, cases in groups.items():
            for case, training in cases.items():
                found[group][case].append(measured(training, options))
                speed = found[group][case][-1]["tokens_per_second"]
                print(f"round {number + 1} {group} {case}: {speed:.0f} tokens/s", flush=True)
    figures: dict[str, Any] = {
        g: {c: summary(each) for c, each in cases.items()} for g, cases in found.items()
    }
    if "nanogpt" in figures:
        pairs = zip(found["nanogpt"]["ours"], found["nanogpt"]["hand-written"], strict=True)
        ratios = [ours["tokens_per_second"] / theirs["tokens_per_second"] for ours, theirs in pairs]
        figures["ours_over_hand_written"] = round(statistics.median(ratios), 3)
        figures["ratios"] = [round(ratio, 3) for ratio in ratios]
    print(json.dumps({"device": device_name(), "model": shape.name, "context": shape.context, **figures}))


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
