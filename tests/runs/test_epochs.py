"""The end of an epoch: an attempt that was ended at an epoch's last step does what the loop has after it.

Real processes that are told to stop, or killed, at that very step, against one that was left alone: every
loss, every learning rate and every validation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from spottrain.contract import ExitCode

from tests.runs.conftest import Lab
from tests.runs.launched import Run
from tests.support.heavy import sample

HEAD = """\
import os, signal, time
import torch, spottrain

spottrain.seed(3)
torch.use_deterministic_algorithms(True)
STOP = int(os.environ.get("STOP", "0"))
HOLD = int(os.environ.get("HOLD", "0"))
WORKERS = int(os.environ.get("WORKERS", "0"))


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + NOISE * torch.randn(4), x.sum()


NOISE = 0.01
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
held_out = torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True)  # draws from torch's random state


def train(batch):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(batch[0]).squeeze(-1), batch[1])
    loss.backward()
    optimizer.step()
    if run.global_step + 1 == STOP:
        os.kill(os.getpid(), signal.SIGTERM)
    return loss


def validate(epoch):
    if HOLD and run.global_step == HOLD:
        print("holding", flush=True)
        time.sleep(60)  # until the test kills it
    model.eval()
    with torch.no_grad():
        loss = sum(torch.nn.functional.mse_loss(model(x).squeeze(-1), y) for x, y in held_out)
    model.train()
    lr = optimizer.param_groups[0]["lr"]
    print(f"validated {epoch} step {run.global_step} lr {lr:.9g} {loss:.9g}\\n", end="", flush=True)
"""

LOADER = "loader = spottrain.data.loader(Noisy(), batch_size=8, num_workers=WORKERS, shuffle=True)\n"
SAMPLER = (
    "NOISE = 0.0\n"  # with workers it is another one after a resume
    "sampler = spottrain.data.BatchSampler(Noisy(), batch_size=8, shuffle=True)\n"
    "loader = torch.utils.data.DataLoader(\n"
    "    Noisy(), batch_sampler=sampler, generator=torch.Generator(), num_workers=WORKERS\n"
    ")\n"
)
STATEFUL = (
    "from torchdata.stateful_dataloader import StatefulDataLoader\n"
    "NOISE = 0.0\n"
    "loader = StatefulDataLoader(\n"
    "    Noisy(), batch_size=8, shuffle=True, num_workers=WORKERS\n"
    ")\n"
)
RUN = (
    "run = spottrain.Run(\n"
    "    model=model, optimizer=optimizer, scheduler=scheduler, data=loader, log_every=1\n"
    ")\n"
)
EPOCHS = """\
for epoch in run.epochs(4):
    for batch in loader:
        run.step_completed(loss=train(batch))
    scheduler.step()
    validate(epoch)
run.finish()
"""
PULLED = EPOCHS.replace("in loader:", "in run.batches(loader):")
LATE = """\
while run.global_step < 20:
    for batch in loader:
        run.step_completed(loss=train(batch))
    scheduler.step()
    validate(run.epoch)
run.finish()
"""

LOOPS = {
    "epochs": HEAD + LOADER + RUN + EPOCHS,
    "while": HEAD + LOADER + RUN + LATE,
    "sampler": HEAD + SAMPLER + RUN + EPOCHS,
    "stateful": HEAD + STATEFUL + RUN + PULLED,
}


def validated(*runs: Run) -> list[str]:
    return [line for run in runs for line in run.log.splitlines() if line.startswith("validated ")]


def rates(*runs: Run) -> dict[int, str]:
    found = [re.findall(r" step=(\d+).* lr=(\S+)", run.log) for run in runs]
    return {int(step): rate for each in found for step, rate in each}


def left_alone(others: Lab, script: str, env: Mapping[str, str]) -> Run:
    plain = others.alone(script, env)
    assert len(plain.losses) >= 18 and len(validated(plain)) >= 4, plain.log
    return plain


def the_same(first: Run, second: Run, plain: Run) -> None:
    second.done()
    assert first.losses | second.losses == plain.losses
    assert rates(first, second) == rates(plain)
    assert validated(first, second) == validated(plain)
    assert second.digest == plain.digest


def stopped(lab: Lab, script: str, step: int, env: Mapping[str, str]) -> Run:
    first = lab.run(script, attempt=1, interval="1h", env={**env, "STOP": str(step)}).ends(
        ExitCode.INTERRUPTED
    )
    assert first.message.durableStep == step
    return first


def killed(lab: Lab, script: str, step: int, env: Mapping[str, str]) -> Run:
    """In the work after an epoch, when its last step is durable."""
    first = lab.run(script, attempt=1, interval=f"{step}steps", env={**env, "HOLD": str(step)})
    first.until(f"committed step={step} ").until("holding")
    first.killed()
    return first


@pytest.mark.parametrize(
    ("loop", "workers"),
    sample(
        [("while", "0"), ("epochs", "2"), ("sampler", "2"), ("stateful", "2")],
        *(("while", "0"), ("sampler", "2")),
    ),
)
def test_work_after_an_epochs_last_step_is_done_by_the_next_attempt(
    lab: Lab, others: Lab, loop: str, workers: str
) -> None:
    script, env = LOOPS[loop], {"WORKERS": workers}
    plain = left_alone(others, script, env)
    the_same(stopped(lab, script, 10, env), lab.run(script, attempt=2, interval="1h", env=env), plain)


@pytest.mark.parametrize(
    ("loop", "step"), sample([("epochs", 10), ("epochs", 20), ("stateful", 10)], ("epochs", 20))
)
def test_a_kill_in_the_work_after_an_epochs_last_step_has_it_done_again(
    lab: Lab, others: Lab, loop: str, step: int
) -> None:
    script = LOOPS[loop]
    plain = left_alone(others, script, {})
    the_same(killed(lab, script, step, {}), lab.run(script, attempt=2, interval="1h"), plain)


REFUSED = {
    "epoch without data": (
        RUN.replace(" data=loader,", "") + "print(run.epoch)\n",
        "run.epoch is not known: Run(data=...) was not given spottrain.data.loader(...)",
    ),
    "epoch of a stream": (STATEFUL + RUN + "print(run.epoch)\n", "run.epoch is not known"),
    "a step of no epoch": (LOADER + RUN + "run.epoch_step\n", "iterate `for epoch in run.epochs(n)`"),
    "no end": (LOADER + RUN + "next(run.batches(loader))\n", "Run.batches needs an end"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loop_that_would_count_wrongly_after_an_interruption_is_refused_before_one(
    lab: Lab, case: str
) -> None:
    code, says = REFUSED[case]
    run = lab.run(HEAD + code, interval="1h").ends(ExitCode.BAD_CONFIGURATION)
    assert says in run.message.message


POLLED = (
    HEAD
    + LOADER
    + RUN
    + EPOCHS.replace(
        "    scheduler.step()\n    validate(epoch)\n",
        """\
    for number in range(3):
        run.poll()
        torch.rand(1)
        if run.global_step == int(os.environ.get("STOP_AFTER", "0")) and number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    validate(epoch)
    scheduler.step()
""",
    )
)


def test_a_poll_in_the_work_after_an_epoch_leaves_and_the_next_attempt_does_all_of_it(
    lab: Lab, others: Lab
) -> None:
    plain = left_alone(others, POLLED, {})
    first = lab.run(POLLED, attempt=1, interval="1h", env={"STOP_AFTER": "10"}).ends(ExitCode.INTERRUPTED)
    assert len(validated(first)) == 1 and first.message.durableStep == 10
    the_same(first, lab.run(POLLED, attempt=2, interval="1h"), plain)


TRAINER = (
    HEAD.split("scheduler = ")[0]
    + """\
def loss(model, batch):
    if model.training and trainer.step + 1 == STOP:
        os.kill(os.getpid(), signal.SIGTERM)
    return torch.nn.functional.mse_loss(model(batch[0]).squeeze(-1), batch[1])


trainer = spottrain.Trainer(
    model=model, optimizer=optimizer, train_dataset=Noisy(), eval_dataset=Noisy(), loss_fn=loss,
    epochs=4, global_batch_size=8,
    log_every=1, schedule="cosine", deterministic=True, num_workers=WORKERS,
)
trainer.fit()
"""
)


@pytest.mark.parametrize("step", sample((10, 11), 10))
def test_a_trainer_that_is_stopped_at_an_epochs_last_step_evaluates_once(
    lab: Lab, others: Lab, step: int
) -> None:
    def evaluated(*runs: Run) -> list[tuple[str, ...]]:
        return [
            found for run in runs for found in re.findall(r"evaluated step=(\d+) eval_loss=(\S+)", run.log)
        ]

    plain = others.alone(TRAINER)
    assert [each[0] for each in evaluated(plain)] == ["5", "10", "15", "20"]
    first = stopped(lab, TRAINER, step, {})
    second = lab.run(TRAINER, attempt=2, interval="1h").done()
    assert first.losses | second.losses == plain.losses and rates(first, second) == rates(plain)
    assert evaluated(first, second) == evaluated(plain) and second.digest == plain.digest


# --- docs/own-loop.md -------------------------------------------------------------------------------------
DOCS = Path(__file__).resolve().parents[2] / "docs" / "own-loop.md"
WITH = (
    HEAD.replace('print(f"validated {epoch}', 'print(f"validated {run.global_step}').replace(
        "def validate(epoch)", "def validate(model)"
    )
    + """\
dataset = Noisy()
loader = spottrain.data.loader(dataset, batch_size=8, shuffle=True)


def get_batch(split):
    return next(iter(torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)))


def loss_of(model, batch):
    if run.global_step + 1 == STOP:
        os.kill(os.getpid(), signal.SIGTERM)
    return torch.nn.functional.mse_loss(model(batch[0]).squeeze(-1), batch[1])


"""
)


def listings() -> dict[str, str]:
    """The loops of the page, by what only one of them has."""
    found = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    marks = {
        "steps": "in place of",
        "epochs": "run.epochs(",
        "ahead": "run.ahead(",
        "extra": "extra=extra",
    }
    return {name: next(each for each in found if mark in each) for name, mark in marks.items()}


@pytest.mark.parametrize("name", sample(("steps", "epochs", "ahead", "extra"), "epochs"))
def test_the_loops_of_the_page_are_exact_as_they_stand(lab: Lab, others: Lab, name: str) -> None:
    loop = listings()[name].replace("1000", "12").replace("epochs(10)", "epochs(6)")
    script = (WITH if "scheduler" in loop else re.sub("^scheduler = .*$", "", WITH, flags=re.M)) + loop
    plain = others.alone(script)
    assert plain.message.step == 12
    first = lab.run(script, attempt=1, interval="1h", env={"STOP": "8"}).ends(ExitCode.INTERRUPTED)
    second = lab.run(script, attempt=2, interval="1h").done()
    assert validated(first, second) == validated(plain) and second.digest == plain.digest
