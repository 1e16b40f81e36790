"""What a restart costs, cold, with the compile cache restored from the store, and by hand.

Fresh processes, interleaved: cold (empty cache folders, empty store), warm (empty cache folders, a store that
a cold one filled) and by hand (torch alone, its own cache folders filled). The first two have temporary
folders of their own, as a new pod has: torch keeps compiled headers there. The store is a folder, so no
download is in the figures. One thread each.

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


def child(spawned: float, *, by_hand: bool) -> dict[str, Any]:
    """One start of one trainer, in the order of `spottrain run`; returns what each part took."""
    marks = {"python": BORN - spawned, "import_spottrain": 0.0, "wait_for_restore": 0.0}
    last = BORN

    def mark(part: str) -> None:
        nonlocal last
        now = time.time()
        marks[part], last = now - last, now

    join = save = None
    if not by_hand:
        join, save = begin_restore()
        mark("import_spottrain")
    import torch  # noqa: F401

    mark("import_torch")
    step = training_step(by_hand=by_hand)
    mark("model")
    archive_bytes, restore_seconds = join() if join else (0, 0.0)
    mark("wait_for_restore")  # as the beginning of a training waits, before anything is compiled
    losses, seconds, processor = [], [], []
    for _ in range(STEPS):
        before = processor_seconds()
        losses.append(step())
        processor.append(processor_seconds() - before)
        mark("step")
        seconds.append(marks.pop("step"))
    saved = save is not None and save()
    mark("save")
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


def begin_restore() -> tuple[Callable[[], tuple[int, float]], Callable[[], bool]]:
    """Begins what `spottrain run` does before a script. Returns the waiting for the cache, and its saving."""
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

    def join() -> tuple[int, float]:
        thread.join()
        return restored[0]

    return join, cache.save_if_changed


def training_step(*, by_hand: bool) -> Callable[[], float]:
    """A compiled transformer with AdamW: forward and backward are compiled, the optimizer is not."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    body = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(256, 128), body, nn.LayerNorm(128), nn.Linear(128, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if by_hand:
        outer = torch.compile(model)
    else:
        from spottrain.techniques.compilation import compiled

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


def start(place: Path, uri: Path | None) -> dict[str, Any]:
    """A new process with its folders in `place` and its checkpoints at `uri`; None: by hand."""
    (place / "tmp").mkdir(parents=True, exist_ok=True)
    environ = {
        **os.environ,
        "SPOTTRAIN_CACHE_DIR": str(place / "cache"),
        "SPOTTRAIN_CHECKPOINT_URI": str(uri or ""),
        "TMPDIR": str(place / "tmp"),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    for name, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        environ.pop(name, None)
        if uri is None:
            environ[name] = str(place / "cache" / folder)
    command = [sys.executable, "-m", "bench.restart", "--child", repr(time.time())]
    if uri is None:
        command.append("--by-hand")
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


Runs = dict[str, dict[str, Any]]
"""One run of each side."""


def rounds(count: int) -> list[Runs]:
    """Every second round is run in the opposite order, its warm side from the store of the round before."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        filled = root / "store-first"
        start(root / "first", filled)  # also brings the files of torch into the page cache
        for number in range(count):
            new = root / f"store-{number}"
            source = filled if number % 2 else new
            places = {
                "cold": (root / f"cold-{number}", new),
                "warm": (root / f"warm-{number}", source),
                "hand": (root / "first", None),
            }
            order = reversed(places) if number % 2 else iter(places)
            runs = {side: start(*places[side]) for side in order}
            filled = new
            found.append(runs)
            shown = ", ".join(f"{side} {told(runs[side])}" for side in places)
            print(f"round {number}: {shown}", flush=True)
    return found


def told(run: dict[str, Any]) -> str:
    return f"compile {compile_seconds(run):.2f} s of {to_first_step(run):.2f} s to the first step"


def compile_seconds(run: dict[str, Any]) -> float:
    """What the first step costs above a steady one, and what was waited for the cache."""
    return float(run["wait_for_restore"] + run["first_step"] - run["steady_step"])


def to_first_step(run: dict[str, Any]) -> float:
    return float(sum(run[part] for part in PARTS))


def summary(found: list[Runs]) -> dict[str, Any]:
    colds, warms, hands = ([runs[side] for runs in found] for side in ("cold", "warm", "hand"))

    def ratio(of: Callable[[dict[str, Any]], float]) -> dict[str, float]:
        return spread([of(warm) / of(cold) for cold, warm in zip(colds, warms, strict=True)])

    longer = [to_first_step(warm) - to_first_step(hand) for warm, hand in zip(warms, hands, strict=True)]
    return {
        "warm_over_cold_compile": ratio(compile_seconds),
        "warm_over_cold_compile_processor": ratio(lambda run: float(run["compile_processor"])),
        "warm_over_cold_start_to_first_step": ratio(to_first_step),
        "longer_than_by_hand_s": spread(longer),
        "cold": parts(colds),
        "warm": parts(warms),
        "hand": parts(hands),
        "archive_bytes": warms[0]["archive_bytes"],
        "losses_equal": all(run["losses"] == colds[0]["losses"] for run in colds + warms + hands),
        "warm_misses": sum(warm["misses"] for warm in warms),
        "warm_hits": sum(warm["hits"] for warm in warms),
        "warm_saved_again": sum(warm["saved"] for warm in warms),
        "rounds": len(found),
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", type=float, help="Unix seconds at which this process was started")
    parser.add_argument("--by-hand", action="store_true", help="that process has torch alone")
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(child(options.child, by_hand=options.by_hand)))
        return 0
    figures = summary(rounds(options.rounds))
    print(json.dumps(figures))
    return 0 if figures["losses_equal"] and figures["warm_hits"] and not figures["warm_misses"] else 1


if __name__ == "__main__":
    sys.exit(main())
