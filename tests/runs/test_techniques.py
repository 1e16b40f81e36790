"""Techniques with what people use: DDP, FSDP2, torch.compile, transformers, two ranks, real memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from spottrain.contract import ExitCode
from spottrain.lifecycle.topology import LOOPBACK, reserve_port
from spottrain.techniques.activation_checkpointing import apply
from spottrain.techniques.compilation import compilations, compiled, warm_up
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.runs.conftest import Lab
from tests.support.blocks import Block, Net
from tests.support.heavy import sample


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    with reserve_port() as reserved:
        where = f"tcp://{LOOPBACK}:{reserved.getsockname()[1]}"
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


class Dropping(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(x, mask), 0.2, self.training)


def dropping() -> Net:
    model = Net()
    for number in range(4):
        model.blocks[number] = Dropping()
    torch.manual_seed(2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def gradients(model: Any, plain: torch.nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model(torch.ones(6, 8)).square().mean().backward()
    found = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
    return [getattr(each, "_local_tensor", each) for each in found]


def require_same(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(some) == len(others) > 0
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other)


# --- activation checkpointing under wrappers ------------------------------------------------------------
@pytest.mark.parametrize("wanted", ["all", 2])
def test_under_ddp_gradients_are_the_same(world_of_one: None, wanted: Any) -> None:
    usual, model = dropping(), dropping()
    apply(model, wanted)
    require_same(gradients(DistributedDataParallel(model), model), gradients(usual, usual))


@pytest.mark.parametrize("wanted", ["all", 2])
def test_under_fsdp2_gradients_and_names_are_the_same(world_of_one: None, wanted: Any) -> None:
    usual, model = dropping(), dropping()
    apply(model, wanted)
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    require_same(gradients(model, model), gradients(usual, usual))
    assert list(model.state_dict()) == list(usual.state_dict())


def test_after_fsdp2_its_blocks_are_found_by_the_name_that_the_script_gave_them(world_of_one: None) -> None:
    usual, model = dropping(), dropping()
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert len(apply(model, [Dropping])) == 4
    require_same(gradients(model, model), gradients(usual, usual))


@pytest.mark.heavy
def test_compiled_as_one_graph_gradients_are_the_same() -> None:
    torch._dynamo.reset()
    usual, model = Net(), Net()
    apply(model, 2)
    outer = compiled(model, fullgraph=True)
    warm_up(lambda: outer(torch.ones(6, 8)).sum().backward(), outer)
    before = compilations()
    require_same(gradients(outer, model), gradients(usual, usual))
    assert compilations().since(before).count == 0


class Normed(Block):
    """With running statistics, and a place where torch.compile breaks its graph where that is asked for."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.norm, self.breaks = torch.nn.BatchNorm1d(8), breaks

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        found: torch.Tensor = self.norm(super().forward(x, mask))
        return found


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo, where a graph is broken
@pytest.mark.parametrize(
    "way", sample(["plain", "ddp", "fsdp2", "graph", "broken graph"], "plain", "ddp", "fsdp2")
)
def test_running_statistics_are_updated_once_in_a_step_under_wrappers(world_of_one: None, way: str) -> None:
    torch.manual_seed(2)
    plain: Any = torch.nn.Sequential(*(Normed(breaks=way == "broken graph") for _ in range(2)))
    apply(plain, "all")
    model = plain
    if way == "ddp":
        model = DistributedDataParallel(plain)
    elif way == "fsdp2":
        for block in plain:
            fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
        fully_shard(plain, mesh=init_device_mesh("cpu", (1,)))
    elif "graph" in way:
        model = torch.compile(plain, backend="aot_eager", fullgraph=way == "graph")
    for _ in range(3):
        model(torch.randn(6, 8)).square().mean().backward()
    assert [int(block.norm.num_batches_tracked) for block in plain] == [3, 3]
    torch._dynamo.reset()


HOME: Final = {"ROOT": str(Path(__file__).parents[2])}
"""So that a script finds `tests`."""


# --- a training that goes on in another setting ---------------------------------------------------------
TRAINING: Final = """\
import json, os, sys, torch, spottrain
from spottrain.techniques.activation_checkpointing import apply
sys.path.insert(0, os.environ["ROOT"])
from tests.support.blocks import Net

spottrain.seed(1)
model = Net()
apply(model, json.loads(os.environ["WANTED"]))
trainer = spottrain.Trainer(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    train_dataset=[torch.full((8,), i / 10) for i in range(20)],
    loss_fn=lambda model, batch: model(batch).square().mean(),
    max_steps=int(os.environ.get("STEPS", "8")),
    global_batch_size=4,
    deterministic=True,
)
print("digest", trainer.fit().digest)
"""


def digest(lab: Lab, at: str, wanted: Any, steps: int = 8) -> str:
    env = HOME | {"WANTED": json.dumps(wanted), "STEPS": str(steps)}
    run = lab.run(TRAINING, at=at, interval="4steps", env=env)
    run.end()
    assert run.code == 0, run.log
    return run.log.split("digest ")[1].split()[0]


def test_a_training_ends_with_the_same_weights_whatever_is_recomputed(lab: Lab) -> None:
    assert digest(lab, "none", "none") == digest(lab, "all", "all") == digest(lab, "two", 2)


# --- two ranks ------------------------------------------------------------------------------------------
RANKS: Final = """\
import copy, torch, torch.distributed as dist
from spottrain.techniques.compilation import warm_up
from spottrain.lifecycle.session import current
from spottrain.distributed import process_group
from torch.nn.parallel import DistributedDataParallel

world, cpu = current().world, torch.device("cpu")
process_group.join(world, cpu)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
outer = torch.compile(ddp, backend="aot_eager")
order = []


def step():
    outer(torch.randn(6, 4)).sum().backward()
    order.append("compiled")


if world.rank == 1:  # rank 0 has compiled and gone on to here before rank 1 begins
    dist.barrier()
warm_up(step, outer)
if world.rank == 0:
    dist.barrier()
print("clean", model[0].weight.grad is None, float(model[1].num_batches_tracked), flush=True)

want = 0
for rank in range(world.size):
    alone = copy.deepcopy(model)
    torch.manual_seed(rank)
    alone(torch.randn(6, 4)).sum().backward()
    want = want + alone[0].weight.grad / world.size
torch.manual_seed(world.rank)
step()
print("exchanged", torch.allclose(model[0].weight.grad, want, atol=1e-6), flush=True)
process_group.leave()
"""


@pytest.mark.heavy
def test_ranks_compile_without_each_other(lab: Lab) -> None:
    runs = lab.ranks(2, RANKS)
    for run in runs:
        run.end()
        assert "clean True 0.0" in run.log, run.log
        assert "exchanged True" in run.log, "after the first batch gradients are exchanged as ever"


# --- real memory ----------------------------------------------------------------------------------------
MEMORY: Final = """\
import ctypes, json, os, sys, torch
from spottrain.core.training_settings import ActivationCheckpointing
from spottrain.data.source import source
from spottrain.techniques.activation_checkpointing import apply
from spottrain.distributed.world import World
from spottrain.techniques.memory_fit import MemoryFit, StepMemory, sizes_up_to
from spottrain.techniques.precision import Precision
sys.path.insert(0, os.environ["ROOT"])
from tests.support.blocks import Net

M_MMAP_THRESHOLD = -3  # of glibc: each block that is freed goes back to the system, and counts no more
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)
model = Net(depth=6)
optimizer = torch.optim.AdamW(model.parameters())
cpu = torch.device("cpu")
memory = StepMemory(cpu)
assert memory.limit > 0
MB = 1 << 20


data = source(range(64), World(), global_batch_size=64, micro_batch_size=64,
              collate_fn=lambda samples: torch.ones(len(samples) * 1024, 8))
fit = MemoryFit("auto", ActivationCheckpointing(policy="none"), model=model, optimizer=optimizer, source=data,
                loss_of=lambda model, batch: model(batch).square().mean(), precision=Precision(name="fp32"),
                device=cpu, world=World())


def largest(limit):
    memory.limit = limit
    return fit.largest(sizes_up_to(64), memory)


def peak(size):
    memory.limit = 1 << 50
    return round(fit.used(size, memory) * memory.limit)


all_of_them, base, usual = largest(1 << 50), peak(1), peak(64)
some = largest((base + 31 * MB) * 10 // 9)  # a tenth stays free
apply(model, "all")
print("found", json.dumps([all_of_them, some, (usual - base) // MB, (peak(64) - base) // MB]))
"""


def test_on_a_cpu_the_peak_of_the_process_says_what_fits(lab: Lab) -> None:
    run = lab.run(MEMORY, env=HOME)
    run.end()
    assert "found [" in run.log, run.log
    everything, some, usual, recomputed = json.loads(run.log.split("found ")[1].splitlines()[0])
    assert everything == 64 and 8 <= some <= 16, run.log
    assert usual > 1.5 * recomputed > 0, f"MB above what one sample takes: {run.log}"


# --- steps in which nothing counts ------------------------------------------------------------------------
NOTHING_COUNTS = """\
import os, signal, time
import torch, spottrain

spottrain.seed(1)
data = [(torch.full((2,), float(i)), torch.tensor(float(i not in (0, 1, 4, 5))), i) for i in range(8)]
layers = [torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 1)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
loader = spottrain.data.loader(data, batch_size=2, shuffle=False)
run = spottrain.Run(model=model, optimizer=optimizer, data=loader, log_every=1)
parts, count = spottrain.techniques.accumulation.parts, lambda batch: float(batch[1].sum())
for epoch in run.epochs(2):
    for part in parts(loader, 1, model=model, count=count):
        losses = model(part.batch[0]).squeeze(-1).square()
        (losses[part.batch[1] > 0].mean() * part.weight).backward()
        if part.last:
            optimizer.step()
            optimizer.zero_grad()
            print(f"SAMPLES {run.global_step + 1} {part.batch[2].tolist()}\\n", end="", flush=True)
            if run.global_step + 1 == int(os.environ.get("STOP", "0")):
                os.kill(os.getpid(), signal.SIGTERM)
                while not run.should_stop:  # a thread hears of it
                    time.sleep(0.01)
            run.step_completed(loss=losses.mean())
run.finish()
"""


@pytest.mark.parametrize("stop", [2, 4])  # in an epoch, and at its end
def test_a_loop_over_steps_that_count_nothing_ends_and_goes_on_bit_for_bit(lab: Lab, stop: int) -> None:
    whole = lab.run(script=NOTHING_COUNTS, at="whole").done()
    assert whole.message.step == 8
    lab.run(script=NOTHING_COUNTS, env={"STOP": str(stop)}).ends(ExitCode.INTERRUPTED)
    rest = lab.run(script=NOTHING_COUNTS, attempt=2).done()
    told = [[line for line in run.log.splitlines() if line.startswith("SAMPLES")] for run in (whole, rest)]
    assert told[1] == told[0][stop:], "no sample twice, none left out"
    assert rest.digest == whole.digest
