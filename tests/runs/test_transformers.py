"""Hugging Face's Trainer: in a script that knows nothing of spottrain, and with `TransformersCallback`."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, Outcome, Reason, profile_key

from tests.runs import foreign
from tests.runs.conftest import Lab, Start, weights_that_could_not_be_left_are_left_by_the_next_attempt
from tests.runs.foreign import LOADS, Vehicle, stopped_at
from tests.runs.launched import OURS, Run
from tests.support.heavy import sample

pytest.importorskip("transformers")

HEAD = """\
import os, signal, time
import torch
from transformers import (
    EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments,
    enable_full_determinism,
)

enable_full_determinism(1)
PAUSE, REST = (float(os.environ.get(name, "0")) for name in ("PAUSE", "REST"))
STOP, HOLD, SAVED, EVALUATING = (
    int(os.environ.get(name, "0")) for name in ("STOP", "HOLD", "SAVED", "EVALUATING")
)


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        time.sleep(PAUSE)
        tokens = torch.randint(16, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def hold():
    print("holding", flush=True)
    time.sleep(60)  # until the test kills it


class Told(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step + 1 == STOP and os.environ.get("RANK", "1") == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        if 0 < STOP <= state.global_step and "RANK" in os.environ:
            time.sleep(0.1)  # ranks agree on their last step beside the steps, which are short here
        if state.global_step + 1 == HOLD:
            hold()
        while state.global_step + 1 == SAVED and '"step"' not in open("store/HEAD").read():
            time.sleep(0.01)  # until there is a checkpoint

    def on_epoch_end(self, args, state, control, **_):
        print("ended", state.epoch, state.global_step, flush=True)

    def on_prediction_step(self, args, state, control, **_):
        if state.global_step == EVALUATING > 0:
            os.kill(os.getpid(), signal.SIGTERM) if "STOPS_IN_IT" in os.environ else hold()

    def on_log(self, args, state, control, logs, **_):
        told = {name: value for name, value in logs.items() if "runtime" not in name and "second" not in name}
        told.pop("grad_norm", None)  # what is logged at an epoch's end after a resume does not know it
        told.pop("train_loss", None), told.pop("total_flos", None)  # of one call of train()
        if told.keys() > {"epoch"}:
            print("logged", state.global_step, sorted(told.items()), flush=True)


class Fine(Trainer):  # as TRL's trainers are
    def train(self, *args, **kwargs):
        print("fine-tunes", flush=True)
        return super().train(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        return super().compute_loss(model, inputs, return_outputs, **more)


def trainer(*callbacks, kind=Trainer, **arguments):
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    usual = dict(
        output_dir="output",
        max_steps=18,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return kind(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(**usual | arguments),
        train_dataset=Text(),
        eval_dataset=Text(),
        callbacks=list(callbacks),
    )


given = eval(os.environ.get("CALLBACKS", "[]")), eval(os.environ.get("ARGUMENTS", "{}"))
"""
ATTACHED = HEAD + "theirs = trainer(*given[0], Told(), **given[1])\n"
SCRIPT = (
    ATTACHED
    + """\
result = theirs.train(**eval(os.environ.get("TRAIN", "{}")))
print("after train", result.global_step, flush=True)
time.sleep(REST)
theirs.save_model("model")
print("saved the model", flush=True)
"""
)
CALLBACK = (
    HEAD
    + """\
from spottrain.integrations.transformers import TransformersCallback

spot = TransformersCallback()
theirs = trainer(*given[0], Told(), spot, **given[1])
theirs.train(resume_from_checkpoint=spot.resume(theirs))
print("after train", flush=True)
"""
)
SUBCLASS = {"ARGUMENTS": "dict(kind=Fine)"}
THEIRS = Vehicle(
    script=SCRIPT,
    loading=SCRIPT.replace("result =", f"import spottrain\ntheirs.model.{LOADS}\nresult ="),
    steps=18,
    env=SUBCLASS,
    ranks={"ARGUMENTS": "dict(ddp_backend='gloo')"},
)
OWN = Vehicle(script=CALLBACK, steps=18)

zygote = foreign.preloading("transformers.trainer")
base = foreign.base_of(SCRIPT)


# --- the table: what each vehicle does ------------------------------------------------------------------
def test_an_unchanged_script_begins_from_other_weights_and_goes_on_bit_for_bit(lab: Lab, base: Path) -> None:
    last = foreign.begins_from_other_weights_and_goes_on(lab, THEIRS, base)
    assert "after train 18" in last.log and "saved the model" in last.log
    assert last.log.count("event=attached") == 1
    assert "library=transformers version=5.23.0 what=Fine.train off=--no-auto-attach" in last.log


def test_the_callback_goes_on_bit_for_bit(lab: Lab, others: Lab) -> None:
    last = foreign.stopped_and_killed(lab, OWN, others.alone(CALLBACK), {})
    assert "after train" in last.log and "event=attached" not in last.log


@pytest.mark.heavy
def test_two_ranks_begin_from_other_weights_and_go_on(lab: Lab, base: Path) -> None:
    foreign.two_ranks_begin_from_other_weights_and_go_on(lab, THEIRS, base)


def test_weights_that_could_not_be_left_are_left_by_the_next_attempt(lab: Lab) -> None:
    weights_that_could_not_be_left_are_left_by_the_next_attempt(lab, CALLBACK)


# --- other weights, and checkpoints of the script's own ---------------------------------------------------
@pytest.mark.heavy
def test_it_begins_from_the_checkpoint_of_a_run_that_is_not_done(lab: Lab) -> None:
    """Downloaded. Its head is tied to the embedding, so the Trainer's checkpoint has only one of them."""
    loads = (
        "from safetensors.torch import load_model\nload_model(theirs.model, 'downloaded/model.safetensors')\n"
    )
    stopped_at(lab, SCRIPT, 7, at="base", env={})
    words = ["download", str(lab.folder / "base"), "--to", "downloaded"]
    lab.start(words, {}, verb="checkpoints").done()
    plain = lab.run(SCRIPT.replace("result =", f"{loads}result ="), at="plain", attempt=1).done()
    env: dict[str, str] = {Env.INIT_FROM: str(lab.folder / "base")}
    refused = lab.run(SCRIPT, at="new", attempt=1, env=env).ends(ExitCode.BAD_CONFIGURATION)
    assert "was written by a library" in refused.message.message
    run = lab.run(SCRIPT, attempt=1, env={Env.INIT_FROM: str(lab.folder / "downloaded")}).done()
    assert run.losses == plain.losses and run.digest == plain.digest


@pytest.mark.parametrize("given", sample(["'output/checkpoint-6'", "True"], "'output/checkpoint-6'"))
def test_the_scripts_own_checkpoint_counts_for_the_first_start(lab: Lab, base: Path, given: str) -> None:
    saving = {"ARGUMENTS": "dict(save_strategy='steps', save_steps=6, save_total_limit=1, max_steps=6)"}
    left_alone = lab.run(SCRIPT, env=saving | {Env.AUTO_ATTACH: "false"}).done()
    assert left_alone.message.outcome is Outcome.UNTRAINED and "event=attached" not in left_alone.log
    env = {"TRAIN": f"dict(resume_from_checkpoint={given})"}
    begins = env | {Env.INIT_FROM: str(base)}
    refused = lab.run(SCRIPT, at="new", attempt=1, env=begins).ends(ExitCode.BAD_CONFIGURATION)
    assert "checkpoint.initFrom begins at step 0" in refused.message.message
    first = stopped_at(lab, SCRIPT, 10, env=env)
    assert min(first.losses) == 7
    second = lab.run(SCRIPT, attempt=2, env=env).done()
    assert min(second.losses) == 11
    assert ("event=override setting=resume_from_checkpoint" in second.log) == (given != "True")


@pytest.mark.parametrize("step", sample([1, 4, 18], 4))
def test_a_stop_at_the_first_step_at_an_epochs_end_and_at_the_last_step_is_gone_on_from(
    lab: Lab, others: Lab, step: int
) -> None:
    plain = others.alone(SCRIPT)
    code = ExitCode.DONE if step == 18 else ExitCode.INTERRUPTED
    first = lab.run(SCRIPT, attempt=1, interval="1h", env={"STOP": str(step)}).ends(code)
    # Another thread may end it within the first step, as nothing is lost then.
    assert first.message.durableStep == step or (step == 1 and not first.losses)
    shutil.rmtree(lab.folder / "output")
    second = lab.run(SCRIPT, attempt=2, interval="1h").done()
    if step < 18:
        assert first.losses | second.losses == plain.losses and second.digest == plain.digest
    else:
        assert first.digest == plain.digest and "done already" in second.message.message


# --- the rest of the script -------------------------------------------------------------------------------
def test_a_stop_after_the_training_has_the_rest_of_the_script_run_again(lab: Lab, others: Lab) -> None:
    plain = others.alone(SCRIPT)
    env = {Env.GRACE_SECONDS: "4", "REST": "60"}
    first = lab.run(SCRIPT, attempt=1, env=env).until("after train 18").stopped()
    assert first.message.outcome is Outcome.INTERRUPTED and first.message.durableStep == 18
    assert lab.head["state"] == "released"
    shutil.rmtree(lab.folder / "output")
    second = lab.run(SCRIPT, attempt=2).done()
    assert not second.losses and "after train 18" in second.log and "saved the model" in second.log
    assert second.digest == plain.digest and lab.head["state"] == "done"


@pytest.mark.heavy
def test_a_short_rest_of_the_script_ends_within_the_notice(lab: Lab) -> None:
    env = {Env.GRACE_SECONDS: "20", "REST": "1"}
    run = lab.run(SCRIPT, env=env).until("after train 18").send().done()
    assert run.message.outcome is Outcome.DONE and "saved the model" in run.log


@pytest.mark.parametrize(("rest", "code"), [('open("absent").close()', 1), ("raise SystemExit(3)", 3)])
def test_a_script_that_fails_after_its_training_is_not_done(lab: Lab, rest: str, code: int) -> None:
    run = lab.run(SCRIPT.replace('theirs.save_model("model")', rest)).ends(code)
    assert run.message.outcome is Outcome.FAILED and run.message.step == 18
    assert lab.head["state"] == "released"


def test_the_best_model_is_loaded_at_the_end_although_it_was_measured_before_the_interruption(
    lab: Lab, others: Lab
) -> None:
    """The loss falls, so with `greater_is_better` the first evaluation is the best."""
    arguments = (
        "dict(save_strategy='steps', save_steps=4, eval_strategy='steps', eval_steps=4, save_total_limit=1, "
        "metric_for_best_model='loss', greater_is_better=True, load_best_model_at_end=True)"
    )
    env = {"ARGUMENTS": arguments}
    plain = others.alone(SCRIPT, env)
    assert plain.digest != others.alone(SCRIPT).digest
    stopped_at(lab, SCRIPT, 10, env=env)
    shutil.rmtree(lab.folder / "output")
    second = lab.run(SCRIPT, attempt=2, interval="1h", env=env | {"REST": "60"})
    second.until("after train 18").killed()
    shutil.rmtree(lab.folder / "output")
    third = lab.run(SCRIPT, attempt=3, interval="1h", env=env).done()
    assert not third.losses and "saved the model" in third.log and third.digest == plain.digest
    assert not list((lab.folder / "output").glob(".spottrain-last*"))


STOPPING = {
    "CALLBACKS": "[EarlyStoppingCallback(2, 1e9)]",
    "ARGUMENTS": "dict(eval_strategy='steps', eval_steps=3, metric_for_best_model='loss')",
}


def test_early_stopping_goes_on_counting_after_an_interruption(lab: Lab, others: Lab) -> None:
    plain = others.alone(SCRIPT, STOPPING)
    assert plain.message.step == 9 and plain.message.reason == Reason.EARLY_STOPPED
    assert "after the evaluation at step 9" in plain.message.message
    stopped_at(lab, SCRIPT, 7, env=STOPPING)
    second = lab.run(SCRIPT, attempt=2, interval="1h", env=STOPPING | {"REST": "60"})
    second.until("after train 9").killed()
    third = lab.run(SCRIPT, attempt=3, interval="1h", env=STOPPING).done()
    assert not third.losses and "after train 9" in third.log
    assert third.digest == plain.digest and third.message.reason == Reason.EARLY_STOPPED


STEPS, EPOCH = "'steps', eval_steps=3", "'epoch'"


@pytest.mark.parametrize(
    ("when", "early", "better"),
    sample(
        [
            *itertools.product([STEPS, EPOCH], [True], [True, False]),
            *itertools.product([STEPS, EPOCH], [False], [True]),
        ],
        *[(STEPS, True, True), (EPOCH, False, True)],
    ),
)
def test_there_is_a_last_checkpoint_though_the_trainer_keeps_the_best_alone(
    lab: Lab, when: str, early: bool, better: bool
) -> None:
    """The loss falls, so with `greater_is_better` the last evaluation is not the best."""
    arguments = (
        f"dict(eval_strategy={when}, save_strategy='best', metric_for_best_model='loss', "
        f"greater_is_better={better}, max_steps={18 if early else 12})"
    )
    env = (STOPPING if early else {}) | {"ARGUMENTS": arguments}
    first = lab.run(SCRIPT, attempt=1, interval="1h", env=env | {"REST": "60"}).until("after train ")
    last = first.log.split("after train ")[1].split()[0]
    first.killed()
    shutil.rmtree(lab.folder / "output")
    second = lab.run(SCRIPT, attempt=2, interval="1h", env=env).done()
    assert not second.losses and f"after train {last}" in second.log
    assert second.message.reason == (Reason.EARLY_STOPPED if early else "")


# --- what is attached to, and what is not -------------------------------------------------------------------
@pytest.mark.heavy
def test_a_second_training_is_done_and_not_saved_and_says_so(lab: Lab) -> None:
    twice = SCRIPT.replace("result = ", 'theirs.train()\nPAUSE = 1\nprint("between", flush=True)\nresult = ')
    run = lab.run(twice, env={Env.GRACE_SECONDS: "4"}).until("between", "the script trains a second time")
    run.send().ends(ExitCode.INTERRUPTED_LOST)
    assert "second training" in run.message.message


LEFT_ALONE = {
    "a hyperparameter search": ("theirs.train(trial={'learning_rate': 1e-3})\n", "hyperparameter search"),
    "a child process": (
        "import multiprocessing\n"
        "child = multiprocessing.get_context('fork').Process(target=theirs.train)\n"
        "child.start(), child.join()\n"
        "raise SystemExit(child.exitcode)\n",
        "a process that the script has started trains",
    ),
    "only an evaluation": ("theirs.evaluate()\nraise SystemExit\n", ""),
}


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_what_is_no_training_of_the_script_is_left_alone(lab: Lab, what: str) -> None:
    code, says = LEFT_ALONE[what]
    run = lab.run(SCRIPT.replace("result = ", f"{code}result = ")).done()
    assert run.message.outcome is Outcome.UNTRAINED and "event=attached" not in run.log
    assert run.log.count("event=advice about=attach") == bool(says) and says in run.log
    assert not (lab.folder / "store/HEAD").exists()


FAILING = (
    ATTACHED
    + """\
own, theirs.train_dataset = theirs.train_dataset, [{}] * 32
try:
    theirs.train()
except Exception as error:
    print("caught", type(error), flush=True)
theirs.train_dataset = own
"""
)


def test_a_training_that_failed_may_be_tried_again(lab: Lab) -> None:
    run = lab.run(FAILING + "theirs.train()\n").done()
    assert "caught" in run.log and run.message.step == 18 and lab.head["state"] == "done"


def test_another_training_after_a_failed_one_is_left_alone(lab: Lab) -> None:
    run = lab.run(FAILING + "trainer().train()\nprint('trained', flush=True)\n").ends(ExitCode.FAILED)
    assert run.log.count("event=attached") == 1 and "goes on with another Trainer" in run.log
    assert "trained" in run.log and "failed after 0 step(s)" in run.message.message


def test_a_stop_in_another_training_after_a_failed_one_has_lost_it(lab: Lab) -> None:
    run = lab.run(FAILING + "PAUSE = 1\ntrainer().train()\n").until("goes on with another Trainer")
    run.send().ends(ExitCode.INTERRUPTED_LOST)
    assert "a training after one that had failed" in run.message.message


def test_a_second_stage_does_not_go_on_from_the_checkpoint_of_the_first(lab: Lab) -> None:
    stage = {"ARGUMENTS": "dict(output_dir='stage-1')", "STOP": "2"}
    lab.run(SCRIPT, attempt=1, interval="1h", env=stage).ends(ExitCode.INTERRUPTED)
    for attempt, change in enumerate(("output_dir='stage-2'", "max_steps=24"), 2):
        env = {"ARGUMENTS": f"dict({{'output_dir': 'stage-1'}} | dict({change}))"}
        run = lab.run(SCRIPT, attempt=attempt, env=env).ends(ExitCode.BAD_CONFIGURATION)
        assert "one checkpoint URI for each" in run.message.message and lab.head["state"] == "released"


def test_a_date_in_the_folder_and_another_length_by_the_manifest_are_gone_on_with(lab: Lab) -> None:
    stopped_at(lab, SCRIPT, 9, env={"ARGUMENTS": "dict(output_dir='runs/a-2026-11-23_221057')"})
    second = {"ARGUMENTS": "dict(output_dir='runs/a-2026-11-24_000102')"}
    run = lab.run(SCRIPT, attempt=2, env=second, training='{"maxSteps": 12}').done()
    assert min(run.losses) == 10 and run.message.step == 12


def test_a_flag_turns_it_off_and_a_bad_value_is_refused(lab: Lab) -> None:
    (lab.folder / "train.py").write_text(SCRIPT)
    run = lab.start(["--no-auto-attach", "train.py"], {Env.CHECKPOINT_URI: "store"}).done()
    assert run.message.outcome is Outcome.UNTRAINED and "event=attached" not in run.log
    assert "saved the model" in run.log
    bad = lab.run(SCRIPT, env={Env.AUTO_ATTACH: "no"}).ends(ExitCode.BAD_CONFIGURATION)
    assert f"{Env.AUTO_ATTACH}='no'" in bad.message.message


def test_a_version_that_does_not_fit_is_left_alone_and_named(lab: Lab) -> None:
    found = lab.folder / "transformers-4.57.0.dist-info"  # beside the script, so found before the real one
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.0\n")
    run = lab.run(SCRIPT).done()
    assert run.message.outcome is Outcome.UNTRAINED and "event=attached" not in run.log
    assert "transformers 4.57.0 is not attached to" in run.log and "saved the model" in run.log


@pytest.mark.parametrize("setting", ["save_only_model=True", "enable_jit_checkpoint=True"])
def test_a_setting_that_cannot_be_served_is_refused_by_name(lab: Lab, setting: str) -> None:
    run = lab.run(SCRIPT, env={"ARGUMENTS": f"dict({setting})"}).ends(ExitCode.BAD_CONFIGURATION)
    assert setting in run.message.message and "--no-auto-attach" in run.message.message
    assert not (lab.folder / "store/HEAD").exists()


def test_a_stop_before_the_script_imports_what_it_trains_with_has_lost_nothing(start: Start) -> None:
    script = "import time\nprint('begun', flush=True)\ntime.sleep(60)\nfrom transformers import Trainer\n"
    run = start(script, *OURS, "train.py").until("begun").stopped()
    assert "nothing was lost" in run.message.message


LOOP = """
import time, torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
while True:
    model(torch.ones(1)).sum().backward(), optimizer.step(), print('stepped', flush=True)
    time.sleep(0.1)
"""


@pytest.mark.heavy
def test_a_stop_in_a_loop_of_its_own_has_lost_it_though_a_comment_names_a_trainer(start: Start) -> None:
    run = start("# from transformers import Trainer\n" + LOOP, *OURS, "train.py")
    run.until("stepped", seconds=300).send().ends(ExitCode.INTERRUPTED_LOST)
    assert "which has therefore saved nothing of it" in run.message.message


def test_a_callback_that_is_imported_and_not_used_is_told(lab: Lab) -> None:
    run = lab.run("import spottrain.integrations.transformers\n" + SCRIPT).done()
    assert run.message.outcome is Outcome.UNTRAINED and "this Trainer does not use it" in run.log


@pytest.mark.heavy
def test_a_fresh_process_is_attached_to_when_it_imports_the_library_and_its_children_are_not(
    start: Start,
) -> None:
    code = "import sys; print('attaches', any('spottrain' in type(f).__module__ for f in sys.meta_path))"
    script = (
        SCRIPT
        + f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}], check=True)\n{code}"
    )
    run = start(script, *OURS, "train.py").done(300)
    assert run.message.step == 18 and "event=attached library=transformers" in run.log
    assert "attaches False" in run.log and "attaches True" in run.log


SWITCHED = """\
import torch
from functools import partial
from spottrain.techniques.activation_checkpointing import apply
from transformers import GPT2Config, GPT2LMHeadModel
sys.path.insert(0, os.environ["ROOT"])
from tests.support.savedbytes import saved_bytes

config = GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=20, n_positions=16)
words = torch.arange(12).reshape(1, 12)
for wanted in ("none", 2, "all"):
    torch.manual_seed(1)
    model = GPT2LMHeadModel(config)
    model.train()
    names = apply(model, wanted)
    kept = saved_bytes(partial(model, words, labels=words), model)
    print("found", json.dumps([kept, len(names), hash(tuple(model.state_dict()))]))
"""


def test_a_model_of_transformers_keeps_less_by_its_own_switch(lab: Lab) -> None:
    root = str(Path(__file__).parents[2])
    log = lab.run("import json, os, sys\n" + SWITCHED, env={"ROOT": root}).done().log
    none, two, all_ = [json.loads(line[6:]) for line in log.splitlines() if line.startswith("found ")]
    assert none[0] > two[0] > all_[0]
    assert [each[1] for each in (none, two, all_)] == [0, 2, 4]
    assert none[2] == two[2] == all_[2], "the names stay"
    assert log.count("event=activation-checkpointing ") == 2 and log.count("by=transformers") == 2


# --- the callback -------------------------------------------------------------------------------------------
KINDS = {
    "epochs": "eval_strategy='epoch', logging_steps=3, lr_scheduler_type='reduce_lr_on_plateau', "
    "metric_for_best_model='loss'",
    "steps": "eval_strategy='steps', eval_steps=3, logging_steps=5",
    "logs by epoch": "eval_strategy='epoch', logging_strategy='epoch', save_strategy='epoch'",
}


def in_epochs(kind: str) -> dict[str, str]:
    return {"ARGUMENTS": f"dict(num_train_epochs=4, max_steps=-1, {KINDS[kind]})"}


def _told(*runs: Run) -> list[str]:
    words = ("logged ", "ended ")
    return [line for run in runs for line in run.log.splitlines() if line.startswith(words)]


@pytest.mark.parametrize(
    ("kind", "step"),
    sample(
        [("epochs", 8), ("epochs", 10), ("steps", 9), ("steps", 12), ("logs by epoch", 8)],
        *[("epochs", 8), ("steps", 12)],
    ),
)
def test_what_follows_a_step_that_was_stopped_at_is_done_by_the_next_attempt(
    lab: Lab, others: Lab, kind: str, step: int
) -> None:
    env = in_epochs(kind)
    plain = others.alone(CALLBACK, env)
    first = stopped_at(lab, CALLBACK, step, env=env)
    assert first.message.durableStep == step
    shutil.rmtree(lab.folder / "output")
    second = lab.run(CALLBACK, attempt=2, interval="1h", env=env).done()
    assert _told(first, second) == _told(plain)
    assert second.digest == plain.digest


def test_a_save_at_an_epochs_last_step_comes_after_its_evaluation(lab: Lab, others: Lab) -> None:
    env = in_epochs("epochs")
    plain = others.alone(CALLBACK, env)
    first = lab.run(CALLBACK, attempt=1, interval="4steps", env=env | {"SAVED": "8", "EVALUATING": "8"})
    first.until("holding").killed()
    assert "committed step=4 " in first.log and "committed step=8 " not in first.log
    second = lab.run(CALLBACK, attempt=2, interval="4steps", env=env).done()
    assert sorted({*_told(first), *_told(second)}) == sorted(_told(plain))
    assert _told(second) == [
        line for line in _told(plain) if int(line.split()[1 if line[0] == "l" else 2]) > 4
    ]
    assert second.digest == plain.digest


@pytest.mark.parametrize(
    ("kind", "step"), sample([("epochs", 8), ("steps", 9), ("steps", 12)], ("steps", 12))
)
def test_a_stop_in_an_evaluation_saves_the_step_before_and_the_next_attempt_evaluates(
    lab: Lab, others: Lab, kind: str, step: int
) -> None:
    env = in_epochs(kind)
    plain = others.alone(CALLBACK, env)
    stops = {"EVALUATING": str(step), "STOPS_IN_IT": "1"}
    first = lab.run(CALLBACK, attempt=1, interval="1h", env=env | stops).ends(ExitCode.INTERRUPTED)
    assert first.message.step == first.message.durableStep == step
    shutil.rmtree(lab.folder / "output")
    second = lab.run(CALLBACK, attempt=2, interval="1h", env=env).done()
    assert sorted({*_told(first), *_told(second)}) == sorted(_told(plain))
    assert second.digest == plain.digest


def test_an_evaluation_that_was_left_out_may_end_the_training(lab: Lab) -> None:
    env = STOPPING | {"CALLBACKS": "[EarlyStoppingCallback(1, 1e9)]"}
    stopped_at(lab, CALLBACK, 6, env=env)
    second = lab.run(CALLBACK, attempt=2, interval="1h", env=env).done()
    assert (second.message.reason, second.message.step) == (Reason.EARLY_STOPPED, 6)


def test_what_the_trainer_saves_for_itself_stays_as_it_wants_and_what_we_asked_for_is_gone(lab: Lab) -> None:
    env = {"ARGUMENTS": "dict(save_strategy='steps', save_steps=5, save_total_limit=1)"}
    run = lab.run(CALLBACK, interval="2steps", env=env).done()
    assert _names(lab.folder / "output") == ["checkpoint-18"], "the last one of its own, by its own limit"
    assert run.message.durableStep == 18


def test_a_save_is_made_though_the_trainer_keeps_the_best_alone(lab: Lab) -> None:
    env = {
        "ARGUMENTS": "dict(save_strategy='best', metric_for_best_model='loss', eval_strategy='steps', "
        "eval_steps=3, greater_is_better=True)"  # that is, hardly ever
    }
    run = lab.run(CALLBACK, interval="3steps", env=env).done()
    committed = {int(step) for step in re.findall(r"committed step=(\d+) ", run.log)}
    # A save that is still sent delays the next; 18 is the end's.
    assert committed & {3, 6, 9, 12, 15}, committed


def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(lab: Lab) -> None:
    env = {"SAVED": "8", "STOP": "8"}
    lab.run(CALLBACK, attempt=1, interval="3steps", env=env).ends(ExitCode.INTERRUPTED)
    newest, before, *_ = lab.head["checkpoints"]
    file = lab.folder / "store" / newest["key"] / "f00000-00001"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = lab.run(CALLBACK, attempt=2).done()
    assert "event=damaged" in again.log and "f00000-00001 has a wrong checksum" in again.log
    assert min(again.losses) == before["step"] + 1


def test_the_manifest_ends_it_profiles_it_and_what_is_not_taken_is_told(lab: Lab) -> None:
    training = {"maxSteps": 6, "emaDecay": 0.9, "profile": {"wait": 1, "warmup": 1, "active": 2}}
    run = lab.run(CALLBACK, training=json.dumps(training)).done()
    assert "event=override setting=max_steps manifest=6 script=18" in run.log and "step=6/6" in run.log
    rates = [float(line.split(" lr=")[1].split()[0]) for line in run.log.splitlines() if " lr=" in line]
    assert rates[-1] == pytest.approx(1e-2 / 6, rel=1e-4), "the Trainer's own schedule ends with it"
    assert "about=training fields=emaDecay " in run.log
    assert run.message.ignoredSettings == "emaDecay"
    assert len(_names(lab.folder / "store" / profile_key(1, 0, ""))) == 2


def test_a_scheduler_of_another_length_is_told(lab: Lab) -> None:
    given = CALLBACK.replace(
        "    return kind(\n",
        "    own = torch.optim.AdamW((model := GPT2LMHeadModel(config)).parameters(), lr=1e-2)\n"
        "    scheduler = torch.optim.lr_scheduler.LinearLR(own, 1.0, 0.1, 18)\n"
        "    return kind(\n        optimizers=(own, scheduler),\n",
    ).replace("model=GPT2LMHeadModel(config)", "model=model")
    run = lab.run(given, training='{"maxSteps": 2}').done()
    assert "event=advice about=learning-rate" in run.log and "spec.training.maxSteps 2" in run.log


@pytest.mark.heavy
def test_hooks_tell_where_the_time_went_and_which_evaluation_was_the_best(lab: Lab) -> None:
    """Equal losses, of which the first counts: in the second attempt only the checkpoint knows it."""
    arguments = (
        "dict(eval_strategy='steps', eval_steps=4, save_strategy='steps', save_steps=5, learning_rate=0.0)"
    )
    env = {"PAUSE": "0.005", "ARGUMENTS": arguments}
    first = lab.run(CALLBACK, attempt=1, interval="3steps", env=env | {"STOP": "9"})
    assert first.ends(ExitCode.INTERRUPTED).message.bestStep == 4
    second = lab.run(CALLBACK, attempt=2, interval="3steps", env=env).done()
    assert second.message.bestStep == 4
    split, steps = second.message.timeSplit, 18 - 9
    assert split is not None
    assert split.dataWait >= (steps - 1) * 8 * 0.005, "the first step is start-up"
    assert split.productive >= 2 * 32 * 0.005, "the evaluations at 12 and 16"
    assert split.checkpointStall > 0 and split.restore > 0 and split.unsaved == 0


SLOW = CALLBACK.replace(
    "theirs.train(",
    """\
theirs.eval_dataset = {"first": Text(), "second": Text()}
save, load = theirs._save_checkpoint, theirs._load_best_model


def save_slowly(*arguments):
    print("saves after step", theirs.state.global_step, flush=True)
    time.sleep(0.3)
    save(*arguments)


def load_slowly():
    time.sleep(0.3)
    load()


theirs._save_checkpoint, theirs._load_best_model = save_slowly, load_slowly
theirs.train(""",
)


@pytest.mark.heavy
@pytest.mark.parametrize("save", sample(["best", "steps"], "best"))
def test_neither_saves_nor_the_load_of_the_best_model_are_waits_for_data(lab: Lab, save: str) -> None:
    """The loss falls, so with `greater_is_better` the first evaluation is the best. Two datasets."""
    arguments = (
        f"dict(save_strategy='{save}', save_steps=6, eval_strategy='steps', eval_steps=6, "
        "metric_for_best_model='first_loss', greater_is_better=True, load_best_model_at_end=True)"
    )
    run = lab.run(SLOW, interval="1h", env={"PAUSE": "0.005", "ARGUMENTS": arguments}).done()
    saves = [int(line.split()[-1]) for line in run.log.splitlines() if line.startswith("saves after step ")]
    assert saves == ([6, 18] if save == "best" else [6, 12, 18, 18]), "the last one for us too"
    split = run.message.timeSplit
    assert split is not None
    assert split.checkpointStall >= len(saves) * 0.3 and split.other >= 0.3
    assert split.dataWait >= 17 * 8 * 0.005, "also after evaluations that no save follows"
    all_read = 3 * (32 + 24) * 0.005  # both datasets, but for the second's first batch
    assert split.productive >= 0.95 * all_read, "a moment at each of their ends counts as other time"


BAD = {
    "no resume": (
        "theirs = trainer(TransformersCallback())\ntheirs.train()\n",
        "TransformersCallback.resume() was not called",
    ),
    "resume too early": (
        "TransformersCallback().resume(None)\n",
        "spot.resume() was called before the Trainer was made",
    ),
    "model only": ("trainer(TransformersCallback(), save_only_model=True)\n", "save_only_model=True"),
    "weights that are not stored": (
        "spot = TransformersCallback()\n"
        "loss = torch.nn.Bilinear(4, 1, 1)\n"
        "theirs = trainer(spot)\n"
        "theirs.create_optimizer()\n"
        "theirs.optimizer.add_param_group({'params': loss.parameters()})\n"
        "theirs.train(resume_from_checkpoint=spot.resume(theirs))\n",
        "Bilinear.weight of shape (1, 4, 1)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(lab: Lab, case: str) -> None:
    code, says = BAD[case]
    script = HEAD + "from spottrain.integrations.transformers import TransformersCallback\n" + code
    assert says in lab.run(script).ends(ExitCode.BAD_CONFIGURATION).message.message


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
