"""Measures time and memory of each technique on a CPU, with the GPT of examples/: `make bench-techniques`.

    python bench/techniques.py --rounds 2 --steps 8
    python bench/techniques.py --flops              # that part alone, half a minute
    python bench/techniques.py --data --steps 40    # loader workers, where reading a sample takes time

Each technique is a process of its own (two, where ranks exchange gradients) that trains the same GPT with
`spottrain.Trainer`, in rounds, so that what the machine does to one it does to all; the first steps (which
compile, and open files) are not timed. Memory is the most that was resident, less what was before the model
was made. A CPU's figures say nothing about a GPU: nothing in the README rests on them.

What a CPU cannot show is printed as left out, with the reason. The arithmetic that recomputing activations
adds is counted (FlopCounterMode, no time is measured), on the same GPT and on transformers' GPT-2 with random
weights, each with its own vocabulary and one of 256.

The last line is JSON: by technique the seconds of a step (median over rounds of the median step) and MiB, and
both as ratios to the technique's `base` (plain; for gradient compression, two ranks without it); for
microBatchSize auto the size that was found, and what the trial took: seconds to the first step, less those of
plain.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
BATCH: Final = 16
PLAIN: Final = "plain"
TWO: Final = "2 ranks"
GPT2_WORDS: Final = 50257


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
    "2 ranks, gradients in bf16": Technique(training={"gradientCompression": "bf16"}, ranks=2, base=TWO),
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
    "gradientCompression powerSGD": "it begins at step 1000, long after a run of this file has ended",
    "earlyStopping, warm-up, learningRateScaling": "they change what is trained, not what a step costs",
}
POLICIES: Final = {"every 3rd": "every-3", "every 2nd": "every-2", "all": "all"}


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
        script = [
            __file__,
            "--child",
            "--steps",
            str(min(steps, technique.most)),
            "--warm",
            str(technique.warm),
            "--sample-ms",
            str(technique.sample_ms),
        ]
        launcher = ["-m", "spottrain", "run", "--nproc", str(technique.ranks)] if technique.ranks > 1 else []
        done = subprocess.run([sys.executable, *launcher, *script], env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{technique}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found: dict[str, float] = json.loads(answer.read_text())
    return found


# --- arithmetic ---------------------------------------------------------------------------------------
def flops() -> dict[str, dict[str, float]]:
    """FLOPs of a step without recomputation, and what each policy adds to them, in percent."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt = example()
    counts: dict[str, dict[str, float]] = {}
    torch.set_default_device("meta")  # shapes are all that is counted, and 124 million weights take long
    ours, text = gpt["GPT"](), torch.zeros(1, gpt["CONTEXT"] + 1, dtype=torch.long)
    counts["GPT of examples/, 4 layers, 256 words"] = added(ours, lambda: gpt["loss"](ours, text))
    tokens = torch.zeros(1, 128, dtype=torch.long)
    seen = torch.ones(1, 1, 128, 128, dtype=torch.bool)  # else transformers looks at values, to make it
    for words in (GPT2_WORDS, 256):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=words, bos_token_id=0, eos_token_id=0)).train()
        name = f"GPT-2 of transformers, 12 layers, {words} words"
        counts[name] = added(model, partial(_loss, model, tokens, seen))
    return counts


def _loss(model: Any, tokens: Any, seen: Any) -> Any:
    return model(tokens, labels=tokens, attention_mask=seen, use_cache=False).loss


def added(model: Any, loss: Callable[[], Any]) -> dict[str, float]:
    from spottrain.techniques.activation_checkpointing import Policy, apply
    from torch.utils.flop_counter import FlopCounterMode

    def counted(policy: str) -> int:
        apply(model, Policy.of(policy))
        with FlopCounterMode(display=False) as counter:
            loss().backward()
        return int(counter.get_total_flops())

    none = counted("none")
    percent = {name: round(100 * (counted(policy) / none - 1), 1) for name, policy in POLICIES.items()}
    return {"gigaflops": round(none / 1e9, 2), **percent}


# --- all of it ----------------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--flops", action="store_true", help="count the arithmetic alone")
    parser.add_argument("--data", action="store_true", help="loader workers alone, on slow samples")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--sample-ms", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.steps, options.warm, options.sample_ms)
    told: dict[str, Any] = {"device": "cpu", "processor": platform.machine(), "threads": 1}
    if options.data:
        print(json.dumps(told | {"techniques": compared(DATA, options.rounds, options.steps)}))
        return
    if not options.flops:
        for name, why in LEFT_OUT.items():
            print(f"{name}: left out, {why}")
        told |= {"techniques": compared(TECHNIQUES, options.rounds, options.steps), "left_out": LEFT_OUT}
    print(json.dumps(told | {"percent_more_flops": flops()}))


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
