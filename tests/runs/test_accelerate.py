"""A loop around Accelerate: under `AccelerateRun`, and one that saves its own state by itself."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, profile_key

from tests.runs import foreign
from tests.runs.conftest import Lab, Start
from tests.runs.foreign import LOADS, Vehicle, stopped_at
from tests.runs.launched import OURS, Run
from tests.support.heavy import sample

pytest.importorskip("accelerate")

HEAD = """\
import os, signal, time
import torch, spottrain
from accelerate import Accelerator, DataLoaderConfiguration
from spottrain.integrations.accelerate import AccelerateRun

spottrain.seed(1)
STOP, HOLD, PARTIAL = (int(os.environ.get(name, "0")) for name in ("STOP", "HOLD", "PARTIAL"))


class Noisy(torch.utils.data.Dataset):
    def __init__(self, size=48):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + 0.01 * torch.randn(4), x.sum()


class Clean(Noisy):
    def __getitem__(self, i):
        return torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.tensor(i / 48)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return map(Noisy().__getitem__, range(48))


class Average:  # registered for checkpointing
    value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def act(step, whole):
    if step == (STOP if whole else PARTIAL) and os.environ.get("RANK", "1") == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    if 0 < STOP < step and "RANK" in os.environ:
        time.sleep(0.1)  # ranks agree on their last step beside the steps, which are short here
    if step == HOLD:
        print("holding", flush=True)
        time.sleep(60)  # until the test kills it


config = DataLoaderConfiguration(**eval(os.environ.get("CONFIG", "{}")))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
model = torch.nn.Sequential(
    torch.nn.Linear(4, int(os.environ.get("WIDTH", "16"))), torch.nn.Dropout(0.1), torch.nn.LazyLinear(1)
)
model(torch.zeros(1, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
"""
SCRIPT = (
    HEAD
    + """\
loader = spottrain.data.loader(Noisy(), batch_size=4, accumulation=2, shuffle=True)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
average = Average()
accelerator.register_for_checkpointing(average)

run = AccelerateRun(accelerator, data=loader, max_steps=18, log_every=1)
for x, y in run.batches(loader):
    run.poll()
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(x).squeeze(-1), y)
        accelerator.backward(loss)
        act(run.global_step + 1, accelerator.sync_gradients)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        average.value += 0.1 * (float(loss.detach()) - average.value)
        run.step_completed(loss=loss)
run.finish()
print(f"average={average.value:.9g}")
"""
)
OWN = Vehicle(
    script=SCRIPT, loading=SCRIPT.replace("\noptimizer =", f"\nmodel.{LOADS}\noptimizer =", 1), steps=18
)

zygote = foreign.preloading("accelerate")
base = foreign.base_of(SCRIPT)


def _average(log: str) -> str:
    return log.rsplit("average=", 1)[1].split()[0]


@pytest.mark.heavy
def test_a_loop_begins_from_other_weights_and_goes_on_bit_for_bit(lab: Lab, base: Path) -> None:
    last = foreign.begins_from_other_weights_and_goes_on(lab, OWN, base)
    assert _average(last.log) == _average((lab.folder / "run-1.log").read_text())


@pytest.mark.heavy
def test_two_ranks_begin_from_other_weights_and_go_on(lab: Lab, base: Path) -> None:
    foreign.two_ranks_begin_from_other_weights_and_go_on(lab, OWN, base)


def test_a_stop_between_two_micro_batches_does_not_move_accelerates_count_of_them(
    lab: Lab, others: Lab
) -> None:
    plain = others.alone(SCRIPT)
    first = lab.run(SCRIPT, attempt=1, env={"PARTIAL": "10"}).ends(ExitCode.INTERRUPTED)
    second = lab.run(SCRIPT, attempt=2).done()
    assert max(first.losses) == 9 and first.losses | second.losses == plain.losses
    assert second.digest == plain.digest


SEVERAL = (
    HEAD.partition("config =")[0]
    + """\
accelerator = Accelerator(cpu=True)
one, other, registered = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), torch.nn.Linear(2, 1)
factor = torch.nn.Parameter(torch.ones(()))
adam, sgd = torch.optim.AdamW(one.parameters()), torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
sgd.add_param_group({"params": [factor, *registered.parameters()]})
one, other, adam, sgd = accelerator.prepare(one, other, adam, sgd)
rates = accelerator.prepare(*(torch.optim.lr_scheduler.StepLR(each, 2) for each in (adam, sgd)))
accelerator.register_for_checkpointing(registered)
run = AccelerateRun(accelerator, max_steps=10, log_every=1)
while not run.done:
    loss = (other(one(torch.randn(3, 4))) * factor + registered(torch.ones(2))).square().mean()
    accelerator.backward(loss)
    act(run.global_step + 1, True)
    for each in (adam, sgd, *rates):
        each.step()
    adam.zero_grad(), sgd.zero_grad()
    run.step_completed(loss=loss)
run.finish()
"""
)


@pytest.mark.heavy
def test_several_models_and_what_is_trained_beside_them_go_on_bit_for_bit(lab: Lab, others: Lab) -> None:
    plain = others.alone(SEVERAL)
    first, second = stopped_at(lab, SEVERAL, 5, env={}), lab.run(SEVERAL, attempt=2).done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest


EPOCHS = (
    HEAD
    + """\
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
MAKE
for epoch in run.epochs(3):
    order = []
    for x, y in PASS:
        order += y.tolist()
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x).squeeze(-1), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            act(run.global_step + 1, True)
            run.step_completed(loss=loss)
    scheduler.step()
    print("after", epoch, run.global_step, scheduler.get_last_lr(), float(torch.rand(())), flush=True)
    print("order", hash(tuple(order)), flush=True)
run.finish()
"""
)
LOADERS = {
    "ours": (
        "loader = spottrain.data.loader(Noisy(), batch_size=4, accumulation=2, shuffle=True)\n"
        "run = AccelerateRun(accelerator, data=loader, log_every=1)\n",
        "loader",
    ),
    "prepared": (
        "loader = accelerator.prepare(LOADER)\nrun = AccelerateRun(accelerator, log_every=1)\n",
        "run.batches(loader)",
    ),
}
SHUFFLED = "torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)"


def _script(kind: str, loader: str = SHUFFLED) -> str:
    make, passing = LOADERS[kind]
    return EPOCHS.replace("MAKE\n", make).replace("PASS", passing).replace("LOADER", loader)


def _after(*runs: Run) -> list[str]:
    return [line for run in runs for line in run.log.splitlines() if line.startswith("after ")]


@pytest.mark.parametrize(
    ("kind", "step"),
    sample(itertools.product(LOADERS, (8, 12)), ("ours", 12), ("prepared", 12)),
)
def test_work_after_an_epoch_is_done_by_the_next_attempt(lab: Lab, others: Lab, kind: str, step: int) -> None:
    """An epoch has six steps."""
    plain = others.alone(_script(kind))
    assert max(plain.losses) == 18
    first = stopped_at(lab, _script(kind), step, env={})
    second = lab.run(_script(kind), attempt=2, interval="1h").done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest
    assert _after(first, second) == _after(plain)


def _orders(run: Run) -> set[str]:
    return {line for line in run.log.splitlines() if line.startswith("order ")}


# --- loaders that Accelerate has prepared -----------------------------------------------------------------
LOADED = "torch.utils.data.DataLoader(Noisy(), batch_size=4"
PREPARED = {
    "shuffled": (SHUFFLED, "{}"),
    "seedable": (SHUFFLED, "{'use_seedable_sampler': True}"),
    "weighted": (f"{LOADED}, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 48, 48))", "{}"),
    "own generator": (f"{LOADED}, shuffle=True, generator=torch.Generator().manual_seed(7))", "{}"),
    "dispatched": (SHUFFLED, "{'dispatch_batches': True}"),
    "stream": ("torch.utils.data.DataLoader(Stream(), batch_size=4)", "{}"),
    "workers": (f"{LOADED}, shuffle=True, num_workers=2)".replace("Noisy", "Clean"), "{}"),
    "not a multiple": (f"{LOADED}, shuffle=True)".replace("Noisy()", "Noisy(45)"), "{}"),
}


@pytest.mark.parametrize(
    "which",
    sample(PREPARED, "shuffled", "dispatched"),
)
def test_a_prepared_loader_is_gone_on_with_in_the_middle_of_its_pass(
    lab: Lab, others: Lab, which: str
) -> None:
    loader, config = PREPARED[which]
    script, env = _script("prepared", loader), {"CONFIG": config}
    plain = others.alone(script, env)
    assert len(_orders(plain)) == (1 if which == "stream" else 3), "each epoch has its own order"
    first = stopped_at(lab, script, 8, env=env)
    second = lab.run(script, attempt=2, interval="1h", env=env).done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest


@pytest.mark.parametrize("config", sample(["'dispatch_batches': True", "'split_batches': True", ""], ""))
def test_two_ranks_go_on_in_the_middle_of_a_pass_over_a_prepared_loader(lab: Lab, config: str) -> None:
    script, env = _script("prepared"), {"CONFIG": f"{{{config}}}"}
    plain = lab.run(script, nproc=2, at="plain", attempt=1, env=env).done(300)
    lab.run(script, nproc=2, attempt=1, env=env | {"STOP": "4"}).ends(ExitCode.INTERRUPTED, 300)
    second = lab.run(script, nproc=2, attempt=2, env=env).done(300)
    assert second.digest == plain.digest


def test_epochs_of_a_number_of_steps_go_on_after_the_last_step_of_one(lab: Lab, others: Lab) -> None:
    script = _script("prepared").replace("run.epochs(3)", "run.epochs(3, steps=4)")
    env = {"CONFIG": "{'use_seedable_sampler': True}"}
    plain = others.alone(script, env)
    assert max(plain.losses) == 12 and len(_orders(plain)) == 3
    first = stopped_at(lab, script, 4, env=env)
    second = lab.run(script, attempt=2, interval="1h", env=env).done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest


def test_a_loader_that_keeps_its_own_position_is_refused(lab: Lab) -> None:
    env = {"CONFIG": "{'use_stateful_dataloader': True}"}
    run = lab.run(_script("prepared"), env=env).ends(ExitCode.BAD_CONFIGURATION)
    assert not run.losses and "use_stateful_dataloader=True" in run.message.message


@pytest.mark.parametrize("batches", ["accelerator.skip_first_batches(loader, 2 * run.epoch_step)", "loader"])
def test_a_loop_whose_position_is_not_seen_is_refused_at_its_first_step(lab: Lab, batches: str) -> None:
    script = _script("prepared").replace("run.batches(loader)", batches)
    run = lab.run(script).ends(ExitCode.BAD_CONFIGURATION)
    assert not run.losses and "for batch in run.batches(loader)" in run.message.message


def test_another_model_is_refused_and_a_run_of_the_same_objects_goes_on_and_back(
    lab: Lab, others: Lab
) -> None:
    stopped_at(lab, SCRIPT, 3, env={})
    model = lab.run(SCRIPT, attempt=2, env={"WIDTH": "8"}).ends(ExitCode.BAD_CONFIGURATION)
    assert "does not match this training" in model.message.message
    objects = "model=model, optimizer=optimizer, scheduler=scheduler.scheduler, extra={'0': average}"
    own = SCRIPT.replace("AccelerateRun(accelerator", f"spottrain.Run({objects}")
    lab.run(own, attempt=3, interval="1h", env={"STOP": "9"}).ends(ExitCode.INTERRUPTED)
    last = lab.run(SCRIPT, attempt=4).done()
    assert last.digest == others.alone(SCRIPT).digest and min(last.losses) == 10


def test_what_the_accelerator_gets_after_the_run_is_refused_at_the_first_step(lab: Lab) -> None:
    late = "accelerator.register_for_checkpointing(Average())\nfor x, y in"
    run = lab.run(SCRIPT.replace("for x, y in", late, 1)).ends(ExitCode.BAD_CONFIGURATION)
    assert not run.losses and "create the run after it" in run.message.message


VALIDATES = """\
    scheduler.step()
    if epoch == 0 and os.environ.get("WORK"):
        print("working", flush=True)
        time.sleep(60)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("kind", LOADERS)
def test_a_stop_between_two_steps_saves_the_step_before_unless_a_prepared_loader_gives_the_batches(
    lab: Lab, others: Lab, kind: str
) -> None:
    script = _script(kind).replace("    scheduler.step()\n", VALIDATES)
    first = lab.run(script, attempt=1, interval="1h", env={"WORK": "1"}).until("working").send()
    if kind == "prepared":
        first.ends(ExitCode.INTERRUPTED_LOST, 60)
        return
    first.ends(ExitCode.INTERRUPTED, 60)
    assert first.message.step == first.message.durableStep == 6
    plain, second = others.alone(script), lab.run(script, attempt=2, interval="1h").done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest
    assert _after(second) == _after(plain)


def test_the_manifest_ends_it_profiles_it_and_what_is_not_taken_is_told(lab: Lab) -> None:
    training = '{"maxSteps": 6, "emaDecay": 0.9, "profile": {"wait": 1, "warmup": 1, "active": 2}}'
    run = lab.run(SCRIPT, training=training).done()
    assert "event=override setting=max_steps manifest=6 script=18" in run.log and "step=6/6" in run.log
    assert "about=training fields=emaDecay " in run.log
    assert run.message.ignoredSettings == "emaDecay"
    assert len(list((lab.folder / "store" / profile_key(1, 0, "")).iterdir())) == 2


BAD = {
    "nothing prepared": ("AccelerateRun(accelerator)\n", "AccelerateRun(accelerator) has no model yet"),
    "a prepared loader": (
        "model, loader = accelerator.prepare(model, torch.utils.data.DataLoader(Noisy()))\n"
        "AccelerateRun(accelerator, data=loader)\n",
        "a loader that Accelerate has prepared",
    ),
    "a scheduler that is not prepared": (
        "model, optimizer = accelerator.prepare(model, optimizer)\nAccelerateRun(accelerator)\n",
        "its rates would start again from the beginning: accelerator.prepare(model, optimizer, scheduler)",
    ),
    "weights in a form of their own": (
        "model, optimizer = accelerator.prepare(model, optimizer)\n"
        "accelerator.state.distributed_type = type(accelerator.distributed_type).DEEPSPEED\n"
        "AccelerateRun(accelerator)\n",
        "weights that Accelerate has divided by DEEPSPEED",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(lab: Lab, case: str) -> None:
    code, says = BAD[case]
    assert says in lab.run(HEAD + code).ends(ExitCode.BAD_CONFIGURATION).message.message


# --- a loop that saves its own state ----------------------------------------------------------------------
ITS_OWN = """\
import os, time
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    accelerator.save_state("state")
print("saved", flush=True)
time.sleep(float(os.environ.get("REST", "0")))
"""


@pytest.mark.heavy
def test_stopped_it_does_not_claim_that_nothing_was_lost(start: Start) -> None:
    run = start(ITS_OWN, *OURS, "train.py", REST="60", **{Env.JOB_UID: "uid"})
    run.until("saved", seconds=300).send().ends(ExitCode.INTERRUPTED_LOST)
    assert "spottrain sync" in run.message.message and "from scratch" not in run.message.message
