"""The techniques, the manifest and a profile in custom loops: real processes under `Run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, Outcome, Reason, profile_key

from tests.runs.conftest import SCRIPT, Lab
from tests.runs.launched import Run
from tests.support.heavy import sample

HEAD = """\
import os, signal, time
import torch
import spottrain

dataset = [(torch.full((4,), i / 48.0), torch.tensor(i / 10.0)) for i in range(48)]
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def mse(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]).squeeze(-1).float(), batch[1])


"""

PLAIN = (
    HEAD
    + """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = spottrain.data.loader(dataset, batch_size=4, shuffle=True)
run = spottrain.Run(model=model, optimizer=optimizer, data=loader, max_steps=20, log_every=1)
for batch in run.batches(loader):
    optimizer.zero_grad()
    loss = mse(model, batch)
    loss.backward()
    optimizer.step()
    run.step_completed(loss=loss)
run.finish()
"""
)

ASKING = (
    HEAD
    + """\
spottrain.seed(1)
s = spottrain.job_settings(
    global_batch_size=4, micro_batch_size=4, precision="fp32", clip_grad_norm=None, optimizer=None,
    learning_rate_scaling=None, schedule="cosine", warmup_steps=2, max_steps=20, ema_decay=None,
    activation_checkpointing="none", num_workers=0, prefetch_factor=None,
)
optimizer = s.make_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
scheduler = s.make_scheduler(optimizer, total_steps=s.max_steps)
spottrain.techniques.activation_checkpointing.apply(model, s.activation_checkpointing)
amp = spottrain.techniques.Amp(s.precision, "cpu")
ema = spottrain.techniques.EMA(model, decay=s.ema_decay) if s.ema_decay else None
windows = s.global_batch_size // s.micro_batch_size
loader = spottrain.data.loader(
    dataset, batch_size=s.micro_batch_size, accumulation=windows, num_workers=s.num_workers,
    prefetch_factor=s.prefetch_factor, shuffle=True,
)
run = spottrain.Run(
    model=model, optimizer=optimizer, scheduler=scheduler, scaler=amp, data=loader, max_steps=20, log_every=1,
    extra={"ema": ema} if ema else None,
)
for number, batch in enumerate(run.batches(loader), 1):
    with amp.autocast():
        loss = mse(model, batch)
    amp.backward(loss / windows)
    if number % windows:
        continue
    amp.step(optimizer, clip_grad_norm=s.clip_grad_norm, scheduler=scheduler)
    if ema:
        ema.update(run.global_step + 1)
    run.step_completed(loss=loss)
print("USED", type(optimizer).__name__, amp.precision.name, windows, s.clip_grad_norm, s.ema_decay)
run.finish()
"""
)
MANIFEST = {
    "precision": "bf16",
    "globalBatchSize": 8,
    "optimizer": {"name": "sgd", "learningRate": 0.1},
    "learningRateScaling": {"rule": "linear", "baseBatchSize": 4},
    "schedule": "constant",
    "warmupFraction": 0.5,
    "clipGradNorm": 1.5,
    "emaDecay": 0.5,
    "activationCheckpointing": {"policy": "all"},
    "data": {"numWorkers": "auto", "prefetchFactor": 2},
    "maxSteps": 10,
    "seed": 3,
}


def traces(folder: Path, attempt: int = 1) -> list[str]:
    place = folder / profile_key(attempt, 0, "")
    names = [each.name for each in place.iterdir()] if place.exists() else []
    return [name for name in names if name.endswith(".pt.trace.json.gz")]


# --- spec.training --------------------------------------------------------------------------------------
def test_the_manifest_reaches_a_loop_of_ones_own_wins_and_is_told(lab: Lab) -> None:
    run = lab.run(ASKING, training=json.dumps(MANIFEST)).done()
    assert "USED SGD bf16 2 1.5 0.5" in run.log
    for line in (
        "event=override setting=precision manifest=bf16 script=fp32",
        "event=override setting=global_batch_size manifest=8 script=4",
        "event=override setting=clip_grad_norm manifest=1.500",
        "event=override setting=schedule manifest=constant script=cosine",
        "event=override setting=num_workers manifest=auto script=0",
    ):
        assert line in run.log, line
    rates = [float(line.split(" lr=")[1].split()[0]) for line in run.log.splitlines() if " lr=" in line]
    assert rates[-1] == pytest.approx(0.2), "0.1, scaled by 8 / 4, after the warm-up of half the run"
    assert max(run.losses) == 10
    assert "event=advice about=training" not in run.log, "everything was asked for"


COMING = ASKING.replace('extra={"ema": ema} if ema else None,', 'extra={"ema": ema},').replace(
    "    amp.backward", '    time.sleep(float(os.environ.get("PAUSE", "0")))\n    amp.backward'
)


def test_what_a_new_manifest_says_holds_and_techniques_come_and_go_from_attempt_to_attempt(lab: Lab) -> None:
    sgd = {"name": "sgd", "learningRate": 0.1, "momentum": 0.9}
    paused = {"PAUSE": "0.05"}
    lab.run(COMING, training=json.dumps({"optimizer": sgd}), env=paused).until("step=3/").stopped()
    averaged = json.dumps({"optimizer": sgd | {"momentum": 0.5}, "emaDecay": 0.5})
    second = lab.run(COMING, training=averaged, env=paused, attempt=2).until("step=9/").stopped()
    assert "setting=optimizer.momentum group=0 holds=now checkpoint=0.9 now=0.5" in second.log
    assert 'setting=extra.ema checkpoint=none script="begins again"' in second.log
    third = lab.run(COMING, training=json.dumps({"optimizer": sgd}), attempt=3).done()
    assert "setting=optimizer.momentum group=0 holds=now checkpoint=0.5 now=0.9" in third.log
    assert "setting=extra.ema checkpoint=there script=none" in third.log and max(third.losses) == 20


def test_without_a_manifest_the_loop_has_its_own_values_and_nothing_is_told(lab: Lab) -> None:
    run = lab.run(ASKING).done()
    assert "USED AdamW fp32 1 None None" in run.log
    assert "event=override" not in run.log and "event=advice" not in run.log


def test_what_a_loop_does_not_take_is_told_once_with_what_to_do(lab: Lab) -> None:
    run = lab.run(PLAIN, training=json.dumps(MANIFEST | {"maxSteps": 3})).done()
    (line,) = [line for line in run.log.splitlines() if "about=training" in line]
    fields = line.split("fields=")[1].split()[0].split(",")
    nested = {"data.numWorkers", "data.prefetchFactor"}
    assert set(fields) == (set(MANIFEST) - {"maxSteps", "data"}) | nested
    assert "add them to spottrain.job_settings(...)" in line
    assert run.message.ignoredSettings.split(",") == fields, "and the operator is told"


EPOCHS = PLAIN.replace(" max_steps=20,", "").replace(
    "for batch in run.batches(loader):", "for batch in (batch for _ in range(3) for batch in loader):"
)


LOOKING = EPOCHS.replace(
    "    run.step_completed(loss=loss)\n", "    if not run.step_completed(loss=loss): break\n"
)
LATER = PLAIN.replace(
    "for batch in run.batches(loader):",
    "def own():\n    while run.global_step < 20:\n        yield from loader\n\n\nfor batch in own():",
)


@pytest.mark.parametrize(
    "script", [LOOKING, EPOCHS, LATER], ids=["looks", "over epochs", "with a later end of its own"]
)
def test_the_manifest_ends_a_loop_of_any_kind_at_its_last_step(lab: Lab, others: Lab, script: str) -> None:
    run = lab.run(script, training='{"maxSteps": 7}').done()
    whole = others.alone(PLAIN.replace("20", "7"))
    assert (run.message.outcome, run.message.step, max(run.losses)) == (Outcome.DONE, 7, 7)
    assert run.digest == whole.digest, "the weights of step 7, whatever the loop did after it"
    assert ("event=override setting=max_steps manifest=7 script=20" in run.log) == (script == LATER)


def test_what_was_not_named_cannot_be_read(lab: Lab) -> None:
    run = lab.run(HEAD + "spottrain.job_settings(global_batch_size=4).ema_decay\n").ends(ExitCode.FAILED)
    assert "was called without ema_decay: add it to the call" in run.message.message


BAD = {
    "bath_size=4": "job_settings(bath_size=...) is not a setting; the settings are global_batch_size,",
    "global_batch_size='4'": "job_settings(global_batch_size='4'): must be a whole number",
    "compile_mode='max-autotune'": "has no effect without compile=True",
}


def test_bad_values_of_a_loop_are_one_sentence(lab: Lab) -> None:
    attempt = "def attempt(text): spottrain.job_settings(**eval(f'dict({text})'))\n"
    said = lab.refusals(HEAD + attempt, list(BAD))
    assert [says in refusal for says, refusal in zip(BAD.values(), said, strict=True)] == [True] * 3, said


# --- a profile ------------------------------------------------------------------------------------------
WINDOW = '{"profile": {"wait": 1, "warmup": 1, "active": 2}}'


def test_a_guard_makes_the_profile_that_the_manifest_asks_for(lab: Lab) -> None:
    run = lab.run(PLAIN, training=WINDOW).done()
    assert len(traces(lab.folder / "store")) == 1
    assert "event=profiling wait=1" in run.log


def test_a_window_past_the_end_of_a_guards_run_is_left_out_and_that_is_told(lab: Lab) -> None:
    run = lab.run(PLAIN, training='{"profile": {"wait": 100}}').done()
    assert "event=profile-left-out" in run.log


def test_a_job_that_ends_without_its_profile_says_so_and_is_done(lab: Lab) -> None:
    asking = EPOCHS.replace("range(3)", "run.epochs(3)")
    run = lab.run(asking, training='{"profile": {"wait": 100}}').done()
    assert "event=profile-cut-short" in run.log
    assert run.message.outcome is Outcome.DONE


def test_an_interrupted_loop_stores_the_profile_that_it_has_made(lab: Lab) -> None:
    stopping = PLAIN.replace(
        "    run.step_completed",
        "    if run.global_step == 9: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while run.global_step == 9 and not run.should_stop: time.sleep(0.01)\n"
        "    run.step_completed",
    )
    lab.run(stopping, training=WINDOW).ends(ExitCode.INTERRUPTED)
    assert len(traces(lab.folder / "store")) == 1


def profiled(lab: Lab, script: str, *flags: str) -> Run:
    (lab.folder / "train.py").write_text(script)
    return lab.start([*flags, "train.py"], {Env.CHECKPOINT_URI: ""}, verb="profile")


@pytest.mark.parametrize(
    "script", sample((PLAIN, EPOCHS, LATER), PLAIN), ids=["a loop", "over epochs", "that ends itself"]
)
def test_the_command_profiles_a_custom_loop(lab: Lab, script: str) -> None:
    run = profiled(lab, script, "--wait", "1", "--warmup", "1", "--active", "2").done()
    (own,) = (lab.folder / "profiles").iterdir()
    assert len(traces(own)) == 1 and run.message.step == 4 and own.name.startswith("train-")
    assert "aten::addmm" in run.log, "the table"
    assert not (lab.folder / "checkpoints").exists()
    assert "about=training" not in run.log, "what the command has set is no setting of the person's"


def test_a_loop_that_passes_its_own_end_has_stored_its_profile(lab: Lab) -> None:
    script = LATER.replace("max_steps=20", "max_steps=4")
    lab.run(script, training=WINDOW).done()
    assert len(traces(lab.folder / "store")) == 1


def test_a_script_that_trains_nothing_has_no_profile_and_that_is_told(lab: Lab) -> None:
    run = profiled(lab, "import torch\nprint('trained')\n").ends(ExitCode.DONE)
    assert "without beginning a training" in run.message.message


def test_the_commands_flags_win_over_a_window_of_the_script(lab: Lab) -> None:
    script = SCRIPT.replace("    max_steps=24,\n", "    max_steps=24, profile=spottrain.Profile(wait=100),\n")
    run = profiled(lab, script, "--wait", "1", "--warmup", "1", "--active", "2").done()
    (own,) = (lab.folder / "profiles").iterdir()
    assert len(traces(own)) == 1
    assert "event=override setting=profile" in run.log


# --- early stopping -------------------------------------------------------------------------------------
STOPPING = PLAIN.replace(
    "run = spottrain.Run(",
    "stopping = spottrain.EarlyStopping(patience=1)\nrun = spottrain.Run(extra={'stopping': stopping}, ",
).replace(
    "    run.step_completed(loss=loss)\n",
    "    reason = stopping.note(run.global_step + 1, {'loss': 1.0})\n"
    "    run.step_completed(loss=loss)\n"
    "    if reason and 'HEED' in os.environ:\n"
    "        break\n",
)


def test_a_loop_that_early_stopping_ends_is_done_for_that_reason(lab: Lab) -> None:
    run = lab.run(STOPPING, env={"HEED": "1"}).done()
    assert (run.message.outcome, run.message.reason, run.message.step) == (
        Outcome.DONE,
        Reason.EARLY_STOPPED,
        2,
    )
    assert "ended early: loss did not improve" in run.message.message


def test_a_reason_that_the_loop_does_not_heed_ends_nothing_early(lab: Lab) -> None:
    run = lab.run(STOPPING).done()
    assert (run.message.reason, run.message.step) == ("", 20)


def test_every_rank_stops_by_the_first_ones_figure(lab: Lab) -> None:
    """With each its own figure one would leave while the rest wait for it in the next step."""
    script = RANKS.replace(
        "run = spottrain.Run(",
        "stopping = spottrain.EarlyStopping(patience=2)\nextra = {'stopping': stopping}\n"
        "run = spottrain.Run(",
    ).replace("run.finish()", "print('STOPPED', run.global_step)\nrun.finish()")
    script = script.replace(
        "    run.step_completed(loss=loss)\n",
        "    run.step_completed(loss=loss)\n"
        "    mine = float(run.global_step if dist.get_rank() == 0 else -run.global_step)\n"
        "    if stopping.note(run.global_step, {'loss': mine}):\n"
        "        break\n",
    )
    runs = lab.ranks(2, script)
    first = ended(runs, ExitCode.DONE)
    assert all("STOPPED 3" in run.log for run in runs)
    assert first.message.reason == Reason.EARLY_STOPPED


def test_a_loop_may_say_itself_why_it_ends_early(lab: Lab) -> None:
    script = PLAIN.replace("run.finish()", "run.finish(ended_early='the validation is good enough')")
    run = lab.run(script.replace("loss=loss)\n", "loss=loss)\n    if run.global_step == 5: break\n")).done()
    assert run.message.reason == Reason.EARLY_STOPPED
    assert "ended early: the validation is good enough" in run.message.message


RANKS = """\
import torch, spottrain
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

spottrain.seed(3)
dist.init_process_group("gloo")
dataset = [torch.randn(16, generator=torch.Generator().manual_seed(i)) for i in range(64)]
model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = spottrain.data.loader(dataset, batch_size=4, shuffle=True)
extra = {}
run = spottrain.Run(model=model, optimizer=optimizer, data=loader, extra=extra, max_steps=30)
for x in run.batches(loader):
    optimizer.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    run.step_completed(loss=loss)
run.finish()
"""


def ended(runs: list[Run], code: ExitCode) -> Run:
    assert [run.end() for run in runs] == [code] * len(runs), "\n".join(run.log for run in runs)
    return runs[0]
