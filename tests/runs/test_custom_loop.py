"""A loop of one's own under `spottrain.Run`: a real process that is told to stop by a real signal."""

from __future__ import annotations

from pathlib import Path

import pytest
import spottrain
from spottrain.checkpoint.final_weights import digest
from spottrain.contract import ExitCode, Outcome

from tests.runs.conftest import (
    Lab,
    weights_that_could_not_be_left_are_left_by_the_next_attempt,
)
from tests.runs.test_series import series_of
from tests.support.heavy import sample

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"

HEAD = """\
import copy, os, time
import torch, spottrain

spottrain.seed(3)
torch.use_deterministic_algorithms(True)
PAUSE = float(os.environ.get("PAUSE", "0"))
MORE = os.environ.get("MORE", "")


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + 0.01 * torch.randn(4), x.sum()


def make(width=int(os.environ.get("WIDTH", "16"))):
    return torch.nn.Sequential(
        torch.nn.Linear(4, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(width, 1),
    )


model = make()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""

SCRIPT = (
    HEAD
    + """\
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
scaler = torch.amp.GradScaler("cpu", enabled="SCALER" in os.environ)
workers = int(os.environ.get("WORKERS", "0"))
loader = spottrain.data.loader(Noisy(), batch_size=4, accumulation=2, num_workers=workers, shuffle=True)
ema = copy.deepcopy(model)
extra = {"ema": ema, "other": scheduler} if MORE == "extra" else {"ema": ema}

run = spottrain.Run(
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    scaler=scaler,
    data=loader,
    extra=extra,
    max_steps=23,
    log_every=1,
)
micro = []
for x, y in run.batches(loader):
    run.poll()
    print("micro", flush=True)
    time.sleep(PAUSE)
    loss = torch.nn.functional.mse_loss(model(x).squeeze(-1), y) / 2
    scaler.scale(loss).backward()
    micro.append(loss.detach())
    if len(micro) < 2:
        continue
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mine, theirs in zip(ema.parameters(), model.parameters()):
            mine.lerp_(theirs, 0.1)
    total, micro = sum(micro), []
    if os.environ.get("NAN_AT") == str(run.global_step + 1):
        total = total * float("nan")
    run.step_completed(loss=total)
run.finish()
print("average=" + spottrain.checkpoint.final_weights.digest(dict(ema.state_dict())))
"""
)


@pytest.mark.parametrize("workers", sample(("0", "2"), "2"))
def test_a_loop_that_was_interrupted_inside_a_step_ends_with_the_same_weights(lab: Lab, workers: str) -> None:
    env = {"WORKERS": workers, "SCALER": "1"}
    plain = lab.run(SCRIPT, at="plain", attempt=1, env=env).done()
    first = lab.run(SCRIPT, attempt=1, env=env | {"PAUSE": "0.05"}).until("step=9/").stopped()
    assert first.message.outcome is Outcome.INTERRUPTED and first.message.durableStep == first.message.step
    second = lab.run(SCRIPT, attempt=2, interval="4steps", env=env | {"PAUSE": "0.05"})
    second.until("event=committed").until(f"step={min(second.losses) + 5}/")
    second.killed()
    third = lab.run(SCRIPT, attempt=3, env=env).done()
    assert first.losses | second.losses | third.losses == plain.losses
    assert third.digest == plain.digest
    assert _average(third.log) == _average(plain.log)
    steps = [point.step for series in series_of(lab.folder / "store") for point in series.points]
    assert steps == sorted(set(steps)) and {*first.losses, *third.losses} <= {*steps} <= {*plain.losses}
    weights = spottrain.load_weights(lab.folder / "store" / "final" / "model.safetensors")
    assert digest(weights) == plain.digest


def _average(log: str) -> str:
    return log.rsplit("average=", 1)[1].split()[0]


def test_weights_that_could_not_be_left_are_left_by_the_next_attempt(lab: Lab) -> None:
    weights_that_could_not_be_left_are_left_by_the_next_attempt(lab, SCRIPT)


def test_a_loss_that_is_no_number_ends_the_run_and_saves_nothing(lab: Lab) -> None:
    run = lab.run(SCRIPT, interval="4steps", env={"NAN_AT": "6"}).ends(ExitCode.FAILED)
    assert "the loss is nan at step 6" in run.message.message and run.message.durableStep == 4


def test_a_checkpoint_of_something_else_is_refused(lab: Lab) -> None:
    lab.run(SCRIPT, attempt=1, env={"PAUSE": "0.05"}).until("step=3/").stopped()
    for env, says in (
        ({"WIDTH": "8"}, "0.weight has shape (16, 4) in the checkpoint and (8, 4) in the model"),
        ({"MORE": "extra"}, "it has no state of extra.other, which this Run is given"),
    ):
        again = lab.run(SCRIPT, env=env).ends(ExitCode.BAD_CONFIGURATION)
        assert says in again.message.message


EPOCHS = (
    HEAD
    + """\
names = ["first", "second"]
models = {name: make() for name in names}
temperature = torch.nn.Parameter(torch.ones(()))
optimizers = {
    "first": torch.optim.SGD([*models["first"].parameters(), temperature], lr=1e-2, momentum=0.9),
    "second": torch.optim.AdamW(models["second"].parameters()),
}
sampler = spottrain.data.BatchSampler(Noisy(), batch_size=8, shuffle=True)
loader = torch.utils.data.DataLoader(Noisy(), batch_sampler=sampler, generator=torch.Generator())

with spottrain.Run(model=models, optimizer=optimizers, data=loader, log_every=1) as run:
    for epoch in run.epochs(4):
        for x, y in loader:
            time.sleep(PAUSE)
            losses = [torch.nn.functional.mse_loss(each(x).squeeze(-1), y) for each in models.values()]
            loss = sum(losses) * temperature.sigmoid()
            loss.backward()
            for each in optimizers.values():
                each.step()
                each.zero_grad()
            if MORE == "raise" and run.global_step == 6:
                raise ValueError("a bug of the script")
            run.step_completed(loss=loss)
    run.finish()
"""
)


def test_several_models_and_a_loop_over_epochs_go_on_in_the_middle_of_one(lab: Lab) -> None:
    plain = lab.run(EPOCHS, at="plain", attempt=1).done()
    assert max(plain.losses) == 20, "4 epochs of 5 steps"
    first = lab.run(EPOCHS, attempt=1, env={"PAUSE": "0.05"}).until("step=7 ").stopped()
    second = lab.run(EPOCHS, attempt=2).done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest
    names = spottrain.load_weights(lab.folder / "store" / "final" / "model.safetensors")
    assert {name.split(".")[0] for name in names} == {"first", "second"}


def test_an_exception_in_the_with_block_gives_head_up_and_the_next_attempt_goes_on(lab: Lab) -> None:
    failed = lab.run(EPOCHS, attempt=1, interval="3steps", env={"MORE": "raise"}).ends(ExitCode.FAILED)
    assert "a bug of the script" in failed.message.message
    assert lab.head["state"] == "released"
    again = lab.run(EPOCHS, attempt=2).done()
    assert min(again.losses) == (failed.message.durableStep or 0) + 1


BAD = {
    "no state": ("data=[1, 2]", "Run(data=...) is a list without state_dict() and load_state_dict()"),
    "no module": ("model=3", "Run(model=...) is 3; give a torch module, or a dict of modules"),
    "no optimizer": ("optimizer=model", "main is a Sequential; give a torch optimizer"),
    "no scheduler": ("scheduler=3", "Run: scheduler is a int without state_dict()"),
    "no extra": ("extra={'ema': object()}", "Run: extra.ema is a object without state_dict()"),
    "extra without names": ("extra=model", "Run(extra=...) is a Sequential: give it a dict of names"),
    "a scheduler of another optimizer": (
        "optimizer=torch.optim.SGD(model.parameters()), "
        "scheduler=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 5)",
        "Run(scheduler=...) is a StepLR of an optimizer that is not given here",
    ),
    "a scheduler that is not given": (
        "optimizer=(o := torch.optim.SGD(model.parameters()), torch.optim.lr_scheduler.StepLR(o, 5))[0]",
        "a torch scheduler was made for the optimizer, and the Run is not given it",
    ),
    "no steps": ("max_steps=0", "Run(max_steps=0, log_every=10): at least 1 each"),
}


def test_bad_input_is_one_sentence(lab: Lab) -> None:
    attempt = "usual = dict(model=model, optimizer=optimizer)\n"
    attempt += "def attempt(text): spottrain.Run(**usual | eval(f'dict({text})'))\n"
    said = lab.refusals(HEAD + attempt, [text for text, _ in BAD.values()])
    for (case, (_, says)), refusal in zip(BAD.items(), said, strict=True):
        assert says in refusal, case


@pytest.mark.heavy
def test_the_example_goes_on_under_ddp(lab: Lab) -> None:
    script, env = EXAMPLE.read_text(), {"STEPS": "1500"}
    plain = lab.run(script, nproc=2, at="plain", attempt=1, interval="1h", env=env).done()
    trains = lab.run(script, nproc=2, attempt=1, interval="1h", env=env).until("event=emergency-budget")
    first = trains.stopped()
    assert first.message.outcome is Outcome.INTERRUPTED and first.message.durableStep == first.message.step
    second = lab.run(script, nproc=2, attempt=2, interval="1h", env=env).done()
    assert second.digest == plain.digest
