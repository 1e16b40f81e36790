"""What a training changes beside its weights is there after an interruption; what cannot be is refused."""

from __future__ import annotations

from spottrain.contract import ExitCode

from tests.runs.conftest import Lab

HEAD = """\
import os, time
import torch, spottrain
from torch.nn.utils import prune

CASE, PAUSE = os.environ.get("CASE", ""), float(os.environ.get("PAUSE", "0"))


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x, x.sum()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
        self.drop, self.last = torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(2))
        self.register_buffer("mean", None)
        self.calls, self.hidden = 0, torch.zeros(1)

    def forward(self, x):
        y = self.last(self.drop(self.norm(self.first(x)).relu())).squeeze(-1)
        if self.training:
            self.scale *= 0.99
            self.calls += 1
            self.mean, self.hidden = y.detach().mean(), self.hidden * 0.5 + y.detach().mean()
        return y * self.scale * self.wide[0] + self.hidden + (self.mean or 0) + self.calls / 100


"""
LOOP = (
    HEAD
    + """\
spottrain.seed(3)
model = Net()
model.first.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 4, 9])
loader = spottrain.data.loader(Numbers(), batch_size=4, accumulation=2, shuffle=True)
run = spottrain.Run(model=model, optimizer=optimizer, scheduler=scheduler, data=loader, log_every=1)
for epoch in run.epochs(5):
    model.train()
    if epoch == 1:
        model.first.requires_grad_(True)
        optimizer.add_param_group({"params": model.first.parameters(), "lr": 1e-3})
    if epoch == 1 and CASE == "pruned":
        prune.l1_unstructured(model.first, "weight", 0.5)
    if epoch > 1:
        model.norm.eval()
        model.drop.p = 0.4
    losses = []
    for x, y in loader:
        run.poll()
        time.sleep(PAUSE)
        losses.append((model(x) - y).square().mean() / 2)
        losses[-1].backward()
        if len(losses) == 2:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            run.step_completed(loss=sum(losses).detach())
            losses = []
run.finish()
print("milestones", type(scheduler.milestones).__name__, scheduler.milestones[4])
"""
)


def test_a_loop_goes_on_with_all_that_it_has_changed(lab: Lab) -> None:
    plain = lab.run(LOOP, at="plain", attempt=1).done()
    first = lab.run(LOOP, attempt=1, env={"PAUSE": "0.05"}).until(" step=5 ").stopped()
    second = lab.run(LOOP, attempt=2, env={"PAUSE": "0.05"}).until(" step=11 ").stopped()
    third = lab.run(LOOP, attempt=3).done()
    assert first.losses | second.losses | third.losses == plain.losses
    assert third.digest == plain.digest and "milestones Counter 2" in third.log
    assert "event=override setting=param_groups" in second.log, "it stopped in the epoch that adds the group"


def test_a_model_that_becomes_another_is_refused_at_a_save_and_the_mended_script_goes_on(lab: Lab) -> None:
    pruned = lab.run(LOOP, attempt=1, interval="2steps", env={"CASE": "pruned", "PAUSE": "0.1"})
    pruned.ends(ExitCode.BAD_CONFIGURATION)
    assert "model.first.weight is gone, model.first.weight_orig is new" in pruned.message.message
    assert 3 <= max(pruned.losses) < 15 and lab.head["state"] == "released"
    mended = lab.run(LOOP, attempt=2).done()
    assert mended.digest == lab.alone(LOOP).digest


TRAINER = (
    HEAD
    + """\
torch.manual_seed(123)
model = Net()
model.first.requires_grad_(False)
compiled = []


def backend(graph, inputs):
    compiled.append(graph)
    return graph.forward


def loss(model, batch):
    time.sleep(PAUSE)
    model.first.requires_grad_(model.calls > 3)
    return (model(batch[0]) - batch[1]).square().mean()


given = torch.compile(model, backend=backend) if CASE == "compiled" else model
trainer = spottrain.Trainer(
    model=given, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), train_dataset=Numbers(),
    loss_fn=loss, max_steps=12, global_batch_size=4, log_every=1,
)
print("initial seed", torch.initial_seed())
result = trainer.fit()
print("graphs", len(compiled) > 0)
"""
)


def test_a_trainer_keeps_the_seed_and_goes_on_with_what_its_loss_has_changed(lab: Lab) -> None:
    plain = lab.run(TRAINER, at="plain", attempt=1).done()
    assert "initial seed 123" in plain.log
    first = lab.run(TRAINER, attempt=1, env={"PAUSE": "0.05"}).until(" step=6/").stopped()
    second = lab.run(TRAINER, attempt=2).done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest
    other = lab.run(TRAINER.replace("123", "7"), at="other", attempt=1).done()
    assert other.losses[1] != plain.losses[1]


def test_a_trainer_calls_a_compiled_model_as_it_was_given(lab: Lab) -> None:
    assert "graphs True" in lab.run(TRAINER, env={"CASE": "compiled"}).done().log
    both = lab.run(TRAINER, training='{"compile": true}', env={"CASE": "compiled"})
    both.ends(ExitCode.BAD_CONFIGURATION)
    assert "Trainer(model=...) is compiled already" in both.message.message


PLAIN_RUN = (
    "run = spottrain.Run(model=model, optimizer=optimizer, scheduler=scheduler, data=loader, log_every=1)"
)
ACCELERATED = """\
from accelerate import Accelerator
from spottrain.integrations.accelerate import AccelerateRun

accelerator = Accelerator(cpu=True)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
run = AccelerateRun(accelerator, data=loader, log_every=1)"""
ACCELERATE = LOOP.replace(PLAIN_RUN, ACCELERATED).rpartition("print(")[0]


def test_a_loop_of_accelerate_goes_on_with_all_that_it_has_changed(lab: Lab) -> None:
    plain = lab.run(ACCELERATE, at="plain", attempt=1).done()
    first = lab.run(ACCELERATE, attempt=1, env={"PAUSE": "0.05"}).until(" step=7 ").stopped()
    second = lab.run(ACCELERATE, attempt=2).done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest


DDP = """\
import torch, spottrain
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
torch.manual_seed(torch.distributed.get_rank())
first, unused = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
model = DistributedDataParallel(torch.nn.Sequential(first, unused), find_unused_parameters=True)
model.register_comm_hook(None, lambda _, bucket: print("hook") or exchange(bucket))


def exchange(bucket):
    tensor = bucket.buffer().div_(2)
    return torch.distributed.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        print("sample", i)
        return torch.full((4,), float(i))


def loss(model, batch):
    model.module[1] = torch.nn.Identity()
    found = model(batch).square().mean()
    model.module[1] = unused
    return found


spottrain.Trainer(
    model=model, optimizer="sgd", learning_rate=1e-4, train_dataset=Numbers(), loss_fn=loss, max_steps=2,
    global_batch_size=8,
).fit()
"""


def test_a_trainer_keeps_the_options_of_a_ddp_and_all_ranks_have_the_order_of_rank_0(lab: Lab) -> None:
    runs = lab.ranks(2, DDP, at="store")
    samples = [line for run in runs for line in run.done().log.splitlines() if line.startswith("sample")]
    assert len(samples) == len(set(samples)) == 16 and all("hook" in run.log for run in runs)
