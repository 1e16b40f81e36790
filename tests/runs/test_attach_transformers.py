"""Scripts with Hugging Face's Trainer that know nothing of spottrain, under `spottrain run`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest
import spottrain
from spottrain.checkpoint.final_weights import digest
from spottrain.contract import Env, ExitCode, Outcome, Reason

from tests.runs.conftest import (
    LOADS,
    Lab,
    Start,
    begins_as_if_the_script_loaded_the_weights,
    two_ranks_stop_at_one_step_and_go_on_bit_by_bit,
)
from tests.runs.launched import OURS
from tests.support.zygote import Zygote

pytest.importorskip("transformers")

HEAD = """\
import os, signal, time
import torch
from transformers import (
    EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments,
    enable_full_determinism,
)

enable_full_determinism(1)
PAUSE, STOP = (float(os.environ.get(name, "0")) for name in ("PAUSE", "STOP"))


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        time.sleep(PAUSE)
        tokens = torch.randint(16, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


class Stop(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step + 1 == STOP:
            os.kill(os.getpid(), signal.SIGTERM)


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
        callbacks=[*callbacks, Stop()],
    )


theirs = trainer(*eval(os.environ.get("CALLBACKS", "[]")), **eval(os.environ.get("ARGUMENTS", "{}")))
"""
SCRIPT = (
    HEAD
    + """\
result = theirs.train(**eval(os.environ.get("TRAIN", "{}")))
print("after train", result.global_step, flush=True)
time.sleep(float(os.environ.get("REST", "0")))
theirs.save_model("model")
print("saved the model", flush=True)
"""
)
SUBCLASS = {"ARGUMENTS": "dict(kind=Fine)"}


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    zygote.preload("transformers.trainer")
    yield zygote
    zygote.close()


@pytest.mark.parametrize("kind", ["Trainer", "a subclass"])
def test_an_unchanged_script_ends_with_the_weights_of_one_that_was_not_interrupted(
    lab: Lab, others: Lab, kind: str
) -> None:
    env = SUBCLASS if kind != "Trainer" else {}
    plain = others.alone(SCRIPT, env)
    first = lab.run(SCRIPT, attempt=1, env=env | {"PAUSE": "0.05"}).until("step=6/").stopped()
    assert first.message.outcome is Outcome.INTERRUPTED
    assert first.message.durableStep == first.message.step and first.message.totalSteps == 18
    second = lab.run(SCRIPT, attempt=2, interval="3steps", env=env | {"PAUSE": "0.05"})
    second.until("event=committed").until(f"step={min(second.losses) + 5}/").killed()
    third = lab.run(SCRIPT, attempt=3, env=env).done()
    assert first.losses | second.losses | third.losses == plain.losses
    assert third.digest == plain.digest
    assert "after train 18" in third.log and "saved the model" in third.log
    saved = digest(spottrain.load_weights(lab.folder / "store/final/model.safetensors"))
    assert saved == plain.digest
    whose = "Fine" if env else "Trainer"
    assert third.log.count("event=attached") == 1
    assert f"library=transformers version=5.23.0 what={whose}.train off=--no-auto-attach" in third.log


@pytest.mark.parametrize("base", ["done", "not done"])
def test_it_begins_from_another_runs_weights_once(lab: Lab, base: str) -> None:
    """Its head is tied to the embedding, so the Trainer's checkpoint has only one of them."""
    loading = SCRIPT.replace("result =", f"import spottrain\ntheirs.model.{LOADS}\nresult =")
    if base == "done":
        return begins_as_if_the_script_loaded_the_weights(lab, SCRIPT, loading)
    loads = "from safetensors.torch import load_model\nload_model(theirs.model, 'base.safetensors')\n"
    from_file = SCRIPT.replace("result =", f"{loads}result =")
    lab.run(SCRIPT, at="base", attempt=1, env={"STOP": "7"}).ends(ExitCode.INTERRUPTED)
    words = ["export", str(lab.folder / "base"), "--to", "base.safetensors"]
    lab.start(words, {}, verb="checkpoints").done()
    plain = lab.run(from_file, at="plain", attempt=1).done()
    run = lab.run(SCRIPT, attempt=1, env={Env.INIT_FROM: str(lab.folder / "base")}).done()
    assert "step=7 tensors=" in run.log
    assert run.losses == plain.losses and run.digest == plain.digest
    return None


def test_two_ranks_begin_from_another_runs_weights(lab: Lab) -> None:
    loading = SCRIPT.replace("result =", f"import spottrain\ntheirs.model.{LOADS}\nresult =")
    env = {"ARGUMENTS": "dict(ddp_backend='gloo')"}
    begins_as_if_the_script_loaded_the_weights(lab, SCRIPT, loading, stop_at=5, nproc=2, env=env)


def test_a_script_that_resumes_from_its_own_checkpoint_cannot_begin_from_other_weights(lab: Lab) -> None:
    env = {"ARGUMENTS": "dict(save_strategy='steps', save_steps=6, max_steps=6)"}
    lab.run(SCRIPT, at="base", attempt=1, env=env).done()
    env = {"TRAIN": "dict(resume_from_checkpoint='output/checkpoint-6')"}
    run = lab.run(SCRIPT, attempt=1, env=env | {Env.INIT_FROM: str(lab.folder / "base")})
    run.ends(ExitCode.BAD_CONFIGURATION)
    assert (
        "resumes from a checkpoint of its own, and checkpoint.initFrom begins at step 0"
        in run.message.message
    )


@pytest.mark.parametrize("step", [1, 4, 11, 18])
def test_a_stop_at_any_step_is_gone_on_from(lab: Lab, others: Lab, step: int) -> None:
    plain = others.alone(SCRIPT)
    code = ExitCode.DONE if step == 18 else ExitCode.INTERRUPTED
    first = lab.run(SCRIPT, attempt=1, interval="1h", env={"STOP": str(step)}).ends(code)
    assert first.message.durableStep == step
    shutil.rmtree(lab.folder / "output")
    second = lab.run(SCRIPT, attempt=2, interval="1h").done()
    if step < 18:
        assert first.losses | second.losses == plain.losses and second.digest == plain.digest
    else:
        assert first.digest == plain.digest and "done already" in second.message.message


def test_a_stop_after_the_training_has_the_rest_of_the_script_run_again(lab: Lab, others: Lab) -> None:
    plain = others.alone(SCRIPT)
    env = {Env.GRACE_SECONDS: "4", "REST": "60"}
    first = lab.run(SCRIPT, attempt=1, env=env).until("after train 18").stopped()
    assert first.message.outcome is Outcome.INTERRUPTED and first.message.durableStep == 18
    assert "runs the lines after the training again" in first.message.message
    assert json.loads((lab.folder / "store/HEAD").read_text())["state"] == "released"
    shutil.rmtree(lab.folder / "output")
    second = lab.run(SCRIPT, attempt=2).done()
    assert not second.losses and "after train 18" in second.log and "saved the model" in second.log
    assert second.digest == plain.digest
    assert json.loads((lab.folder / "store/HEAD").read_text())["state"] == "done"


def test_a_short_rest_of_the_script_ends_within_the_notice(lab: Lab) -> None:
    env = {Env.GRACE_SECONDS: "20", "REST": "1"}
    run = lab.run(SCRIPT, env=env).until("after train 18").send().done()
    assert run.message.outcome is Outcome.DONE and "saved the model" in run.log


def test_a_kill_after_the_training_does_not_lose_the_rest_of_the_script(lab: Lab, others: Lab) -> None:
    lab.run(SCRIPT, attempt=1, env={"REST": "60"}).until("after train 18").killed()
    second = lab.run(SCRIPT, attempt=2).done()
    assert not second.losses and "saved the model" in second.log
    assert second.digest == others.alone(SCRIPT).digest


def test_a_script_that_fails_after_its_training_is_not_done(lab: Lab) -> None:
    failing = SCRIPT.replace('theirs.save_model("model")', 'open("absent").close()')
    first = lab.run(failing, attempt=1).ends(ExitCode.FAILED)
    assert "absent" in first.message.message
    assert json.loads((lab.folder / "store/HEAD").read_text())["state"] == "released"
    second = lab.run(SCRIPT, attempt=2).done()
    assert not second.losses and "saved the model" in second.log


def test_an_exit_code_of_the_script_after_its_training_stays(lab: Lab) -> None:
    run = lab.run(SCRIPT + "raise SystemExit(3)\n").ends(3)
    assert run.message.outcome is Outcome.FAILED
    assert json.loads((lab.folder / "store/HEAD").read_text())["state"] == "released"


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
    lab.run(SCRIPT, attempt=1, interval="1h", env=env | {"STOP": "10"}).ends(ExitCode.INTERRUPTED)
    shutil.rmtree(lab.folder / "output")
    second = lab.run(SCRIPT, attempt=2, interval="1h", env=env | {"REST": "60"})
    second.until("after train 18").killed()
    shutil.rmtree(lab.folder / "output")
    third = lab.run(SCRIPT, attempt=3, interval="1h", env=env).done()
    assert not third.losses and third.digest == plain.digest
    assert not list((lab.folder / "output").glob(".spottrain-last*"))


STOPPING = {
    "CALLBACKS": "[EarlyStoppingCallback(2, 1e9)]",
    "ARGUMENTS": "dict(eval_strategy='steps', eval_steps=3, metric_for_best_model='loss')",
}


def test_early_stopping_goes_on_counting_after_an_interruption(lab: Lab, others: Lab) -> None:
    plain = others.alone(SCRIPT, STOPPING)
    assert plain.message.step == 9 and plain.message.reason == Reason.EARLY_STOPPED
    lab.run(SCRIPT, attempt=1, interval="1h", env=STOPPING | {"STOP": "7"}).ends(ExitCode.INTERRUPTED)
    second = lab.run(SCRIPT, attempt=2, interval="1h", env=STOPPING | {"REST": "60"})
    second.until("after train 9").killed()
    third = lab.run(SCRIPT, attempt=3, interval="1h", env=STOPPING).done()
    assert not third.losses and "after train 9" in third.log
    assert third.digest == plain.digest and third.message.reason == Reason.EARLY_STOPPED


@pytest.mark.parametrize(("early", "better"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("when", ["'steps', eval_steps=3", "'epoch'"])
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


@pytest.mark.parametrize("given", ["'output/checkpoint-6'", "True"])
def test_the_scripts_own_checkpoint_counts_for_the_first_start(lab: Lab, given: str) -> None:
    saving = {"ARGUMENTS": "dict(save_strategy='steps', save_steps=6, save_total_limit=1, max_steps=6)"}
    lab.run(SCRIPT, env=saving | {Env.AUTO_ATTACH: "false"}).done()
    env = {"TRAIN": f"dict(resume_from_checkpoint={given})"}
    first = lab.run(SCRIPT, attempt=1, interval="1h", env=env | {"STOP": "10"}).ends(ExitCode.INTERRUPTED)
    assert min(first.losses) == 7
    second = lab.run(SCRIPT, attempt=2, env=env).done()
    assert min(second.losses) == 11
    assert ("event=override setting=resume_from_checkpoint" in second.log) == (given != "True")


def test_a_second_training_is_done_and_not_saved_and_says_so(lab: Lab) -> None:
    """The Trainer goes on with the model, so the second one begins where the first one ended."""
    twice = SCRIPT.replace("result = ", 'theirs.train()\nprint("between", flush=True)\nresult = ')
    env = {Env.GRACE_SECONDS: "4", "PAUSE": "0.02"}
    first = lab.run(twice, attempt=1, env=env).until("between", "about=attach")
    first.send().ends(ExitCode.INTERRUPTED_LOST)
    assert "second training had begun, which is not saved" in first.message.message
    second = lab.run(twice, attempt=2).done()
    assert not second.losses and "between" in second.log and "saved the model" in second.log
    assert "the script trains a second time" in second.log


def test_trials_of_a_hyperparameter_search_are_left_alone(lab: Lab) -> None:
    searching = SCRIPT.replace("result = ", "theirs.train(trial={'learning_rate': 1e-3})\nresult = ")
    run = lab.run(searching).done()
    assert run.message.outcome is Outcome.UNTRAINED and "event=attached" not in run.log
    assert run.log.count("a hyperparameter search is not saved") == 1


def test_a_training_in_a_child_process_is_left_alone(lab: Lab) -> None:
    child = SCRIPT.replace(
        "result = ",
        "import multiprocessing\n"
        "child = multiprocessing.get_context('fork').Process(target=theirs.train)\n"
        "child.start(), child.join()\n"
        "raise SystemExit(child.exitcode)\nresult = ",
    )
    run = lab.run(child).done()
    assert run.message.outcome is Outcome.UNTRAINED and "event=attached" not in run.log
    assert "a process that the script has started trains" in run.log


def test_a_script_that_only_evaluates_claims_nothing(lab: Lab) -> None:
    run = lab.run(HEAD + "print(theirs.evaluate()['eval_loss'])\n").done()
    assert run.message.outcome is Outcome.UNTRAINED and "event=attached" not in run.log
    assert not (lab.folder / "store/HEAD").exists()


def test_a_training_that_failed_may_be_tried_again(lab: Lab) -> None:
    again = SCRIPT.replace(
        "result = ",
        "own, theirs.train_dataset = theirs.train_dataset, [{}] * 32\n"
        "try:\n"
        "    theirs.train()\n"
        "except Exception as error:\n"
        "    print('caught', type(error), flush=True)\n"
        "theirs.train_dataset = own\n"
        "result = ",
    )
    run = lab.run(again).done()
    assert "caught" in run.log and run.message.step == 18
    assert json.loads((lab.folder / "store/HEAD").read_text())["state"] == "done"


FAILING = (
    HEAD
    + """\
theirs.train_dataset = [{}] * 32
try:
    theirs.train()
except Exception as error:
    print("caught", type(error), flush=True)
"""
)


def test_another_training_after_a_failed_one_is_left_alone(lab: Lab) -> None:
    run = lab.run(FAILING + "trainer().train()\nprint('trained', flush=True)\n").ends(ExitCode.FAILED)
    assert run.log.count("event=attached") == 1 and "goes on with another Trainer" in run.log
    assert "trained" in run.log
    assert "Trainer.train failed after 0 step(s), and the script caught that" in run.message.message


def test_a_stop_in_another_training_after_a_failed_one_has_lost_it(lab: Lab) -> None:
    run = lab.run(FAILING + "trainer().train()\n", env={"PAUSE": "0.1"}).until("goes on with another Trainer")
    run.send().ends(ExitCode.INTERRUPTED_LOST)
    assert "a training after one that had failed" in run.message.message


@pytest.mark.parametrize("change", ["output_dir='stage-2'", "max_steps=24"])
def test_a_second_stage_does_not_go_on_from_the_checkpoint_of_the_first(lab: Lab, change: str) -> None:
    stage = {"ARGUMENTS": "dict(output_dir='stage-1')", "REST": "60"}
    lab.run(SCRIPT, attempt=1, env=stage).until("after train 18").killed()
    arguments = "dict({'output_dir': 'stage-1'} | dict(" + change + "))"
    run = lab.run(SCRIPT, attempt=2, env={"ARGUMENTS": arguments}).ends(ExitCode.BAD_CONFIGURATION)
    assert "one checkpoint URI for each" in run.message.message
    assert json.loads((lab.folder / "store/HEAD").read_text())["state"] == "released"


def test_a_date_in_the_folder_and_another_length_by_the_manifest_are_gone_on_with(lab: Lab) -> None:
    first = {"ARGUMENTS": "dict(output_dir='runs/a-2026-11-23_221057')", "STOP": "9"}
    lab.run(SCRIPT, attempt=1, interval="1h", env=first).ends(ExitCode.INTERRUPTED)
    second = {"ARGUMENTS": "dict(output_dir='runs/a-2026-11-24_000102')"}
    run = lab.run(SCRIPT, attempt=2, env=second, training='{"maxSteps": 12}').done()
    assert min(run.losses) == 10 and run.message.step == 12


def test_the_manifest_ends_it(lab: Lab) -> None:
    run = lab.run(SCRIPT, training='{"maxSteps": 6}').done()
    assert "event=override setting=max_steps manifest=6 script=18" in run.log and run.message.step == 6


def test_two_ranks_stop_and_go_on(lab: Lab) -> None:
    two_ranks_stop_at_one_step_and_go_on_bit_by_bit(lab, SCRIPT, {"ARGUMENTS": "dict(ddp_backend='gloo')"})


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_a_switch_turns_it_off(lab: Lab, how: str) -> None:
    if how == "flag":
        (lab.folder / "train.py").write_text(SCRIPT)
        run = lab.start(["--no-auto-attach", "train.py"], {Env.CHECKPOINT_URI: "store"})
    else:
        run = lab.run(SCRIPT, env={Env.AUTO_ATTACH: "false"})
    run.done()
    assert run.message.outcome is Outcome.UNTRAINED and "event=attached" not in run.log
    assert "saved the model" in run.log


def test_a_bad_value_of_the_switch_is_refused(lab: Lab) -> None:
    run = lab.run(SCRIPT, env={Env.AUTO_ATTACH: "no"}).ends(ExitCode.BAD_CONFIGURATION)
    assert f"{Env.AUTO_ATTACH}='no': must be true or false" in run.message.message


def test_a_version_that_does_not_fit_is_left_alone_and_named(lab: Lab) -> None:
    found = lab.folder / "transformers-4.57.0.dist-info"  # beside the script, so found before the real one
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.0\n")
    run = lab.run(SCRIPT).done()
    assert run.message.outcome is Outcome.UNTRAINED and "event=attached" not in run.log
    assert "transformers 4.57.0 is not attached to" in run.log
    assert "at least 5.10 and below 6.0" in run.log and "saved the model" in run.log


REFUSED = {
    "save_only_model=True": "leaves the optimizer out of checkpoints",
    "enable_jit_checkpoint=True": "saves at SIGTERM too",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_a_setting_that_cannot_be_served_is_refused_by_name(lab: Lab, setting: str) -> None:
    run = lab.run(SCRIPT, env={"ARGUMENTS": f"dict({setting})"}).ends(ExitCode.BAD_CONFIGURATION)
    assert setting in run.message.message and REFUSED[setting] in run.message.message
    assert "--no-auto-attach" in run.message.message
    assert not (lab.folder / "store/HEAD").exists()


def test_the_callback_of_a_script_that_has_one_stays_alone(lab: Lab) -> None:
    own = SCRIPT.replace(
        "result = ",
        "from spottrain.integrations.transformers import TransformersCallback\n"
        "spot = TransformersCallback()\n"
        "theirs.add_callback(spot)\n"
        "spot.on_init_end(theirs.args, theirs.state, theirs.control)\n"
        "theirs.train(resume_from_checkpoint=spot.resume(theirs))\n"
        "raise SystemExit\n",
    )
    run = lab.run(own).done()
    assert run.message.step == 18 and "event=attached" not in run.log


def test_a_stop_before_the_training_has_lost_nothing(start: Start) -> None:
    script = "from transformers import Trainer\nimport time\nprint('imported', flush=True)\ntime.sleep(60)\n"
    run = start(script, *OURS, "train.py").until("imported", seconds=300).stopped()
    assert run.message.message == "Interrupted before the training began; nothing was lost."


@pytest.mark.parametrize("own", ["import transformers.trainer", "# from transformers import Trainer"])
def test_a_stop_in_a_loop_of_its_own_has_lost_it(start: Start, own: str) -> None:
    loop = (
        own + "\nimport time, torch\nmodel = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "while True:\n"
        "    model(torch.ones(1)).sum().backward(), optimizer.step(), print('stepped', flush=True)\n"
        "    time.sleep(0.1)\n"
    )
    run = start(loop, *OURS, "train.py").until("stepped", seconds=300).send().ends(ExitCode.INTERRUPTED_LOST)
    assert "nothing that" in run.message.message


def test_a_trainer_that_replaces_the_training_is_told_that_nothing_is_saved(lab: Lab) -> None:
    own = HEAD.replace("return super().train(*args, **kwargs)", "self.create_optimizer().step()")
    run = lab.run(own + "theirs.train()\n", env=SUBCLASS).done()
    assert run.message.outcome is Outcome.UNTRAINED
    assert "Fine.train trains by itself and does not call train of transformers" in run.log


def test_a_callback_that_is_imported_and_not_used_is_told(lab: Lab) -> None:
    run = lab.run("import spottrain.integrations.transformers\n" + SCRIPT).done()
    assert run.message.outcome is Outcome.UNTRAINED and "this Trainer does not use it" in run.log


def test_a_fresh_process_is_attached_to_when_it_imports_the_library_and_its_children_are_not(
    start: Start,
) -> None:
    code = "import transformers.trainer as t; print('wrapped', hasattr(t.Trainer.train, '__wrapped__'))"
    script = (
        SCRIPT + f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}], check=True)\n"
    )
    run = start(script, *OURS, "train.py").done(300)
    assert run.message.step == 18 and "event=attached library=transformers" in run.log
    assert "saved the model" in run.log and "wrapped False" in run.log
