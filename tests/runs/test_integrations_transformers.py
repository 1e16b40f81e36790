"""Hugging Face's Trainer under `TransformersCallback`: the real library, real processes, a tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import spottrain
from spottrain.checkpoint.final_weights import digest
from spottrain.contract import ExitCode, Outcome, Reason
from spottrain.core.profile_window import profile_key

from tests.runs.conftest import (
    LOADS,
    Lab,
    begins_as_if_the_script_loaded_the_weights,
    two_ranks_stop_at_one_step_and_go_on_bit_by_bit,
    weights_that_could_not_be_left_are_left_by_the_next_attempt,
)
from tests.runs.launched import Run
from tests.support.zygote import Zygote

pytest.importorskip("transformers")

HEAD = """\
import os, time
import torch
from spottrain.integrations.transformers import TransformersCallback
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, enable_full_determinism

enable_full_determinism(1)
PAUSE = float(os.environ.get("PAUSE", "0"))


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        time.sleep(PAUSE)
        tokens = torch.randint(16, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def trainer(*callbacks, **arguments):
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
    usual |= arguments
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(**usual),
        train_dataset=Text(),
        eval_dataset=Text(),
        callbacks=list(callbacks),
    )
"""

SCRIPT = (
    HEAD
    + """\
spot = TransformersCallback()
theirs = trainer(spot, **eval(os.environ.get("ARGUMENTS", "{}")))
theirs.train(resume_from_checkpoint=spot.resume(theirs))
print("after train")
"""
)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    zygote.preload("transformers.trainer")
    yield zygote
    zygote.close()


def test_an_interrupted_training_ends_with_the_weights_of_one_that_was_not(lab: Lab) -> None:
    plain = lab.run(SCRIPT, at="plain", attempt=1).done()
    first = lab.run(SCRIPT, attempt=1, env={"PAUSE": "0.05"}).until("step=6/").stopped()
    assert first.message.outcome is Outcome.INTERRUPTED
    assert first.message.durableStep == first.message.step and first.message.totalSteps == 18
    second = lab.run(SCRIPT, attempt=2, interval="3steps", env={"PAUSE": "0.05"})
    second.until("event=committed").until(f"step={min(second.losses) + 5}/")
    second.killed()
    third = lab.run(SCRIPT, attempt=3).done()
    assert third.digest == plain.digest
    assert first.losses | second.losses | third.losses == plain.losses
    assert third.message.outputURI and "after train" in third.log
    assert digest(spottrain.load_weights(lab.folder / "store/final/model.safetensors")) == plain.digest


ENDS = (
    SCRIPT.replace("import os, time", "import os, signal, time")
    .replace(
        "spot = TransformersCallback()\n",
        """\
from transformers import TrainerCallback

STOP, HOLD = (int(os.environ.get(name, "0")) for name in ("STOP", "HOLD"))


class Told(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step + 1 == STOP:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_end(self, args, state, control, **_):
        print("ended", state.epoch, state.global_step, flush=True)

    def on_prediction_step(self, args, state, control, **_):
        if HOLD and state.global_step == HOLD:
            print("holding", flush=True)
            time.sleep(60)  # until the test kills it

    def on_log(self, args, state, control, logs, **_):
        told = {name: value for name, value in logs.items() if "runtime" not in name and "second" not in name}
        told.pop("grad_norm", None)  # what is logged at an epoch's end after a resume does not know it
        told.pop("train_loss", None), told.pop("total_flos", None)  # of one call of train()
        if told.keys() > {"epoch"}:
            print("logged", state.global_step, sorted(told.items()), flush=True)


spot = TransformersCallback()
""",
    )
    .replace("trainer(spot, ", "trainer(Told(), spot, ")
)
KINDS = {
    "epochs": "eval_strategy='epoch', logging_steps=3, lr_scheduler_type='reduce_lr_on_plateau', "
    "metric_for_best_model='loss'",
    "steps": "eval_strategy='steps', eval_steps=3, logging_steps=5",
    "logs by epoch": "eval_strategy='epoch', logging_strategy='epoch', save_strategy='epoch'",
}


def _told(*runs: Run) -> list[str]:
    words = ("logged ", "ended ")
    return [line for run in runs for line in run.log.splitlines() if line.startswith(words)]


@pytest.mark.parametrize(
    ("kind", "step"),
    [("epochs", 8), ("epochs", 10), ("steps", 9), ("steps", 12), ("logs by epoch", 8)],
)
def test_what_follows_a_step_that_was_stopped_at_is_done_by_the_next_attempt(
    lab: Lab, others: Lab, kind: str, step: int
) -> None:
    env = {"ARGUMENTS": f"dict(num_train_epochs=4, max_steps=-1, {KINDS[kind]})"}
    plain = others.alone(ENDS, env)
    first = lab.run(ENDS, attempt=1, interval="1h", env=env | {"STOP": str(step)}).ends(ExitCode.INTERRUPTED)
    assert first.message.durableStep == step
    shutil.rmtree(lab.folder / "output")
    second = lab.run(ENDS, attempt=2, interval="1h", env=env).done()
    assert _told(first, second) == _told(plain)
    assert second.digest == plain.digest


def test_a_save_at_an_epochs_last_step_comes_after_its_evaluation(lab: Lab, others: Lab) -> None:
    arguments = "dict(num_train_epochs=4, max_steps=-1, eval_strategy='epoch', logging_steps=3)"
    env = {"ARGUMENTS": arguments}
    plain = others.alone(ENDS, env)
    first = lab.run(ENDS, attempt=1, interval="4steps", env=env | {"HOLD": "8"})
    first.until("holding").killed()
    assert "committed step=4 " in first.log and "committed step=8 " not in first.log
    second = lab.run(ENDS, attempt=2, interval="4steps", env=env).done()
    assert sorted({*_told(first), *_told(second)}) == sorted(_told(plain))
    assert _told(second) == [
        line for line in _told(plain) if int(line.split()[1 if line[0] == "l" else 2]) > 4
    ]
    assert second.digest == plain.digest


def test_an_evaluation_that_was_left_out_may_end_the_training(lab: Lab) -> None:
    stopping = ENDS.replace(
        "trainer(Told(), spot, ", "trainer(EarlyStoppingCallback(1, 1e9), Told(), spot, "
    ).replace(
        "from transformers import TrainerCallback",
        "from transformers import EarlyStoppingCallback, TrainerCallback",
    )
    env = {"ARGUMENTS": "dict(eval_strategy='steps', eval_steps=3, metric_for_best_model='loss')"}
    lab.run(stopping, attempt=1, interval="1h", env=env | {"STOP": "6"}).ends(ExitCode.INTERRUPTED)
    second = lab.run(stopping, attempt=2, interval="1h", env=env).done()
    assert (second.message.reason, second.message.step) == (Reason.EARLY_STOPPED, 6)


def test_it_begins_from_another_runs_weights_once(lab: Lab) -> None:
    loading = SCRIPT.replace("theirs.train(", f"import spottrain\ntheirs.model.{LOADS}\ntheirs.train(")
    begins_as_if_the_script_loaded_the_weights(lab, SCRIPT, loading)


def test_a_resume_that_is_not_given_the_trainer_says_what_stays_undone(lab: Lab) -> None:
    script = SCRIPT.replace("spot.resume(theirs)", "spot.resume()")
    lab.run(script, attempt=1, env={"PAUSE": "0.05"}).until("step=6/").stopped()
    second = lab.run(script, attempt=2).done()
    assert "event=advice about=resume" in second.log and "spot.resume(trainer)" in second.log


def test_what_the_trainer_saves_for_itself_stays_as_it_wants_and_what_we_asked_for_is_gone(lab: Lab) -> None:
    env = {"ARGUMENTS": "dict(save_strategy='steps', save_steps=5, save_total_limit=1)"}
    run = lab.run(SCRIPT, interval="2steps", env=env | {"PAUSE": "0.01"}).done()
    assert _names(lab.folder / "output") == ["checkpoint-18"], "the last one of its own, by its own limit"
    assert run.message.durableStep == 18


def test_a_save_is_made_though_the_trainer_keeps_the_best_alone(lab: Lab) -> None:
    env = {
        "ARGUMENTS": "dict(save_strategy='best', metric_for_best_model='loss', eval_strategy='steps', "
        "eval_steps=3, greater_is_better=True)"  # that is, hardly ever
    }
    run = lab.run(SCRIPT, interval="3steps", env=env).done()
    assert "committed step=7 " in run.log, "a step late, for at step 6 the Trainer decided"


def test_weights_that_could_not_be_left_are_left_by_the_next_attempt(lab: Lab) -> None:
    weights_that_could_not_be_left_are_left_by_the_next_attempt(lab, SCRIPT)


def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(lab: Lab) -> None:
    lab.run(SCRIPT, attempt=1, interval="3steps", env={"PAUSE": "0.05"}).until("step=8/").stopped()
    store = lab.folder / "store"
    key = json.loads((store / "HEAD").read_text())["checkpoints"][0]["key"]
    file = store / key / "f00000-00001"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = lab.run(SCRIPT, attempt=2).done()
    assert "event=damaged" in again.log and "f00000-00001 has a wrong checksum" in again.log
    assert min(again.losses) == 7, "the one at step 6"


def test_the_manifest_ends_it_profiles_it_and_what_is_not_taken_is_told(lab: Lab) -> None:
    training = {"maxSteps": 6, "emaDecay": 0.9, "profile": {"wait": 1, "warmup": 1, "active": 2}}
    run = lab.run(SCRIPT, training=json.dumps(training)).done()
    assert "event=override setting=max_steps manifest=6 script=18" in run.log and "step=6/6" in run.log
    rates = [float(line.split(" lr=")[1].split()[0]) for line in run.log.splitlines() if " lr=" in line]
    assert rates[-1] == pytest.approx(1e-2 / 6, rel=1e-4), "the Trainer's own schedule ends with it"
    assert "about=training fields=emaDecay " in run.log
    assert run.message.ignoredSettings == "emaDecay"
    assert len(_names(lab.folder / "store" / profile_key(1, 0, ""))) == 2


def test_a_scheduler_of_another_length_is_told(lab: Lab) -> None:
    given = HEAD.replace(
        "    return Trainer(\n",
        "    own = torch.optim.AdamW((model := GPT2LMHeadModel(config)).parameters(), lr=1e-2)\n"
        "    scheduler = torch.optim.lr_scheduler.LinearLR(own, 1.0, 0.1, 18)\n"
        "    return Trainer(\n        optimizers=(own, scheduler),\n",
    ).replace("model=GPT2LMHeadModel(config)", "model=model")
    run = lab.run(given + SCRIPT.removeprefix(HEAD), training='{"maxSteps": 2}').done()
    assert "event=advice about=learning-rate" in run.log and "spec.training.maxSteps 2" in run.log


def test_a_window_past_the_end_is_refused_before_the_first_step(lab: Lab) -> None:
    run = lab.run(SCRIPT, training='{"profile": {"wait": 100}}').ends(ExitCode.BAD_CONFIGURATION)
    assert not run.losses and "maxSteps to at least 105" in run.message.message
    assert json.loads((lab.folder / "store" / "HEAD").read_text())["state"] == "released"


def test_hooks_tell_where_the_time_went_and_which_evaluation_was_the_best(lab: Lab) -> None:
    """Equal losses, of which the first counts: in the second attempt only the checkpoint knows it."""
    arguments = (
        "dict(eval_strategy='steps', eval_steps=4, save_strategy='steps', save_steps=5, learning_rate=0.0)"
    )
    env = {"PAUSE": "0.02", "ARGUMENTS": arguments}
    first = lab.run(SCRIPT, attempt=1, interval="3steps", env=env).until(" step=9/").stopped()
    assert first.message.bestStep == 4
    second = lab.run(SCRIPT, attempt=2, interval="3steps", env=env).done()
    assert second.message.bestStep == 4
    split, steps = second.message.timeSplit, 18 - (first.message.step or 0)
    assert split is not None
    assert split.dataWait >= (steps - 1) * 8 * 0.02, "the first step is start-up"
    assert split.productive >= 2 * 32 * 0.02, "the evaluations at 12 and 16"
    assert split.checkpointStall > 0 and split.restore > 0 and split.unsaved == 0


SLOW = SCRIPT.replace(
    "theirs.train(",
    """\
theirs.eval_dataset = {"first": Text(), "second": Text()}
save, load = theirs._save_checkpoint, theirs._load_best_model


def save_slowly(*arguments):
    print("saves after step", theirs.state.global_step, flush=True)
    time.sleep(1.0)
    save(*arguments)


def load_slowly():
    time.sleep(1.0)
    load()


theirs._save_checkpoint, theirs._load_best_model = save_slowly, load_slowly
theirs.train(""",
)


@pytest.mark.parametrize("save", ["best", "steps"])
def test_neither_saves_nor_the_load_of_the_best_model_are_waits_for_data(lab: Lab, save: str) -> None:
    """The loss falls, so with `greater_is_better` the first evaluation is the best. Two datasets."""
    arguments = (
        f"dict(save_strategy='{save}', save_steps=6, eval_strategy='steps', eval_steps=6, "
        "metric_for_best_model='first_loss', greater_is_better=True, load_best_model_at_end=True)"
    )
    run = lab.run(SLOW, interval="1h", env={"PAUSE": "0.01", "ARGUMENTS": arguments}).done()
    saves = [int(line.split()[-1]) for line in run.log.splitlines() if line.startswith("saves after step ")]
    assert saves == ([6, 18] if save == "best" else [6, 12, 18]), "the best, and for us the last"
    split = run.message.timeSplit
    assert split is not None
    assert split.checkpointStall >= len(saves) * 1.0 and split.other >= 1.0
    assert split.dataWait >= 17 * 8 * 0.01, "also after evaluations that no save follows"
    all_read = 3 * (32 + 24) * 0.01  # both datasets, but for the second's first batch
    assert split.productive >= 0.95 * all_read, "a moment at each of their ends counts as other time"


def test_a_training_that_an_evaluation_ends_is_done_for_early_stopping(lab: Lab) -> None:
    stopping = SCRIPT.replace(
        "theirs = trainer(spot, ",
        "from transformers import EarlyStoppingCallback\n"
        "theirs = trainer(EarlyStoppingCallback(1, early_stopping_threshold=1e9), spot, ",
    )
    env = {"ARGUMENTS": "dict(eval_strategy='steps', eval_steps=3, metric_for_best_model='loss')"}
    run = lab.run(stopping, env=env).done()
    assert (run.message.outcome, run.message.reason) == (Outcome.DONE, Reason.EARLY_STOPPED)
    assert run.message.step == 6 and "after the evaluation at step 6" in run.message.message


def test_two_ranks_stop_and_go_on(lab: Lab) -> None:
    two_ranks_stop_at_one_step_and_go_on_bit_by_bit(lab, SCRIPT, {"ARGUMENTS": "dict(ddp_backend='gloo')"})


BAD = {
    "no resume": (
        "theirs = trainer(TransformersCallback())\ntheirs.train()\n",
        "TransformersCallback.resume() was not called",
    ),
    "resume too early": (
        "TransformersCallback().resume()\n",
        "spot.resume() was called before the Trainer was made",
    ),
    "model only": (
        "trainer(TransformersCallback(), save_only_model=True)\n",
        "TrainingArguments(save_only_model=True) leaves the optimizer out of checkpoints",
    ),
    "weights that are not stored": (
        "spot = TransformersCallback()\n"
        "loss = torch.nn.Bilinear(4, 1, 1)\n"
        "theirs = trainer(spot)\n"
        "theirs.create_optimizer()\n"
        "theirs.optimizer.add_param_group({'params': loss.parameters()})\n"
        "theirs.train(resume_from_checkpoint=spot.resume())\n",
        "trains Bilinear.weight of shape (1, 4, 1), Bilinear.bias of shape (1,), which no module",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(lab: Lab, case: str) -> None:
    code, says = BAD[case]
    run = lab.run(HEAD + code).ends(ExitCode.BAD_CONFIGURATION)
    assert says in run.message.message


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
