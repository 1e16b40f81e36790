"""Real small trainings on a CPU, each slow for one known reason; used by tests/runs and bench/techniques.

A fixture is named as its verdict. `play(name, seed)` trains in processes of their own, one thread each, and
answers what `diagnose` said of it. Sizes vary with the seed. Pauses are multiples of what a step was seen to
take just before, for the machine may be busy with other things.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from spottrain.diagnostics.bottleneck import MIN_SECONDS, InUse, Measurements, Name, Verdict, diagnose
from spottrain.diagnostics.flops import counted
from spottrain.diagnostics.step_timer import Shares, StepTimer, gathered
from spottrain.distributed.world import World
from spottrain.techniques.compilation import compilations

CPU: Final = torch.device("cpu")
WARM: Final = 3
WINDOW: Final = 2 * MIN_SECONDS
"""Seconds, about."""
MOST: Final = 1000
"""Steps of a window."""
PATIENCE: Final = 120.0
"""Seconds for one fixture."""


@dataclass(kw_only=True)
class Scene:
    """One training. `pause(of)`: the seconds that something takes, given those of a step."""

    model: torch.nn.Module
    batches: Callable[[], torch.Tensor]
    call: Callable[..., torch.Tensor]
    """The model as the loop calls it."""
    steps: int = 8
    data_pause: float = 0.0
    """Of a step's time; so are the others."""
    work_pause: float = 0.0
    exchange_pause: float = 0.0
    save_to: Path | None = None
    world: World = field(default_factory=World)


def facts_of(scene: Scene) -> Measurements:
    split = StepTimer(CPU)
    optimizer = torch.optim.SGD(scene.model.parameters(), lr=1e-4)
    pauses = _Pauses()
    call = _exchanging(scene, split, pauses) if scene.world.distributed else scene.call

    def step() -> None:
        with split.data():
            pauses.take(scene.data_pause)
            batch = scene.batches()
        with split.compute():
            pauses.take(scene.work_pause)
            loss = call(batch)
        with split.backward():
            loss.backward()  # type: ignore[no-untyped-call]
        with split.compute():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if scene.save_to is not None:
            with split.checkpoint():
                _save(scene.model, scene.save_to)
        split.step_done()

    pauses.unit = _seconds_of_a_step(step, scene.world)
    split.restart()
    split.window()
    before = compilations()
    left = WINDOW
    while left > 0:  # the unit of a busy moment is too long, and such a window too short
        began = time.perf_counter()
        for _ in range(max(scene.steps, min(MOST, math.ceil(left / pauses.unit)))):
            step()
        left -= _least(time.perf_counter() - began, scene.world)
    shares: Shares = split.window()
    compiled = compilations().since(before)
    ranks = gathered(shares, scene.world)
    with counted(CPU) as work:
        step()
    return Measurements(
        shares=shares,
        roofline=work.roofline,
        compilations=compiled.count,
        compile_seconds=compiled.seconds,
        ranks=ranks,
        use=InUse(workers=0, bf16=False),
    )


class _Pauses:
    unit = 0.0
    """Seconds of a step without pauses."""

    def take(self, times: float) -> None:
        if times:  # to sleep for no time gives the core away to others
            time.sleep(times * self.unit)


def _seconds_of_a_step(step: Callable[[], None], world: World) -> float:
    taken = []
    for _ in range(WARM):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    found = torch.tensor(statistics.median(taken))
    if world.distributed:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _least(seconds: float, world: World) -> float:
    """Returns the smallest of all ranks, so that they take the same steps."""
    found = torch.tensor(seconds)
    if world.distributed:
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return float(found)


def _exchanging(scene: Scene, split: StepTimer, pauses: _Pauses) -> Callable[[torch.Tensor], torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def throttled(state: Any, bucket: Any) -> Any:
        pauses.take(scene.exchange_pause)
        return allreduce_hook(state, bucket)

    replica = torch.nn.parallel.DistributedDataParallel(scene.model)
    replica.register_comm_hook(None, split.timed(throttled))
    return lambda batch: _square(replica(batch))


def _save(model: torch.nn.Module, folder: Path) -> None:
    with (folder / "model.pt").open("wb") as file:
        torch.save(model.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())


def _square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


# --- the trainings ----------------------------------------------------------------------------------
def _layers(width: int, depth: int) -> torch.nn.Sequential:
    layers = [torch.nn.Linear(width, width) for _ in range(depth)]
    return torch.nn.Sequential(*(module for layer in layers for module in (layer, torch.nn.ReLU())))


def _plain(width: int, depth: int, batch: int, **more: Any) -> Scene:
    model = _layers(width, depth)
    return Scene(
        model=model,
        batches=lambda: torch.randn(batch, width),
        call=lambda samples: _square(model(samples)),
        **more,
    )


def slow_dataset(chance: random.Random) -> Scene:
    return _plain(
        chance.choice([128, 192, 256]), 4, chance.choice([64, 128]), data_pause=chance.uniform(0.5, 3)
    )


def big_matrices(chance: random.Random) -> Scene:
    return _plain(chance.choice([384, 512, 640]), chance.choice([2, 3, 4]), chance.choice([256, 384, 512]))


class _Elementwise(torch.nn.Module):
    def __init__(self, size: int, depth: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.ones(size) for _ in range(depth)])

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            value = (value * weight + 0.5).relu()
        return value


def large_elementwise(chance: random.Random) -> Scene:
    size = chance.randrange(10, 18) * 2**20  # of 4 bytes each: an array is larger than the cache
    model, samples = _Elementwise(size, chance.choice([1, 2])), torch.randn(size)
    return Scene(model=model, batches=lambda: samples, call=lambda batch: _square(model(batch)), steps=4)


def thousands_of_tiny_operations(chance: random.Random) -> Scene:
    return _plain(chance.choice([4, 8, 16]), chance.randrange(150, 400), chance.choice([2, 4, 8]), steps=6)


def save_at_each_step(chance: random.Random) -> Scene:
    width = chance.choice([1536, 2048, 3072])
    return _plain(width, chance.choice([1, 2]), 2, save_to=Path(tempfile.mkdtemp()))


def changing_shapes(chance: random.Random) -> Scene:
    torch._dynamo.config.recompile_limit = MOST
    width, lengths = chance.choice([32, 64, 128]), itertools.count(chance.randrange(3, 40))
    model = _layers(width, chance.choice([2, 3]))
    compiled = torch.compile(model, backend="eager", dynamic=False)
    return Scene(
        model=model,
        batches=lambda: torch.randn(next(lengths), width),
        call=lambda batch: _square(compiled(batch)),
    )


def throttled_exchange(chance: random.Random, world: World) -> Scene:
    pause = chance.uniform(0.7, 2)
    return _plain(
        chance.choice([128, 192, 256]),
        3,
        chance.choice([64, 128]),
        exchange_pause=pause,
        world=world,
        steps=12,
    )


def sleeping_rank(chance: random.Random, world: World) -> Scene:
    asleep, pause, width = (
        chance.randrange(world.size),
        chance.uniform(0.7, 3),
        chance.choice([128, 192, 256]),
    )
    kind = chance.choice(["data_pause", "work_pause"])
    more = {kind: pause} if world.rank == asleep else {}
    return _plain(width, 3, chance.choice([64, 128]), world=world, steps=12, **more)


ALONE: Final[dict[Name, Callable[[random.Random], Scene]]] = {
    Name.DATA: slow_dataset,
    Name.MEMORY: large_elementwise,
    Name.COMPUTE: big_matrices,
    Name.LAUNCH: thousands_of_tiny_operations,
    Name.CHECKPOINT: save_at_each_step,
    Name.RECOMPILING: changing_shapes,
}
TOGETHER: Final[dict[Name, Callable[[random.Random, World], Scene]]] = {
    Name.COMMUNICATION: throttled_exchange,
    Name.STRAGGLER: sleeping_rank,
}
RANKS: Final = 2


# --- playing them -----------------------------------------------------------------------------------
def play(name: Name, seed: int) -> tuple[Verdict | None, Measurements]:
    """Raises RuntimeError where a process of it failed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", __name__])
    size = RANKS if name in TOGETHER else 1
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=_act, args=(name, seed, rank, size, folder, end), daemon=True)
            for rank, (_, end) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        facts = ends[0][0].recv() if ends[0][0].poll(PATIENCE) else None
        for process in processes:
            process.join(10)
            process.kill()
    if facts is None:
        raise RuntimeError(f"{name}, seed {seed}: nothing came within {PATIENCE} s")
    if isinstance(facts, str):
        raise RuntimeError(f"{name}, seed {seed}: {facts}")
    return diagnose(facts), facts


def _act(name: Name, seed: int, rank: int, size: int, folder: str, end: Any) -> None:
    tempfile.tempdir = folder  # which the other process removes
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    chance = random.Random(f"{name}-{seed}")
    try:
        if size == 1:
            end.send(facts_of(ALONE[name](chance)))
            return
        world = World(rank=rank, size=size, local_rank=rank, local_size=size)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
        end.send(facts_of(TOGETHER[name](chance, world)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        end.send(f"{type(error).__name__}: {error}")
        raise


def seeds(first: int, count: int) -> Iterator[int]:
    yield from range(first, first + count)
