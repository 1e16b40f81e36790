"""Time and memory of each technique on a CPU, with the GPT of examples/; and what loaders and the verdict do.

    --part techniques       each technique beside plain training
    --part data             loader workers, where reading a sample takes 40 ms
    --part verdicts         trainings that are slow for one known reason, and what the diagnosis says of them

Each technique is a process of its own (two, for two ranks) that trains the same GPT with
`spottrain.Trainer`, in rounds, so that what the machine does to one it does to all; the first steps (which
compile, and open files) are not timed. Memory is the most that was resident, less what was before the model
was made. A CPU's figures say nothing about a GPU.

The last line is JSON: by technique the seconds of a step (median over rounds of the median step) and MiB, and
both as ratios to the technique's `base`; for microBatchSize auto the size that was found, and what the trial
took: seconds to the first step, less those of plain. Of verdicts the share of right ones.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PARTS: Final = ("techniques", "data", "verdicts")
BATCH: Final = 16
PLAIN: Final = "plain"
TWO: Final = "2 ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    training: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    base: str = PLAIN
    warm: int = 4
    """Steps that are not timed."""
    most: int = 1000
    """Steps that are timed at most."""
    sample_ms: float = 0.0
    """How long the reading of a sample waits, as a request to an object store."""


def every(number: int) -> dict[str, Any]:
    return {"activationCheckpointing": {"policy": "every", "every": number}}


ADAMW: Final = {"optimizer": {"name": "adamw", "learningRate": 3e-4}}
TECHNIQUES: Final[dict[str, Technique]] = {
    PLAIN: Technique(),
    "bf16": Technique(training={"precision": "bf16"}),
    "fp16": Technique(training={"precision": "fp16"}, warm=1, most=2),  # a CPU takes seconds for a step of it
    "accumulation 4": Technique(training={"microBatchSize": BATCH // 4}),
    "microBatchSize auto": Technique(training={"microBatchSize": "auto"}),
    "activation checkpointing, every 3rd": Technique(training=every(3)),
    "activation checkpointing, every 2nd": Technique(training=every(2)),
    "activation checkpointing, all": Technique(training={"activationCheckpointing": {"policy": "all"}}),
    "compile": Technique(training={"compile": True}),
    "fused AdamW": Technique(training=ADAMW),
    "sgd": Technique(training={"optimizer": {"name": "sgd", "learningRate": 0.1}}),
    "adafactor": Technique(training={"optimizer": {"name": "adafactor", "learningRate": 0.01}}),
    "average of the weights": Technique(training={"emaDecay": 0.999}),
    "clipping": Technique(training={"clipGradNorm": 1.0}),
    "2 loader workers": Technique(training={"data": {"numWorkers": 2}}),
    TWO: Technique(ranks=2),
    # bf16, compile, every 2nd, accumulation, fused AdamW, average, clipping, workers
    "all that go together": Technique(
        training={
            "precision": "bf16",
            "compile": True,
            "microBatchSize": BATCH // 4,
            "emaDecay": 0.999,
            "clipGradNorm": 1.0,
            "data": {"numWorkers": 2},
            **every(2),
            **ADAMW,
        }
    ),
}
# Few steps would be timed on the batches that the workers have made ahead, and not on their rate.
SLOW: Final = "samples of 40 ms, no workers"
DATA: Final[dict[str, Technique]] = {
    SLOW: Technique(training={"data": {"numWorkers": 0}}, base=SLOW, sample_ms=40.0),
    "samples of 40 ms, 2 workers": Technique(training={"data": {"numWorkers": 2}}, base=SLOW, sample_ms=40.0),
    "samples of 40 ms, numWorkers auto": Technique(
        training={"data": {"numWorkers": "auto"}}, base=SLOW, sample_ms=40.0
    ),
}
LEFT_OUT: Final = {
    "tf32": "on a CPU it is fp32",
    "pinMemory, compileMode reduce-overhead and max-autotune": "for a GPU",
    "earlyStopping, warm-up, learningRateScaling": "they change what is trained, not what a step costs",
}


class Delayed:
    """A map-style data set each of whose samples takes so long to read."""

    def __init__(self, samples: Any, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.samples[index]


def child(steps: int, warm: int, sample_ms: float) -> None:
    """Trains, and answers with a line of JSON."""
    import spottrain
    import torch

    gpt = example()
    spottrain.seed(1)
    samples = gpt["Windows"](torch.randint(0, gpt["BYTES"], (2**20,), dtype=torch.uint8))
    if sample_ms:
        samples = Delayed(samples, sample_ms / 1000)
    before = resident("VmRSS")
    model = gpt["GPT"]()
    times: list[float] = []

    class Timed(spottrain.Trainer):
        def _evaluate(self) -> None:
            times.append(time.perf_counter())
            super()._evaluate()

    trainer = Timed(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True),
        train_dataset=samples,
        loss_fn=gpt["loss"],
        global_batch_size=BATCH,
        max_steps=steps + warm,
        schedule="constant",
        log_every=1000,
    )
    began = time.perf_counter()
    trainer.fit()
    lasted = [after - begun for begun, after in itertools.pairwise(times)][warm:]
    batches: Any = trainer.batches  # ours, of a map-style set
    answer = {
        "seconds": statistics.median(lasted),
        "bytes": resident("VmHWM") - before,
        "begin": times[0] - began,
        "micro": batches.plan.micro_batch_size,
    }
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ["ANSWER"]).write_text(json.dumps(answer))


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


def measured(technique: Technique, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        env = os.environ | {
            "SPOTTRAIN_CHECKPOINT_URI": f"{folder}/checkpoints",
            "SPOTTRAIN_CHECKPOINT_INTERVAL": "1h",
            "SPOTTRAIN_TRAINING": json.dumps(technique.training),
            "OMP_NUM_THREADS": "1",
            "ANSWER": str(answer),
        }
        numbers = {
            "steps": min(steps, technique.most),
            "warm": technique.warm,
            "sample-ms": technique.sample_ms,
        }
        script = [__file__, "--child", *(f"--{name}={number}" for name, number in numbers.items())]
        launcher = ["-m", "spottrain", "run", "--nproc", str(technique.ranks)] if technique.ranks > 1 else []
        done = subprocess.run([sys.executable, *launcher, *script], env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{technique}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found: dict[str, float] = json.loads(answer.read_text())
    return found


# --- the verdict --------------------------------------------------------------------------------------
def verdicts(seeds: int) -> dict[str, Any]:
    """Plays each of the slow trainings with several sizes."""
    from spottrain.diagnostics.bottleneck import Name

    from tests.support.slowtrainings import play

    right: dict[str, list[bool]] = {name: [] for name in Name}
    for seed, name in itertools.product(range(1, seeds + 1), Name):
        verdict, facts = play(name, seed)
        right[name].append(verdict is not None and verdict.name is name)
        shares = {phase: round(share, 3) for phase, share in facts.shares.shares.items()}
        said = verdict and verdict.name
        print(f"seed {seed}, {name}: the verdict is {said} of {shares}", flush=True)
    played = [each for found in right.values() for each in found]
    return {
        "share_right": round(sum(played) / len(played), 3),
        "verdicts": len(played),
        "by_name": {name: f"{sum(found)}/{len(found)}" for name, found in right.items()},
    }


# --- all of it ----------------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default=PARTS[0])
    parser.add_argument("--rounds", type=int, help="of each technique (2; of loader workers 3)")
    parser.add_argument("--steps", type=int, help="that are timed (8; of loader workers 40)")
    parser.add_argument("--seeds", type=int, default=5, help="sizes of each slow training")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--sample-ms", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.steps, options.warm, options.sample_ms)
        return
    about: dict[str, Any] = {"device": "cpu", "processor": platform.machine(), "threads": 1}
    if options.part == "verdicts":
        figures = verdicts(options.seeds)
    elif options.part == "data":
        figures = about | {"techniques": compared(DATA, options.rounds or 3, options.steps or 40)}
    else:
        for name, why in LEFT_OUT.items():
            print(f"{name}: left out, {why}")
        found = compared(TECHNIQUES, options.rounds or 2, options.steps or 8)
        figures = about | {"techniques": found, "left_out": LEFT_OUT}
    print(json.dumps(figures))


def compared(cases: dict[str, Technique], times: int, steps: int) -> dict[str, dict[str, Any]]:
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(times):
        for name, technique in cases.items():
            rounds[name].append(found := measured(technique, steps))
            line = f"round {number + 1} {name}: {found['seconds']:.4f} s, {found['bytes'] / 2**20:.0f} MiB"
            print(line, flush=True)
    return {name: figures(name, cases, rounds) for name in cases}


def figures(
    name: str, cases: dict[str, Technique], rounds: dict[str, list[dict[str, float]]]
) -> dict[str, Any]:
    def middle(of: str, key: str) -> float:
        return statistics.median(each[key] for each in rounds[of])

    base, seconds = cases[name].base, [each["seconds"] for each in rounds[name]]
    found: dict[str, Any] = {
        "seconds": round(middle(name, "seconds"), 4),
        "seconds_least_most": [round(min(seconds), 4), round(max(seconds), 4)],
        "mib": round(middle(name, "bytes") / 2**20),
        "base": base,
        "time_over_base": round(middle(name, "seconds") / middle(base, "seconds"), 3),
        "memory_over_base": round(middle(name, "bytes") / middle(base, "bytes"), 3),
    }
    if cases[name].training.get("microBatchSize") == "auto":
        trial = middle(name, "begin") - middle(PLAIN, "begin")
        found |= {"micro_batch_size": middle(name, "micro"), "trial_seconds": round(trial, 2)}
    return found


if __name__ == "__main__":
    main()
