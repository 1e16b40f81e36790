"""What fits into memory, found by two real processes with a model of FSDP2: they try in lockstep."""

from __future__ import annotations

from tests.runs.conftest import Lab
from tests.runs.test_techniques_ranks import BEGIN, found

TRIALS = (
    BEGIN
    + """
from spottrain.techniques import accumulation, activation_checkpointing
from spottrain.core.training_settings import ActivationCheckpointing
from spottrain.data.source import source
from spottrain.techniques.memory_fit import MemoryFit, sizes_up_to
from spottrain.techniques.precision import Precision


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.drop = torch.nn.Dropout(0.3)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.drop(self.layer(x)))


def build():
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[Block() for _ in range(3)])
    for p in model[1].parameters():
        p.requires_grad_(False)  # a teacher, which follows
    return spottrain.shard(model, layers=[Block])


class Metered:
    fails_softly = True
    size = 0

    def __init__(self, limit, each):
        self.limit, self.each = limit, each

    def begin(self):
        pass

    def peak(self):
        return 100 + self.each * self.size * (1 if SCALED["by"] is None else SCALED["by"])


SCALED = {"by": None}
memory = Metered(*[(10_000, 10), (1000, 20)][world.rank])  # rank 1 has less, and needs more
passes = []


def collated(samples):
    memory.size = len(samples)
    return torch.randn(memory.size, 4)


def loss_of(model, batch):
    passes.append(len(batch))
    with torch.no_grad():
        for p in model[1].parameters():
            p.mul_(0.5)
    return model(batch).square().mean()


def full(model):
    return [p.full_tensor().clone() for p in model.parameters()]


def largest(most):
    data = source(range(128), world, global_batch_size=128, micro_batch_size=64, collate_fn=collated)
    fit = MemoryFit(
        "auto",
        ActivationCheckpointing(policy="none"),
        model=model,
        optimizer=optimizer,
        loss_of=loss_of,
        source=data,
        precision=Precision(name="fp32"),
        device=torch.device("cpu"),
        world=world,
    )
    return fit.largest(sizes_up_to(most), memory)


def stepped(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5 + world.rank)
    for last in (False, True):
        with accumulation.sync(model, last=last):
            model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    return full(model)


model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before, random = full(model), torch.get_rng_state()
size = largest(64)  # 1 sample: batch norm cannot do it
sizes, passes = passes, []
for policy in activation_checkpointing.STEPS:
    SCALED["by"] = 4 - len(activation_checkpointing.apply(model, policy))
    if largest(16) == 16:
        break
activation_checkpointing.apply(model, "none")
say(
    size=size,
    sizes=sizes,
    policy=activation_checkpointing.described(policy),
    largest=max(passes),
    untouched=all(torch.equal(a, b) for a, b in zip(before, full(model))),
    same_numbers=torch.equal(random, torch.get_rng_state()),
    no_gradients=all(p.grad is None for p in model.parameters()),
    trains_as_if_new=all(torch.equal(a, b) for a, b in zip(stepped(model), stepped(build()))),
)
"""
)


def test_ranks_of_a_sharded_model_try_the_same_sizes_and_none_that_is_too_much_for_the_least_of_them(
    lab: Lab,
) -> None:
    first, second = found(lab, TRIALS)
    assert first == second, "they judge alike, though the first has room for all"
    assert first["size"] == 32, "740 of 900; 64 would be 1380"
    assert sorted(set(first["sizes"])) == [1, 2, 4, 8, 16, 32]
    assert first["policy"] == "every-2", "16 samples: 740 of 900; every-3 would be 1060, none 1380"
    assert first["untouched"] and first["same_numbers"] and first["no_gradients"]
    assert first["trains_as_if_new"]
    assert first["largest"] <= 16
