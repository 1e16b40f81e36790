"""The groups of `bench.gpu`, each in a process of its own: `python -m bench.gpu.groups NAME SECONDS [tiny]`.

Each figure is a line of JSON as soon as it is there.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from spottrain.checkpoint.plain_state import model_state, optimizer_state
from spottrain.checkpoint.saver import Saver
from spottrain.checkpoint.upload import Transfer
from spottrain.diagnostics.bottleneck import Name
from spottrain.distributed.world import World

from bench.gpu.model import GPT, Windows, loss_of
from bench.gpu.trainings import CUDA, DEVICE, FULL, TINY, WARM, Ran, Size, adamw, by_hand, longer, now, ours

BEGAN: Final = time.monotonic()
SCRIPT: Final = Path(__file__).with_name("script.py")
LOOPS: Final = Path(__file__).with_name("loops.py")
PARTING: Final = 10
"""Steps of a training that is stopped before the signal comes."""
KINDS: Final = ("run", "transformers", "lightning")
BF16: Final[dict[str, Any]] = {"precision": "bf16"}
COMPILED: Final[dict[str, Any]] = {"precision": "bf16", "compile": True}


def tell(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


class Clock:
    """How long this process still has; a case that would not come to its end is not begun."""

    def __init__(self, seconds: float) -> None:
        self._end = BEGAN + seconds
        self._longest = 0.0

    @contextmanager
    def case(self, name: str) -> Iterator[bool]:
        """Yields whether there is time for one more case as long as the longest one."""
        began = time.monotonic()
        there = self._end - began > self._longest
        if not there:
            tell(not_reached=[name])
        yield there
        self._longest = max(self._longest, time.monotonic() - began)


# --- loop -----------------------------------------------------------------------------------------------
def loop(size: Size, clock: Clock) -> None:
    """The GPT 124M compiled in bf16, by hand and by Trainer in turn."""
    tell(ceilings=ceilings(8192 if size is FULL else 64))
    ratios: list[float] = []
    for number in range(1, 3):
        with clock.case(f"loop, round {number}") as there:
            if not there:
                return
            speeds = {}
            for side, train in (("hand", by_hand), ("ours", lambda size: ours(size, COMPILED))):
                found = train(size).figures(size)
                speeds[side] = found["tokens_per_second"]
                tell(loop={f"{side} {number}": found})
            ratios.append(speeds["ours"] / speeds["hand"])
            tell(ours_over_hand_written=round(statistics.median(ratios), 4))


def ceilings(side: int) -> dict[str, float]:
    """What the device does at most: products of matrices, and copies to the host."""
    a, b = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    products = best(lambda: a @ b, 10)
    source = torch.empty(side * side * 16, dtype=torch.uint8, device=DEVICE)
    copies = {
        name: best(lambda into=into: into.copy_(source), 4)  # type: ignore[misc]
        for name, into in (
            ("pinned", torch.empty(source.shape, dtype=torch.uint8, pin_memory=CUDA)),
            ("pageable", torch.zeros(source.shape, dtype=torch.uint8)),
        )
    }
    rates = {f"{name}_gib_s": source.nbytes / 2**30 / seconds for name, seconds in copies.items()}
    return {
        name: round(rate, 1)
        for name, rate in ({"bf16_tflops": 2 * side**3 / products / 1e12} | rates).items()
    }


def best(act: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times + 1):
        began = now()
        act()
        taken.append(now() - began)
    return min(taken[1:])


# --- restart --------------------------------------------------------------------------------------------
def restart(size: Size, clock: Clock) -> None:
    """Starts cold, is stopped, goes on with the stored cache; beside an undisturbed run, and one by hand."""
    steps = size.steps + WARM
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold = Start(folder, "cold", size, steps, uri="stopped", cache="cold")
        cold.reach(PARTING)
        stopped = time.time()
        cold.process.send_signal(signal.SIGTERM)
        cold.end(75)
        tell(start_s={"cold": cold.first}, sigterm_to_exit_s=round(time.time() - stopped, 2))
        warm = Start(folder, "warm", size, steps, uri="stopped", cache="warm")
        warm.end(0)
        tell(start_s={"warm": warm.first}, resumed_after_steps=steps - len(warm.times))
        with clock.case("restart, undisturbed") as there:
            if there:
                whole = Start(folder, "whole", size, steps, uri="whole", cache="warm")
                whole.end(0)
                equal = whole.digest == warm.digest
                tell(
                    exact_differing=int(not equal),
                    exact={"undisturbed": whole.digest, "resumed": warm.digest},
                )
        with clock.case("restart, by hand") as there:
            if there:
                hand = Start(folder, "hand", size, steps, cache="hand", by_hand=True)  # the cache is torch's
                hand.end(0)
                tell(start_s={"hand": hand.first})


class Start:
    """One process of script.py or loops.py, from its start."""

    def __init__(
        self,
        folder: Path,
        name: str,
        size: Size,
        steps: int,
        *,
        cache: str,
        uri: str = "",
        by_hand: bool = False,
        script: Path = SCRIPT,
        training: dict[str, Any] = COMPILED,
        more: Sequence[str] = (),
    ) -> None:
        self._times, self._log = folder / f"{name}.times", folder / f"{name}.log"
        words = [str(script), str(self._times), str(steps), *(["tiny"] if size is TINY else []), *more]
        environment = os.environ | {
            "SPOTTRAIN_CHECKPOINT_URI": str(folder / uri),
            "SPOTTRAIN_CHECKPOINT_INTERVAL": "1h",
            "SPOTTRAIN_TRAINING": json.dumps(training),
            "SPOTTRAIN_CACHE_DIR": str(folder / cache),
        }
        if by_hand:
            command = [sys.executable, "-m", "bench.gpu.script", *words[1:], "by-hand"]
        else:
            command = [sys.executable, "-m", "spottrain", "run", *words]
            environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
        self._began = time.time()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    @property
    def times(self) -> list[float]:
        return [float(line) for line in self._times.read_text().split()] if self._times.exists() else []

    @property
    def first(self) -> float:
        return round(self.times[0] - self._began, 2)

    @property
    def digest(self) -> str:
        lines = self._log.read_text().splitlines()
        return next(line.split()[1] for line in lines if line.startswith("digest "))

    def reach(self, steps: int) -> None:
        while len(self.times) < steps and self.process.poll() is None:
            time.sleep(0.01)

    def end(self, code: int) -> None:
        if self.process.wait() != code:
            raise SystemExit(
                f"exit code {self.process.returncode}, not {code}: {self._log.read_text()[-3000:]}"
            )


# --- loops ----------------------------------------------------------------------------------------------
def loops(size: Size, clock: Clock) -> None:
    """Loops that are not Trainer's, stopped at a third and resumed; beside undisturbed runs, all at once."""
    differing = 0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        ends = {kind: pool.submit(stopped_and_whole, Path(name), kind, size) for kind in KINDS}
        for kind, end in ends.items():
            found = end.result()
            differing += found.get("undisturbed", "") != found.get("resumed")
            tell(loops={kind: found}, loops_differing=differing)


def stopped_and_whole(folder: Path, kind: str, size: Size, steps: int = 30) -> dict[str, Any]:
    def start(name: str, uri: str, *more: str) -> Start:
        name, words = f"{kind}-{name}", (kind, *more)
        where: dict[str, Any] = {"uri": f"{kind}-{uri}", "cache": f"{name}.cache"}
        return Start(folder, name, size, steps, script=LOOPS, training={}, more=words, **where)

    whole, stopped = start("whole", "whole"), start("stopped", "stopped", str(steps // 3))
    try:
        stopped.end(75)
        resumed = start("resumed", "stopped")
        resumed.end(0)
        whole.end(0)
    except SystemExit as error:
        return {"failed": str(error)}
    after = steps - len(resumed.times)
    return {"undisturbed": whole.digest, "resumed": resumed.digest, "resumed_after_steps": after}


# --- saves ----------------------------------------------------------------------------------------------
class Nowhere(Transfer):
    """Takes the place of the uploader where only the copy is measured."""

    def __init__(self) -> None: ...
    def share(self, arena: object) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...
    def put(self, files: object, cancelled: object) -> Any:
        raise AssertionError("nothing is uploaded here")


def saves(size: Size, clock: Clock) -> None:
    """The copy of a save beside others, then what a training loses by saves of three kinds, not compiled."""
    tell(**stall(size))
    every, size = (15, longer(size, 60)) if size is FULL else (3, longer(size, 12))
    with clock.case("saves, ours") as there:
        if there:
            ran = ours(size, BF16, interval="2s")
            facts = ran.facts
            tell(
                save_lost_s={"ours": lost(ran, facts.saves)},
                saves=facts.saves,
                durable_s={"ours": facts.save_seconds},
                stall_in_training_s=facts.stall_seconds,
            )
    for name, make in (("torch_save", torch_saves), ("dcp", dcp_saves)):
        with clock.case(f"saves, {name}") as there, tempfile.TemporaryDirectory() as folder:
            if there:
                save = make(folder)

                def between(number: int, model: Any, optimizer: Any, save: Any = save) -> None:
                    if number % every == 0:
                        save(number, model, optimizer)

                ran = by_hand(size, compiled=False, between=between)
                count = sum(number % every == 0 for number in range(WARM + 1, size.steps + WARM + 1))
                tell(save_lost_s={name: lost(ran, count)})


def stall(size: Size) -> dict[str, Any]:
    """Seconds by which a save lengthens a step, and of a copy of the same bytes into pinned memory."""
    model = GPT(size.shape).to(DEVICE)
    optimizer = adamw(model)
    batch = Windows(size.shape, 8).rows.long().to(DEVICE)
    loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    tree = {"model": model_state(model), "optimizer": optimizer_state(model, optimizer)}
    moments = [value for state in tree["optimizer"]["state"].values() for value in state.values()]
    tensors = list({each.data_ptr(): each for each in [*tree["model"].values(), *moments]}.values())
    saver = Saver(World(), Nowhere, pin=CUDA)
    saver.prepare(tree, {})
    pinned = [torch.empty(each.shape, dtype=each.dtype, pin_memory=CUDA) for each in tensors]
    time.sleep(2.0)  # a first save comes minutes after the start

    def copy() -> None:
        for into, each in zip(pinned, tensors, strict=True):
            into.copy_(each, non_blocking=True)

    def step(*, save: bool) -> None:
        if save:
            saver.snapshot(tree, {}, 1, stepped=tensors)  # waits for the copy before
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        saver.before_step()
        optimizer.step()

    step(save=True)  # the first shows that the forward pass leaves weights alone, and copies at once
    plain = best(lambda: step(save=False), 5)
    own, theirs = best(lambda: step(save=True), 5) - plain, best(copy, 5)
    return {
        "state_gib": round(sum(each.nbytes for each in tensors) / 2**30, 2),
        "stall_s": round(own, 4),
        "pinned_copy_s": round(theirs, 4),
        "stall_over_pinned_copy": round(own / theirs, 3),
    }


def lost(ran: Ran, saves: int) -> float | None:
    """Returns the seconds above the median step, for each save."""
    taken = ran.steps.timed
    return round((sum(taken) - statistics.median(taken) * len(taken)) / saves, 4) if saves else None


def torch_saves(folder: str) -> Callable[[int, Any, Any], None]:
    def save(number: int, model: Any, optimizer: Any) -> None:
        torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, f"{folder}/{number}.pt")

    return save


def dcp_saves(folder: str) -> Callable[[int, Any, Any], None]:
    """torch's distributed checkpoint, asynchronous, with its cached stager in pinned memory."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import BlockingAsyncStager
    from torch.distributed.checkpoint.state_dict import get_state_dict

    stager = {"async_stager": BlockingAsyncStager(cache_staged_state_dict=True)} if CUDA else {}
    pending: list[Any] = []

    def save(number: int, model: Any, optimizer: Any) -> None:
        if pending:
            pending.pop().result()
        weights, moments = get_state_dict(model, optimizer)
        state = {"m": weights, "o": moments}
        pending.append(dcp.async_save(state, checkpoint_id=f"{folder}/{number}", **stager))  # type: ignore

    return save


# --- verdict --------------------------------------------------------------------------------------------
class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of a few numbers that take so long to read."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._seconds:
            time.sleep(self._seconds)
        return torch.full((8,), index / 4096)


class Grown(torch.nn.Module):
    """Calls `inner` with so many rows of that width, which lie on the device already."""

    def __init__(self, inner: torch.nn.Module, rows: int, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.rows: torch.Tensor
        self.register_buffer("rows", torch.randn(rows, width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(self.rows + x.mean())
        return found


class Elementwise(torch.nn.Module):
    """Reads and writes much memory, and computes next to nothing."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x * self.scale
        return x


def verdict(size: Size, clock: Clock) -> None:
    """Trainings that are slow for a known reason, what is said of them, and what NVML saw meanwhile."""
    big = size is FULL
    wide, rows, deep = (8192, 16384, 400) if big else (64, 8, 4)
    cases: dict[Name, tuple[Slow, Callable[[], torch.nn.Module]]] = {
        Name.DATA: (Slow(0.01), lambda: Grown(layers(64, 2), 8, 64)),
        Name.LAUNCH: (Slow(), lambda: Grown(layers(64, deep), 8, 64)),
        Name.COMPUTE: (Slow(), lambda: Grown(layers(wide, 4), rows, wide)),
        Name.MEMORY: (Slow(), lambda: Grown(Elementwise(wide, 120), rows // 4, wide)),
    }
    wrong = 0
    for name, (data, make) in cases.items():
        with clock.case(f"verdict, {name}") as there:
            if there:
                more: dict[str, Any] = {"train_dataset": data, "model": make(), "loss_fn": mean_square}
                more |= {"global_batch_size": 4, "micro_batch_size": 4}
                facts = ours(longer(size, 130 if big else 60), BF16, **more).facts
                wrong += facts.verdict != name
                tell(verdicts={name: facts.verdict or "none"}, verdicts_wrong=wrong)
                tell(utilisation={name: facts.gpu_utilisation}, gpu_memory={name: facts.gpu_memory})


def layers(width: int, count: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count)))


def mean_square(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()  # type: ignore[no-any-return]


# --- nccl -----------------------------------------------------------------------------------------------
def nccl(size: Size, clock: Clock) -> None:
    """One rank with NCCL: how it starts, its collectives, DDP, FSDP2's state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    backend = "cpu:gloo,cuda:nccl" if CUDA else "gloo"
    began = now()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        numbers = torch.ones(2**25 if CUDA else 2**10, device=DEVICE)
        dist.all_reduce(numbers)
        tell(nccl={"start_s": round(now() - began, 2), "backend": backend})
        reduced = best(lambda: dist.all_reduce(numbers), 10)
        tell(nccl={"all_reduce_ms": round(1000 * reduced, 3), "mib": numbers.nbytes // 2**20})
        batch = Windows(size.shape, size.micro).rows.long().to(DEVICE)
        with clock.case("nccl, DDP") as there:
            if there:
                model = DistributedDataParallel(GPT(size.shape).to(DEVICE))
                tell(nccl={"ddp": {"step_ms": steps_of(model, batch)}})
        with clock.case("nccl, FSDP2") as there:
            if there:
                whole = GPT(size.shape).to(DEVICE)
                for block in whole.blocks:
                    fully_shard(block, mesh=init_device_mesh(DEVICE.type, (1,)))
                fully_shard(whole, mesh=init_device_mesh(DEVICE.type, (1,)))
                took = steps_of(whole, batch)
                saver = Saver(World(), Nowhere, pin=CUDA)
                tree = {"model": model_state(whole)}
                saver.prepare(tree, {})
                copied = best(lambda: saver.snapshot(tree, {}, 1), 3)
                tell(nccl={"fsdp2": {"step_ms": took, "weights_stall_s": round(copied, 4)}})
        dist.destroy_process_group()


def steps_of(model: Any, batch: torch.Tensor) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # DDP lays its buckets out anew after it
    return round(1000 * best(step, 4), 2)


# --- techniques -----------------------------------------------------------------------------------------
def techniques(size: Size, clock: Clock) -> None:
    """Tokens/s and memory of each; those that compile for minutes last."""
    every: dict[str, Any] = {"policy": "every", "every": 2}
    cases: dict[str, dict[str, Any]] = {
        "bf16": BF16,
        "fp32": {"precision": "fp32"},
        "tf32": {"precision": "tf32"},
        "fp16": {"precision": "fp16"},
        "micro-batch auto": BF16 | {"microBatchSize": "auto"},
        "activations, every 2nd": BF16 | {"activationCheckpointing": every},
        "activations, all": BF16 | {"activationCheckpointing": {"policy": "all"}},
        "compile": COMPILED,
        "compile, reduce-overhead": COMPILED | {"compileMode": "reduce-overhead"},
        "compile, max-autotune": COMPILED | {"compileMode": "max-autotune"},
    }
    size = longer(size, 16 if size is FULL else 2)
    for name, training in cases.items():
        with clock.case(f"techniques, {name}") as there:
            if there:
                try:
                    found = ours(size, training).figures(size, training["precision"])
                except Exception as error:  # of torch's compiler, too: the others are measured all the same
                    found = {"failed": f"{type(error).__name__}: {error}"[-1000:]}
                tell(techniques={name: found})


GROUPS: Final[dict[str, Callable[[Size, Clock], None]]] = {
    each.__name__: each for each in (loop, restart, saves, verdict, nccl, loops, techniques)
}
"""In the order in which they are run: those with goals first."""


def main(name: str, seconds: str, *words: str) -> None:
    tell(device=torch.cuda.get_device_name() if CUDA else "cpu")
    GROUPS[name](TINY if "tiny" in words else FULL, Clock(float(seconds)))
    sys.stdout.flush()
    os._exit(0)  # what Trainer has frozen for the garbage collector would be told as leaks


if __name__ == "__main__":
    main(*sys.argv[1:])
