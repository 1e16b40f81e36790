"""What a Run takes up and what it leaves behind: parts that come and go between attempts, trackers
that have all, the average as the final weights, a word where it ended short. Real processes."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from spottrain.contract import ExitCode, Reason

from tests.runs.conftest import Lab, Start
from tests.support.heavy import sample

HEAD = """\
import os, signal, sys, time
import torch
import spottrain
from spottrain.techniques import EMA, Trackers

spottrain.seed(1)
STOP = int(os.environ.get("STOP", "0"))
dataset = [torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(32)]
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = spottrain.data.loader(dataset, batch_size=4, shuffle=True)


def train(batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    if run.global_step + 1 == STOP:
        os.kill(os.getpid(), signal.SIGTERM)
        while not run.should_stop:  # a thread hears of it
            time.sleep(0.01)
    return loss


"""


def ended(lab: Lab, code: ExitCode, script: str, **words: Any) -> Any:
    run = lab.run(script, **words).ends(code)
    return run


# --- what comes and goes between attempts -----------------------------------------------------------------
PARTS = (
    HEAD
    + """\
given = {
    "scaler": lambda: torch.amp.GradScaler("cpu"),
    "off": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "scheduler": lambda: torch.optim.lr_scheduler.ConstantLR(optimizer),
    "ema": lambda: {"ema": EMA(model)},
    "teacher": lambda: {"teacher": torch.nn.BatchNorm1d(4)},
    "no ema": lambda: {"ema": None},
    "no teacher": lambda: {"teacher": None},
}
kind, _, name = os.environ["GIVE"].partition("=")
parts = {kind: given[name]() if name else None} if kind else {}
run = spottrain.Run(model=model, optimizer=optimizer, data=loader, max_steps=5, **parts)
for batch in run.batches(loader):
    run.step_completed(loss=train(batch))
run.finish()
"""
)
THERE = "checkpoint=there script=none"
AGAIN = 'checkpoint=none script="begins again"'


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        ("scaler=scaler", "scaler=", f"setting=scaler {THERE}"),
        ("extra=teacher", "extra=no teacher", f"setting=extra.teacher {THERE}"),
        *sample(
            [
                ("scaler=scaler", "scaler=off", f"setting=scaler {THERE}"),
                ("scaler=", "scaler=scaler", f"setting=scaler {AGAIN}"),
                ("scaler=off", "scaler=", None),
            ]
        ),
    ],
)
def test_what_may_come_and_go_does_so_and_is_told(lab: Lab, first: str, then: str, told: str | None) -> None:
    ended(lab, ExitCode.INTERRUPTED, PARTS, env={"GIVE": first, "STOP": "2"}, attempt=1)
    run = ended(lab, ExitCode.DONE, PARTS, env={"GIVE": then}, attempt=2)
    overrides = [line.split("event=override ")[1] for line in run.log.splitlines() if "=override" in line]
    assert overrides == ([] if told is None else [told])


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        ("extra=ema", "extra=", "extra.ema, which this Run is not given: give it, or extra={'ema': None} to"),
        *sample(
            [
                (
                    "scheduler=scheduler",
                    "scheduler=",
                    "of scheduler, which this Run is not given: give it, for",
                ),
                ("extra=teacher", "", "extra.teacher, which this Run is not given: give it, or extra={"),
            ]
        ),
    ],
)
def test_what_would_change_the_training_is_refused_with_what_helps(
    lab: Lab, first: str, then: str, says: str
) -> None:
    ended(lab, ExitCode.INTERRUPTED, PARTS, env={"GIVE": first, "STOP": "2"}, attempt=1)
    run = ended(lab, ExitCode.BAD_CONFIGURATION, PARTS, env={"GIVE": then}, attempt=2)
    assert says in run.message.message


# --- trackers -------------------------------------------------------------------------------------------
TRACKED = (
    HEAD
    + """\
class Slow:
    name = "slow"

    def begin(self, run_id, resumed_step):
        time.sleep(0.2)

    def log(self, step, values):
        print("tracked", step, flush=True)

    def close(self):
        print("tracker closed", flush=True)


trackers = Trackers([Slow()])
extra = {"trackers": trackers}
with spottrain.Run(model=model, optimizer=optimizer, data=loader, extra=extra, max_steps=8) as run:
    trackers.begin("run", run.global_step)
    for batch in run.batches(loader):
        loss = train(batch)
        trackers.log(run.global_step + 1, {"loss": loss})
        if "FAIL" in os.environ and run.global_step + 1 == 3:
            raise ValueError("a bug of the script")
        run.step_completed(loss=loss)
    run.finish()
trackers.log(9, {"test": 1.0})
"""
)


@pytest.mark.parametrize(
    ("env", "code", "last", "after"),
    [
        ({}, ExitCode.DONE, 8, "event=done"),
        ({"STOP": "5"}, ExitCode.INTERRUPTED, 5, "event=end outcome=interrupted"),
        ({"FAIL": "1"}, ExitCode.FAILED, 3, "event=released"),
    ],
    ids=["finished", "interrupted", "failed"],
)
def test_a_slow_tracker_has_every_line_after_what_was_trained_is_safe(
    lab: Lab, env: dict[str, str], code: ExitCode, last: int, after: str
) -> None:
    run = ended(lab, code, TRACKED, env=env)
    assert [line for line in run.log.splitlines() if line.startswith("tracked")] == [
        f"tracked {step}" for step in range(1, last + 1)
    ]
    assert run.log.index(after) < run.log.index("tracker closed")
    late = [line for line in run.log.splitlines() if "event=tracker-closed" in line]
    assert len(late) == (code == ExitCode.DONE) and all("step=9 " in line for line in late)


# --- final weights --------------------------------------------------------------------------------------
AVERAGED = (
    HEAD
    + """\
from spottrain.checkpoint.final_weights import digest

pair = os.environ.get("MODELS", "one") == "pair"
models = {"student": model, "critic": torch.nn.Linear(1, 1)} if pair else model
given = os.environ["EMAS"].split(",")
of = {"ema": model, "again": model, "part": model[0], "unused": model, "other": torch.nn.Linear(2, 2)}
extra = {name: EMA(of[name], decay=0.5) for name in given}
run = spottrain.Run(model=models, optimizer=optimizer, data=loader, extra=extra, max_steps=5)
for batch in run.batches(loader):
    loss = train(batch)
    for name in set(given) - {"unused"}:
        extra[name].update(run.global_step + 1)
    run.step_completed(loss=loss)
begin = "student." if pair else ""
weights = {begin + name: each for name, each in model.state_dict().items()}
weights |= {"critic." + name: each for name, each in models["critic"].state_dict().items()} if pair else {}
means = {begin + name: each for name, each in extra[given[0]].state_dict()["average"].items()}
print("RAW", digest(weights), "AVERAGE", digest(weights | means), flush=True)
run.finish()
"""
)


@pytest.mark.parametrize(
    ("env", "left", "told"),
    [
        ({"EMAS": "ema"}, "AVERAGE", 'event=ema final="the average" of=extra.ema'),
        ({"EMAS": "ema", "MODELS": "pair"}, "AVERAGE", 'event=ema final="the average" of=extra.ema'),
        pytest.param(
            {"EMAS": "ema,other"},
            "AVERAGE",
            'event=ema final="the average" of=extra.ema',
            marks=pytest.mark.heavy,
        ),
        ({"EMAS": "ema,again"}, "RAW", "the raw ones: extra.again averages the same"),
        ({"EMAS": "part"}, "RAW", "the raw ones: it was not updated, or it is of a part"),
        ({"EMAS": "unused"}, "RAW", "the raw ones: it was not updated, or it is of a part"),
    ],
)
def test_the_average_is_left_where_it_is_of_the_whole_model_and_told_either_way(
    lab: Lab, env: dict[str, str], left: str, told: str
) -> None:
    run = ended(lab, ExitCode.DONE, AVERAGED, env=env)
    assert run.digest == run.log.split(f"{left} ")[1].split()[0]
    assert told in run.log


SHARDED = (
    HEAD.replace("optimizer =", "model = spottrain.shard(model, layers=[torch.nn.Linear])\noptimizer =")
    + """\
from spottrain.checkpoint.final_weights import digest

ema = EMA(model, decay=0.5)
extra = {"ema": ema}
run = spottrain.Run(model=model, optimizer=optimizer, data=loader, extra=extra, max_steps=5)
for batch in run.batches(loader):
    loss = train(batch)
    ema.update(run.global_step + 1)
    run.step_completed(loss=loss)
print("AVERAGE", digest({n: each.full_tensor() for n, each in ema.state_dict()["average"].items()}))
run.finish()
"""
)


def test_the_average_of_a_sharded_model_is_left_whole(lab: Lab) -> None:
    runs = lab.ranks(2, SHARDED)
    assert [run.end() for run in runs] == [ExitCode.DONE] * 2, "\n".join(run.log for run in runs)
    assert runs[0].digest == runs[0].log.split("AVERAGE ")[1].split()[0]
    assert [run.log.count("of=extra.ema") for run in runs] == [1, 0]


# --- an end short of max_steps --------------------------------------------------------------------------
SHORT = (
    HEAD
    + """\
run = spottrain.Run(model=model, optimizer=optimizer, data=loader, max_steps=6)
while run.global_step < 6:
    for batch in loader:
        run.step_completed(loss=train(batch))
        if run.global_step == 6:
            break
run.finish()
"""
)


def test_a_loop_that_ends_short_of_the_manifests_max_steps_fails_and_the_mended_one_goes_on(lab: Lab) -> None:
    training = '{"maxSteps": 20}'
    run = ended(lab, ExitCode.FAILED, SHORT, training=training, attempt=1)
    assert "the loop has ended at step 6 of max_steps=20" in run.message.message
    assert run.message.durableStep == 6 and lab.head["state"] == "released"
    assert not (lab.folder / "store" / "final").exists()
    again = ended(lab, ExitCode.DONE, SHORT.replace("6", "20"), training=training, attempt=2)
    assert again.message.message.startswith("Trained 20 steps; ")


def test_a_loop_that_ends_short_does_not_say_that_its_step_is_saved_where_that_failed(lab: Lab) -> None:
    folder = str(lab.folder / "store" / "checkpoints")
    breaks = f"""\
import contextlib, shutil
while not os.path.isfile({folder!r}):  # the bandwidth may be measured just now
    with contextlib.suppress(OSError):
        shutil.rmtree({folder!r}, ignore_errors=True)
        open({folder!r}, "x").close()
"""
    broken = SHORT.replace("run.finish()\n", breaks + "run.finish()\n")
    run = ended(lab, ExitCode.FAILED, broken, training='{"maxSteps": 20}')
    assert "the loop has ended at step 6 of max_steps=20" in run.message.message
    assert "The step is not saved: to train all iterate" in run.message.message
    assert "event=save-failed step=6" in run.log


# --- a stop inside of a step ----------------------------------------------------------------------------
TAUGHT = (
    HEAD
    + """\
teacher = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).requires_grad_(False)
loader = spottrain.data.loader(dataset, batch_size=4, accumulation=2, shuffle=True)
run = spottrain.Run(
    model=model, optimizer=optimizer, data=loader, extra={"teacher": teacher}, max_steps=6
)
number = 0
while not run.done:
    for part in spottrain.techniques.accumulation.parts(loader, 2, model=model, count=len):
        run.poll()
        ((model(part.batch) - teacher(part.batch)).square().mean() * part.weight).backward()
        number += 1
        if number == STOP:
            os.kill(os.getpid(), signal.SIGTERM)
            while not run.should_stop:
                time.sleep(0.01)
        if part.last:
            optimizer.step()
            optimizer.zero_grad()
            if not run.step_completed():
                break
print("TEACHER", teacher[0].num_batches_tracked.item(), teacher[0].running_mean.tolist())
run.finish()
"""
)


def test_a_stop_inside_of_a_step_leaves_a_teachers_running_means_as_they_were_before_it(lab: Lab) -> None:
    whole = ended(lab, ExitCode.DONE, TAUGHT, at="whole")
    ended(lab, ExitCode.INTERRUPTED, TAUGHT, env={"STOP": "5"}, attempt=1)
    again = ended(lab, ExitCode.DONE, TAUGHT, attempt=2)
    said = [run.log.split("TEACHER ")[1].splitlines()[0] for run in (whole, again)]
    assert said[0] == said[1] and said[0].startswith("12 ")


# --- a copy that fails at the stop ------------------------------------------------------------------------
UNSAVABLE = (
    HEAD
    + """\
class Extra:
    def state_dict(self):
        if run is not None and run.global_step == STOP:
            raise RuntimeError("cannot be saved now")
        return {}

    def load_state_dict(self, state):
        pass


run = None
with spottrain.Run(
    model=model, optimizer=optimizer, data=loader, max_steps=12, extra={"own": Extra()}
) as run:
    for batch in run.batches(loader):
        run.step_completed(loss=train(batch))
    run.finish()
"""
)


def test_a_state_that_cannot_be_copied_at_a_stop_is_lost_work_and_head_is_free(lab: Lab) -> None:
    run = ended(lab, ExitCode.INTERRUPTED_LOST, UNSAVABLE, env={"STOP": "4"})
    assert "4 step(s) since the last commit are lost: their state could not be copied" in run.message.message
    assert re.search(r"\(RuntimeError: cannot be saved now \(\S+/train\.py:\d+\)\)", run.message.message)
    assert "event=released" in run.log


# --- a script without finish() ------------------------------------------------------------------------------
UNFINISHED = (
    HEAD
    + """\
run = spottrain.Run(model=model, optimizer=optimizer, data=loader)
for epoch in run.epochs(2):
    for batch in loader:
        run.step_completed(loss=train(batch))
    if epoch == int(os.environ.get("BREAK", "-1")):
        break
"""
)
STEPS_UNFINISHED = (
    HEAD
    + """\
with spottrain.Run(model=model, optimizer=optimizer, data=loader, max_steps=16) as run:
    for batch in run.batches(loader):
        run.step_completed(loss=train(batch))
"""
)
TOLD_AFTER_THE_LOOP = """\
os.kill(os.getpid(), signal.SIGTERM)
while not run.should_stop:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    "script",
    sample(
        [
            UNFINISHED,
            UNFINISHED + "sys.exit(0)\n",
            UNFINISHED + TOLD_AFTER_THE_LOOP,
            STEPS_UNFINISHED,
            STEPS_UNFINISHED + TOLD_AFTER_THE_LOOP,
        ],
        *(UNFINISHED, UNFINISHED + TOLD_AFTER_THE_LOOP, STEPS_UNFINISHED),
    ),
    ids=["epochs", "sys.exit", "told to stop after the epochs", "steps", "told to stop after the steps"],
)
def test_the_end_of_a_script_finishes_a_loop_that_has_done_all_its_epochs_or_steps(
    lab: Lab, others: Lab, script: str
) -> None:
    whole = others.alone(STEPS_UNFINISHED + "run.finish()\n")
    run = ended(lab, ExitCode.DONE, script)
    assert run.message.message.startswith("Trained 16 steps; the weights are at")
    assert run.digest == whole.digest


def test_a_loop_that_was_left_early_is_not_finished_and_the_mended_one_goes_on(lab: Lab) -> None:
    left = ended(lab, ExitCode.FAILED, UNFINISHED, env={"BREAK": "0"}, attempt=1)
    assert "call finish() after the last step" in left.message.message
    assert left.message.reason == Reason.SCRIPT_FAILED and left.message.durableStep == 8
    assert lab.head["state"] == "released" and not (lab.folder / "store" / "final").exists()
    assert ended(lab, ExitCode.DONE, UNFINISHED, attempt=2).message.startStep == 8


def test_a_loop_whose_script_fails_after_it_is_not_finished(lab: Lab) -> None:
    failed = ended(lab, ExitCode.FAILED, UNFINISHED + "raise ValueError('no room')\n", attempt=1)
    assert "no room" in failed.message.message
    assert not (lab.folder / "store" / "final").exists()
    ended(lab, ExitCode.DONE, UNFINISHED, attempt=2)


@pytest.mark.heavy
def test_without_spottrain_run_the_script_is_asked_to_call_finish(start: Start) -> None:
    run = start(UNFINISHED, sys.executable, "train.py").ends(ExitCode.FAILED)
    assert "call finish() after the last step" in run.message.message
