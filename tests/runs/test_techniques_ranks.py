"""Techniques on two real processes with gloo: what each rank finds is printed as one line and judged here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from spottrain.contract import ExitCode

from tests.runs.conftest import Lab

BEGIN = """\
import json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import spottrain
from spottrain.checkpoint.tree import Flattened, unflatten
from spottrain.lifecycle.session import current
from spottrain.distributed import process_group

world = current().world
process_group.join(world, torch.device("cpu"))


def say(**facts):
    sys.stdout.write("FOUND " + json.dumps(facts) + "\\n")
    sys.stdout.flush()


def stored(state):
    flat = Flattened(state)
    kept = [leaf.tensor.clone() for leaf in flat.leaves]
    return unflatten(json.loads(json.dumps(flat.plain)), lambda number: kept[number])


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])

"""

ACCUMULATION = (
    BEGIN
    + """
from spottrain.techniques import accumulation

COUNTS = [[12, 3, 7, 1, 5], [2, 9, 0]]  # tokens of each micro-batch, by rank: unequal in both ways


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    found = []
    for count in COUNTS[rank]:
        labels = torch.randint(3, (2, 6), generator=generator)
        labels.view(-1)[count:] = -100
        found.append((torch.randn(2, 6, 4, generator=generator, dtype=torch.float64), labels))
    return found


def build():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()


def mean_loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def counted(batch):
    return int((batch[1] != -100).sum())


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


plain = build()
optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
for begin in range(0, 6, 2):
    big = [batch for rank in (0, 1) for batch in batches(rank)[begin : begin + 2]]
    mean_loss(plain, tuple(torch.cat(each) for each in zip(*big))).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

inner = build()
model = spottrain.shard(inner, layers=[torch.nn.Linear]) if "SHARD" in os.environ else DDP(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
steps, exchanges, seen = 0, 0, []
for part in accumulation.parts(batches(world.rank), 2, model=model, count=counted):
    with part.sync:
        if isinstance(model, DDP):
            exchanges += model.require_backward_grad_sync
        (mean_loss(model, part.batch) * part.weight).backward()
    seen.append([counted(part.batch), part.weight])
    if part.last:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
off = max(float((whole(a) - b).abs().max()) for a, b in zip(inner.parameters(), plain.parameters()))

# The same first step in a loop that has pairs of a micro-batch and its share by samples.
one, first = build(), batches(world.rank)[:2]
big = [batch for rank in (0, 1) for batch in batches(rank)[:2]]
mean_loss(one, tuple(torch.cat(each) for each in zip(*big))).backward()
other = DDP(build())
reweighed = accumulation.Reweighed(counted, world)([(batch, 0.25) for batch in first])
for number, (batch, share) in enumerate(reweighed, 1):
    with accumulation.sync(other, last=number == 2):
        (mean_loss(other, batch) * share * world.size).backward()
pairs = zip(other.module.parameters(), one.parameters())
say(
    steps=steps,
    exchanges=exchanges,
    seen=seen,
    off=off,
    weights=[share * world.size for _, share in reweighed],
    reweighed_off=max(float((a.grad - b.grad).abs().max()) for a, b in pairs),
)
"""
)

AVERAGE = (
    BEGIN
    + """
from spottrain.techniques.ema import EMA


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        self.scale = torch.nn.Parameter(torch.full((3,), 2.0))  # the root's own, which it does not give back

    def forward(self, x):
        return self.layers(x) * self.scale


def build():
    return Model()


def train(model, optimizer, ema, steps):
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ema.update(step)


def evaluate(model):
    with torch.no_grad():
        return model(torch.ones(3, 4))


plain = build()
alone = EMA(plain, decay=0.8)
train(plain, torch.optim.SGD(plain.parameters(), lr=0.5), alone, range(1, 6))

model = spottrain.shard(build(), layers=[torch.nn.Linear])
ema = EMA(model, decay=0.8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
train(model, optimizer, ema, range(1, 6))
sharded = {name: mean.full_tensor() for name, mean in ema.state_dict()["average"].items()}
mine = alone.state_dict()["average"]

before = {name: p.full_tensor() for name, p in model.named_parameters()}
outside = evaluate(model)
with ema.applied():
    inside = evaluate(model)
    evaluate(model)
again = evaluate(model)
with alone.applied():
    expected = evaluate(plain)
model.reshard()
after = {name: p.full_tensor() for name, p in model.named_parameters()}

other = EMA(model, decay=0.8)
other.load_state_dict({"average": stored(mine), "updated": 5})
back = EMA(plain, decay=0.8)
back.load_state_dict({"average": sharded, "updated": 5})
parts = {name: mean.to_local() for name, mean in ema.state_dict()["average"].items()}
third = EMA(model, decay=0.8)
third.load_state_dict({"average": parts, "updated": 5})
say(
    same_average=max(float((sharded[n] - mine[n]).abs().max()) for n in mine) < 1e-6,
    names=sorted(sharded) == sorted(mine),
    evaluates_average=torch.allclose(inside, expected, atol=1e-6),
    and_not_the_weights=not torch.allclose(inside, outside, atol=1e-4),
    back_to_the_weights=torch.equal(again, outside),
    exact=all(torch.equal(before[n], after[n]) for n in before),
    from_whole=all(torch.equal(m.full_tensor(), mine[n]) for n, m in other.state_dict()["average"].items()),
    to_one=all(torch.equal(m, sharded[n]) for n, m in back.state_dict()["average"].items()),
    from_parts=all(
        torch.equal(m.full_tensor(), sharded[n]) for n, m in third.state_dict()["average"].items()
    ),
)
"""
)

FORMATS = (
    BEGIN
    + """
from spottrain.techniques import Amp, precision

GPUS = json.loads(os.environ["GPUS"])
name = GPUS[world.rank]
has = precision.DeviceFacts(type="cpu" if name == "CPU" else "cuda", name=name, bf16=name == "A10G")
precision.facts_of = lambda device: has


def trainer(wanted):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    return spottrain.Trainer(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        train_dataset=[torch.full((4,), float(i)) for i in range(16)],
        loss_fn=lambda model, batch: model(batch).float().square().mean(),
        max_steps=2,
        global_batch_size=4,
        precision=wanted,
    )


try:
    say(amp=Amp("auto", "cpu").precision.name, trainer=trainer("auto").precision.name)
finally:
    dist.destroy_process_group()
try:
    Amp("auto", "cpu")
except spottrain.errors.ConfigurationError as error:
    say(alone=str(error), named=Amp("fp16", "cpu").precision.name)
"""
)


def found(
    lab: Lab, script: str, *, ranks: int = 2, env: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """What the ranks say, once all have ended well."""
    runs = lab.ranks(ranks, script, at="", env={"OMP_NUM_THREADS": "1"} | (env or {}))
    codes = [run.end() for run in runs]
    assert codes == [ExitCode.DONE] * ranks, "\n".join(run.log for run in runs)
    lines = [line for run in runs for line in run.log.splitlines() if line.startswith("FOUND ")]
    return [json.loads(line.removeprefix("FOUND ")) for line in lines]


# --- number formats -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        (["A10G", "T4"], "fp16"),
        (["A10G", "A10G"], "bf16"),
        (["T4", "CPU"], "fp32"),
    ],
)
def test_ranks_on_unequal_devices_take_the_format_that_all_are_good_at_and_none_by_rank(
    lab: Lab, gpus: list[str], name: str
) -> None:
    ranks = found(lab, FORMATS, env={"GPUS": json.dumps(gpus)})
    of_all = [each for each in ranks if "amp" in each]
    assert [(each["amp"], each["trainer"]) for each in of_all] == [(name, name)] * 2
    alone = [each for each in ranks if "alone" in each]
    assert len(alone) == 2 and all("init_process_group" in each["alone"] for each in alone)
    assert [each["named"] for each in alone] == ["fp16"] * 2, "a format that is named asks nobody"


# --- accumulation ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_unequal_counts_over_ranks_and_micro_batches_are_one_big_batch(lab: Lab, kind: str) -> None:
    first, second = found(lab, ACCUMULATION, env={"SHARD": "1"} if kind == "FSDP2" else {})
    for rank in (first, second):
        assert rank["steps"] == 3 and rank["off"] < 1e-12 and rank["reweighed_off"] < 1e-12
    of_both = first["weights"] + second["weights"]
    assert of_both == pytest.approx([2 * tokens / 26 for tokens in (12, 3, 2, 9)])
    assert [count for count, _ in first["seen"]] == [12, 3, 7, 1, 5]
    assert sum(weight for _, weight in first["seen"] + second["seen"]) == pytest.approx(3 * 2)
    weights = [weight for _, weight in second["seen"]]
    if kind == "DDP":
        assert first["exchanges"] == second["exchanges"] == 3, "one for each step"
        assert weights[2:] == [0.0, 0.0], "nothing to count, then no data: a filler for each exchange"
    else:
        assert weights[2:] == [0.0, 0.0, 0.0], "every forward pass gathers, so as many as on the other rank"


# --- average of the weights -----------------------------------------------------------------------------
def test_the_average_of_a_sharded_model_is_that_of_the_whole_one(lab: Lab) -> None:
    for rank in found(lab, AVERAGE):
        assert all(rank.values()), rank


# --- evaluation -----------------------------------------------------------------------------------------
EVALUATION = """\
import json, os, torch
import torch.distributed as dist
from contextlib import nullcontext
from spottrain.training.evaluation import Evaluation
from spottrain.distributed import process_group
from spottrain.distributed.world import World
import spottrain

world = World.from_env(os.environ)
process_group.join(world, torch.device("cpu"))
calls, reduce, batches = [], dist.all_reduce, []


def counted(value, *args, **more):
    calls.append(1)
    return reduce(value, *args, **more)


dist.all_reduce = counted


def measure(model, batch):
    batches.append(1)
    return {"loss": model(batch).mean(), "largest": batch.max(), "smallest": batch.min()}


def evaluate(world):
    calls.clear(), batches.clear()
    it = Evaluation(
        dataset=[torch.tensor([float(n)]) for n in range(40)], measure=measure, batch_size=2,
        device=torch.device("cpu"), autocast=nullcontext, workers=0, collate=None, world=world,
    )
    return it.run(torch.nn.Identity(), lambda: len(batches) == stop_at)


stop_at = None
alone, both = evaluate(World()), evaluate(world)
waits, batches_done = len(calls), len(batches)
stop_at = 6
found = dict(alone=alone, both=both, waits=waits, batches=batches_done, cut=evaluate(world))
dist.barrier()
print("FOUND " + json.dumps(found), flush=True)
"""


def test_ranks_evaluate_without_waiting_for_each_other_at_each_batch(lab: Lab) -> None:
    first, second = found(lab, EVALUATION)
    assert first == second
    assert first["both"]["loss"] == first["alone"]["loss"] == 19.5
    assert first["both"].keys() == first["alone"].keys()
    assert (first["batches"], first["waits"]) == (10, 1), "the sums of all figures, in the end"
    assert first["cut"] is None
