"""What a restart costs, cold and with the compile cache restored from the store.

Fresh processes in pairs, interleaved: cold (empty cache folders, empty store) and warm (empty cache folders,
a store that a cold one filled). Each has a temporary folder of its own, as a new pod has: torch keeps
compiled headers there. The store is a folder, so no download is in the figures. One thread each.

The last line is JSON. Exit code 1 when a loss differs, or the warm process compiled anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.spread import spread

BORN = time.time()
STEPS: Final = 4
TIMEOUT: Final = 300.0
PARTS: Final = ("python", "import_spottrain", "import_torch", "model", "wait_for_restore", "first_step")
"""Of the time from the start of the process to the end of its first step. `model` imports the compiler."""


def child(spawned: float) -> dict[str, Any]:
    """One start of one trainer, in the order of `spottrain run`; prints what each part took."""
    marks = {"python": BORN - spawned}
    last = BORN

    def mark(part: str) -> None:
        nonlocal last
        now = time.time()
        marks[part], last = now - last, now

    from spottrain.checkpoint.compile_cache import CompileCache, use_folder
    from spottrain.contract import Env
    from spottrain.core import garbage
    from spottrain.core.run_config import RunConfig
    from spottrain.storage.open import open_store

    garbage.collect_rarely()
    use_folder(Path(os.environ[Env.CACHE_DIR]), os.environ)
    run = RunConfig.from_env(os.environ, script="train.py")
    cache = CompileCache.of(open_store(**run.where), run, os.environ)
    assert cache is not None
    restored: list[tuple[int, float]] = []
    began = time.time()
    thread = threading.Thread(target=lambda: restored.append((cache.restore(), time.time() - began)))
    thread.start()
    mark("import_spottrain")
    import torch  # noqa: F401

    mark("import_torch")
    step = training_step()
    mark("model")
    thread.join()  # as the beginning of a training waits for it, before anything is compiled
    mark("wait_for_restore")
    losses, seconds, processor = [], [], []
    for _ in range(STEPS):
        before = processor_seconds()
        losses.append(step())
        processor.append(processor_seconds() - before)
        mark("step")
        seconds.append(marks.pop("step"))
    saved = cache.save_if_changed()
    mark("save")
    archive_bytes, restore_seconds = restored[0]
    return {
        **marks,
        "first_step": seconds[0],
        "steady_step": statistics.median(seconds[1:]),
        "compile_processor": processor[0] - statistics.median(processor[1:]),
        "restore": restore_seconds if archive_bytes else 0.0,
        "archive_bytes": archive_bytes,
        "losses": losses,
        "saved": saved,
        **hits(),
    }


def training_step() -> Callable[[], float]:
    """A compiled transformer with AdamW: forward and backward are compiled, the optimizer is not."""
    import torch
    from spottrain.techniques.compilation import compiled
    from torch import nn

    torch.manual_seed(1)
    body = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(256, 128), body, nn.LayerNorm(128), nn.Linear(128, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = compiled(model)

    def step() -> float:
        tokens = torch.randint(0, 256, (8, 65))
        logits = outer(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 256), tokens[:, 1:].reshape(-1))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def processor_seconds() -> float:
    """Of this process and its compilers: what a busy machine does not stretch much."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def hits() -> dict[str, int]:
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return {"hits": inductor["fxgraph_cache_hit"], "misses": inductor["fxgraph_cache_miss"]}


def start(place: Path, uri: Path) -> dict[str, Any]:
    """A new process with empty folders in `place` and its checkpoints at `uri`."""
    (place / "tmp").mkdir(parents=True)
    environ = {
        **os.environ,
        "SPOTTRAIN_CACHE_DIR": str(place / "cache"),
        "SPOTTRAIN_CHECKPOINT_URI": str(uri),
        "TMPDIR": str(place / "tmp"),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        environ.pop(name, None)
    command = [sys.executable, "-m", "bench.restart", "--child", repr(time.time())]
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def pairs(count: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(cold, warm); every second pair is run warm first, from the store of the pair before."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        filled = root / "store-first"
        start(root / "first", filled)  # also brings the files of torch into the page cache
        for number in range(count):
            new = root / f"store-{number}"
            if number % 2:
                warm = start(root / f"warm-{number}", filled)
                cold = start(root / f"cold-{number}", new)
            else:
                cold = start(root / f"cold-{number}", new)
                warm = start(root / f"warm-{number}", new)
            filled = new
            found.append((cold, warm))
            print(f"pair {number}: cold {told(cold)}, warm {told(warm)}", flush=True)
    return found


def told(run: dict[str, Any]) -> str:
    return f"compile {compile_seconds(run):.2f} s of {to_first_step(run):.2f} s to the first step"


def compile_seconds(run: dict[str, Any]) -> float:
    """What the first step costs above a steady one, and what was waited for the cache."""
    return float(run["wait_for_restore"] + run["first_step"] - run["steady_step"])


def to_first_step(run: dict[str, Any]) -> float:
    return float(sum(run[part] for part in PARTS))


def summary(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    ratios = [compile_seconds(warm) / compile_seconds(cold) for cold, warm in found]
    starts = [to_first_step(warm) / to_first_step(cold) for cold, warm in found]
    processor = [warm["compile_processor"] / cold["compile_processor"] for cold, warm in found]
    colds, warms = [cold for cold, _ in found], [warm for _, warm in found]
    return {
        "warm_over_cold_compile": spread(ratios),
        "warm_over_cold_compile_processor": spread(processor),
        "warm_over_cold_start_to_first_step": spread(starts),
        "cold": parts(colds),
        "warm": parts(warms),
        "archive_bytes": warms[0]["archive_bytes"],
        "losses_equal": all(run["losses"] == colds[0]["losses"] for run in colds + warms),
        "warm_misses": sum(warm["misses"] for warm in warms),
        "warm_hits": sum(warm["hits"] for warm in warms),
        "warm_saved_again": sum(warm["saved"] for warm in warms),
        "pairs": len(found),
        "threads": 1,
    }


def parts(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    seconds = {
        part: spread([run[part] for run in runs])
        for part in (*PARTS, "steady_step", "restore", "save", "compile_processor")
    }
    seconds["compile"] = spread([compile_seconds(run) for run in runs])
    return {**seconds, "to_first_step": spread([to_first_step(run) for run in runs])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--child", type=float, help="Unix seconds at which this process was started")
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(child(options.child)))
        return 0
    figures = summary(pairs(options.pairs))
    print(json.dumps(figures))
    return 0 if figures["losses_equal"] and figures["warm_hits"] and not figures["warm_misses"] else 1


if __name__ == "__main__":
    sys.exit(main())
