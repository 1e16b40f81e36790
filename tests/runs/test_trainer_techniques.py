"""Techniques by the manifest, in whole runs of `Trainer`."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest
from spottrain.contract import ExitCode, Outcome, Reason

from tests.runs.conftest import SCRIPT, Lab
from tests.runs.launched import Run


def run(lab: Lab, training: dict[str, Any], *, script: str = SCRIPT, **more: Any) -> Run:
    return lab.run(script=script, training=json.dumps(training), **more)


def stopped(lab: Lab, training: dict[str, Any], *, script: str = SCRIPT, **env: str) -> Run:
    """Attempt 1, which signals itself in step 9."""
    stops = "    if model.training and trainer.step == 8: os.kill(os.getpid(), 15)\n"
    signalling = script.replace("    time.sleep(PAUSE)\n", stops)
    assert signalling != script
    return run(lab, training, script=signalling, env=env, attempt=1).ends(ExitCode.INTERRUPTED)


def number(loss: str) -> float:
    return float(loss.removeprefix("loss="))


def test_what_does_not_improve_ends_early_and_is_done(lab: Lab) -> None:
    stopping = {"patience": 1, "minDelta": 1e9}
    it = run(lab, {"earlyStopping": stopping}, env={"EVAL": "1"}).done()
    assert (it.message.outcome, it.message.reason) == (Outcome.DONE, Reason.EARLY_STOPPED)
    assert it.message.step == 14, "the second evaluation, after two epochs of 7 steps of 24"
    assert "ended early: loss did not improve by more than 1e+09" in it.message.message
    again = run(lab, {"earlyStopping": stopping}, env={"EVAL": "1"}, attempt=2).done()
    assert again.message.outcome is Outcome.DONE and not again.losses, "it is not begun again"


def test_early_stopping_without_an_evaluation_is_refused_before_the_first_step(lab: Lab) -> None:
    it = run(lab, {"earlyStopping": {"patience": 1}})
    assert it.end() == ExitCode.BAD_CONFIGURATION and not it.losses
    assert "there is no eval_dataset" in it.message.message


def test_a_metric_that_is_changed_to_an_unknown_one_is_refused_before_a_later_attempt_s_first_step(
    lab: Lab,
) -> None:
    patience = {"patience": 9}
    stopped(lab, {"earlyStopping": patience}, EVAL="1")
    second = run(lab, {"earlyStopping": patience | {"metric": "auc"}}, env={"EVAL": "1"}, attempt=2)
    assert second.end() == ExitCode.BAD_CONFIGURATION and not second.losses
    assert "needs the metric 'auc'" in second.message.message


HOOKS = (
    SCRIPT.replace(
        "model = Model()\n",
        "model = Model()\n"
        "def before(step):\n"
        "    if step % 5 == 0: model.last.bias.data.add_(0.1)\n"
        "def gradients(step):\n"
        "    for p in model.parameters(): p.grad.mul_(1 / (1 + step)).add_(1e-3 * torch.randn_like(p))\n"
        "def after(step):\n"
        "    assert trainer.step == step + 1\n"
        "    model.norm.running_mean.mul_(0.9)\n",
    )
    .replace(
        "    max_steps=24,\n",
        "    max_steps=24,\n"
        "    clip_grad_norm=1.0,\n"
        "    hooks=spottrain.StepHooks(before=before, gradients=gradients, after=after),\n"
        "    ddp_options=json.loads(os.environ.get('DDP', '{}')),\n",
    )
    .replace("import os,", "import json, os,")
)


def test_what_hooks_do_in_each_step_survives_an_interruption_bit_for_bit(lab: Lab, others: Lab) -> None:
    whole = others.run(script=HOOKS).done()
    first = stopped(lab, {}, script=HOOKS)
    second = run(lab, {}, script=HOOKS, attempt=2).done()
    assert first.losses | second.losses == whole.losses and second.digest == whole.digest
    assert whole.losses != others.alone(SCRIPT).losses


def test_an_option_that_ddp_does_not_have_is_refused_by_its_name(lab: Lab) -> None:
    it = run(lab, {}, script=HOOKS, nproc=2, env={"DDP": '{"bucket_cap_mb": 1, "static_grph": true}'})
    it.ends(ExitCode.BAD_CONFIGURATION)
    assert "Trainer(ddp_options=...)" in it.message.message and "static_grph" in it.message.message


LITTLE_MEMORY = SCRIPT.replace(
    "def loss(model, batch):\n",
    "TRIED = []\ndef loss(model, batch):\n"
    "    TRIED.append(len(batch[1]))\n"
    "    limit = 4 if len(TRIED) < int(os.environ['ROOMY']) else 2\n"
    "    if len(batch[1]) > limit: raise torch.OutOfMemoryError('CUDA out of memory (as a test says it)')\n",
)


def test_the_largest_micro_batch_that_fits_is_found_and_the_batch_stays_what_it_is(lab: Lab) -> None:
    fixed = run(lab, {"microBatchSize": 4}, at="fixed").done()
    found = run(lab, {"microBatchSize": "auto"}, script=LITTLE_MEMORY, env={"ROOMY": "999"}).done()
    assert "event=batch-size micro_batch_size=4 share=8" in found.log
    assert found.losses == fixed.losses and found.digest == fixed.digest, "the trials have left no trace"


@pytest.mark.parametrize(("size", "roomy"), [("auto", "20"), (4, "8")])
def test_a_step_that_runs_out_of_memory_is_a_failure_that_names_the_size_to_set(
    lab: Lab, size: str | int, roomy: str
) -> None:
    it = run(lab, {"microBatchSize": size}, script=LITTLE_MEMORY, env={"ROOMY": roomy}).ends(ExitCode.FAILED)
    assert it.losses and it.message.reason == Reason.OUT_OF_MEMORY
    assert "with micro-batches of 4 samples: set microBatchSize to 2, or use" in it.message.message


def test_the_average_of_the_weights_is_what_is_stored(lab: Lab, others: Lab) -> None:
    plain = others.alone(SCRIPT)
    averaged = run(lab, {"emaDecay": 0.99}).done()
    assert averaged.losses == plain.losses, "the training is the same"
    assert averaged.digest != plain.digest


def test_an_average_that_is_new_in_an_attempt_begins_with_the_restored_weights(lab: Lab) -> None:
    stopped(lab, {})
    second = run(lab, {"emaDecay": 0.9}, attempt=2).done()
    assert 'event=override setting=extra.ema checkpoint=none script="begins again"' in second.log


def test_a_loss_over_tokens_is_weighed_by_their_number(lab: Lab) -> None:
    weighed = SCRIPT.replace(
        "    max_steps=24,\n", "    loss_weight=lambda batch: float(batch[1].numel()),\n    max_steps=24,\n"
    )
    plain = run(lab, {"microBatchSize": 2}, at="plain").done()
    same = run(lab, {"microBatchSize": 2}, script=weighed).done()
    assert same.losses.keys() == plain.losses.keys()
    for step, loss in plain.losses.items():
        assert number(same.losses[step]) == pytest.approx(number(loss), rel=1e-5), (
            "each sample counts as one here"
        )


def test_a_profile_of_the_steps_that_the_manifest_names_is_stored(lab: Lab) -> None:
    it = run(lab, {"profile": {"wait": 2, "warmup": 1, "active": 2}}).done()
    found = sorted(p.name for p in (lab.folder / "store" / "profiles").rglob("*.*"))
    assert any(name.endswith(".pt.trace.json.gz") for name in found), (found, it.log)
    assert any(name.endswith(".top.txt") for name in found)


def test_a_profile_past_the_end_is_left_out(lab: Lab) -> None:
    it = run(lab, {"profile": {"wait": 30, "warmup": 1, "active": 2}}).done()
    assert "event=profile-left-out " in it.log and not (lab.folder / "store" / "profiles").exists()


def test_where_the_time_went_is_told_at_the_end(lab: Lab) -> None:
    it = run(lab, {}, env={"PAUSE": "0.01"}, interval="1h").done()
    (line,) = [line for line in it.log.splitlines() if "event=step-time " in line]
    shares = {part: float(line.split(f"{part}=")[1].split()[0]) for part in ("data", "compute", "checkpoint")}
    assert shares["compute"] > max(shares["data"], shares["checkpoint"]), line


def test_a_batch_that_counts_nothing_does_not_spoil_the_step(lab: Lab) -> None:
    empty = SCRIPT.replace(
        "    return torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1])\n",
        "    kept = batch[1] < 1\n"
        "    return torch.nn.functional.mse_loss(model(batch[0]).float()[kept], batch[1][kept])\n",
    ).replace(
        "    max_steps=24,\n",
        "    loss_weight=lambda batch: float((batch[1] < 1).sum()),\n    max_steps=24,\n",
    )
    it = run(lab, {"microBatchSize": 2}, script=empty, env={"EVAL": "1"}).done()
    assert len(it.losses) == 24 and "nan" not in " ".join(it.losses.values()), it.log
    assert "eval_loss=nan" not in it.log


MASKED = SCRIPT.replace(
    "        return x + 0.01 * torch.randn(4), x.sum()\n",
    "        return x + 0.01 * torch.randn(4), x.sum(), torch.tensor(float(i >= 40))\n",
).replace(
    "    return torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1])\n",
    "    kept = batch[2] > 0\n"
    "    return torch.nn.functional.mse_loss(model(batch[0]).float()[kept], batch[1][kept])\n",
)
MASKED = MASKED.replace(
    "    max_steps=24,\n", "    loss_weight=lambda batch: float(batch[2].sum()),\n    max_steps=24,\n"
)


def test_a_run_in_which_whole_steps_count_nothing_ends_and_goes_on_bit_for_bit(lab: Lab) -> None:
    """Ten of 50 samples count, in steps of 2: most steps have none, and batch norm sees what stands in."""
    plain = run(lab, {"globalBatchSize": 2}, script=MASKED, at="plain").done()
    assert [number(loss) for loss in plain.losses.values()].count(0.0) > 5, plain.losses
    first = stopped(lab, {"globalBatchSize": 2}, script=MASKED)
    second = run(lab, {"globalBatchSize": 2}, script=MASKED, attempt=2).done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest


def test_an_optimizer_may_be_named_and_the_manifest_may_name_another(lab: Lab, others: Lab) -> None:
    named = SCRIPT.replace(
        "optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2)", 'optimizer="adamw", learning_rate=1e-2'
    )
    assert run(lab, {}, script=named).done().digest == others.alone(SCRIPT).digest
    refused = run(lab, {"optimizer": {"name": "sgd"}}, script=named, at="other").ends(
        ExitCode.BAD_CONFIGURATION
    )
    assert "the optimizer sgd needs a learning rate" in refused.message.message


@pytest.mark.heavy
def test_what_the_manifest_says_of_the_optimizer_holds_against_the_checkpoint_s(lab: Lab) -> None:
    said = {"name": "adamw", "weightDecay": 0.1}
    stopped(lab, {"optimizer": said})
    second = run(lab, {"optimizer": said | {"weightDecay": 100.0}}, attempt=2).done()
    assert "setting=optimizer.weight_decay group=0 holds=now checkpoint=0.1 now=100.0" in second.log
    same = run(lab, {"optimizer": said}, at="plain").done()
    assert second.digest != same.digest, "else it would be that of a run without an interruption"


def test_a_checkpoint_of_another_optimizer_is_refused_in_a_sentence(lab: Lab) -> None:
    stopped(lab, {})
    second = run(lab, {"optimizer": {"name": "sgd", "learningRate": 0.1}}, attempt=2).ends(
        ExitCode.BAD_CONFIGURATION
    )
    assert "its optimizer is AdamW, and here it is SGD" in second.message.message


TIED = SCRIPT.replace(
    "        self.last = torch.nn.Linear(self.first.out_features, 1)\n",
    "        self.last = torch.nn.Linear(self.first.out_features, 1)\n"
    "        self.again = torch.nn.Linear(self.first.out_features, 1)\n"
    "        self.again.weight = self.last.weight\n",
).replace(
    'print("after fit")',
    "found = spottrain.load_weights(os.environ['SPOTTRAIN_CHECKPOINT_URI'] + '/final')\n"
    "print('tied', torch.equal(found['last.weight'], found['again.weight']),"
    " 'averaged', not torch.equal(found['last.weight'], model.last.weight))",
)


def test_weights_that_are_tied_are_averaged_under_all_of_their_names(lab: Lab) -> None:
    it = run(lab, {"emaDecay": 0.9}, script=TIED).done()
    assert "tied True averaged True" in it.log


def test_evaluations_use_the_size_that_was_found(lab: Lab) -> None:
    it = run(lab, {"microBatchSize": "auto"}, script=LITTLE_MEMORY, env={"ROOMY": "9999", "EVAL": "1"}).done()
    assert "event=evaluated step=7" in it.log, "with the whole batch it would have run out of memory"


def test_what_cannot_act_is_told(lab: Lab) -> None:
    own = SCRIPT.replace("    max_steps=24,\n", "    max_steps=24,\n    schedule=lambda step: 1.0,\n")
    it = run(lab, {"warmupSteps": 5}, script=own).done()
    assert 'event=advice about=learning-rate text="warmup_steps have no effect' in it.log


def test_a_step_without_the_recomputation_that_is_asked_for_is_never_tried(lab: Lab) -> None:
    """It might not fit, or the loss might not take fewer samples: exactly where recomputation is needed."""
    picky = SCRIPT.replace(
        "def loss(model, batch):\n",
        "def loss(model, batch):\n"
        "    assert len(batch[1]) == 8 and 'forward' in vars(model.first), 'a pass that nobody asked for'\n",
    )
    wanted = {"activationCheckpointing": {"policy": "classes", "classes": ["Linear"]}}
    run(lab, wanted, script=picky, env={"DROP_LAST": "1"}).done()


def test_batches_that_were_weighed_are_let_go_before_the_optimizer_step(lab: Lab) -> None:
    weighed = (
        SCRIPT.replace("import os,", "import weakref, os,")
        .replace(
            "def loss(model, batch):\n",
            "held = []\n"
            "def gradients(step):\n"
            "    alive = [each for each in held if each() is not None]\n"
            "    assert len(held) > len(alive) == 1, f'{len(alive)} of {len(held)}'\n"
            "def loss(model, batch):\n"
            "    held.append(weakref.ref(batch[0]))\n",
        )
        .replace(
            "    max_steps=24,\n",
            "    max_steps=24,\n"
            "    loss_weight=lambda batch: float(batch[1].numel()),\n"
            "    hooks=spottrain.StepHooks(gradients=gradients),\n",
        )
    )
    run(lab, {"microBatchSize": 4}, script=weighed).done()


def test_the_look_for_a_metric_is_made_with_micro_batches_that_fit(lab: Lab) -> None:
    narrow = MEASURED.replace(
        "def loss(model, batch):\n",
        "def loss(model, batch):\n"
        "    if len(batch[1]) > 4: raise torch.OutOfMemoryError('CUDA out of memory (as a test says it)')\n",
    )
    wanted = {"microBatchSize": "auto", "earlyStopping": {"patience": 100, "metric": "accuracy"}}
    it = run(lab, wanted, script=narrow, env={"EVAL": "1"}).done()
    assert "event=batch-size micro_batch_size=4 share=8" in it.log


def test_a_manifest_may_replace_optimizer_and_schedule_of_a_script_with_a_scheduler(lab: Lab) -> None:
    wanted = {"schedule": "constant", "optimizer": {"name": "adamw", "learningRate": 0.01}}
    it = run(lab, wanted, script=SCHEDULED).done()
    assert " lr=0.01 " in it.log and " lr=0 " not in it.log


SCHEDULED = SCRIPT.replace(
    "trainer = spottrain.Trainer(",
    "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
    "warming = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))\n"
    "trainer = spottrain.Trainer(",
).replace(
    "    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),\n",
    "    optimizer=optimizer,\n    schedule=warming,\n",
)


def test_a_schedule_of_the_manifest_takes_the_rate_from_before_the_script_s_scheduler(lab: Lab) -> None:
    plain = SCRIPT.replace("    max_steps=24,\n", "    max_steps=24,\n    schedule='constant',\n")
    expected = run(lab, {}, script=plain, at="plain").done()
    it = run(lab, {"schedule": "constant"}, script=SCHEDULED).done()
    assert it.losses == expected.losses, "a LambdaLR that begins at 0 has set the group's rate to 0"
    assert "event=override setting=schedule manifest=constant script=LambdaLR" in it.log


def test_a_rate_that_follows_from_the_batch_size_holds_against_the_checkpoint_s(lab: Lab) -> None:
    scaling = {"rule": "linear", "baseBatchSize": 8}
    stopped(lab, {"learningRateScaling": scaling, "schedule": "constant"})
    bigger = {"learningRateScaling": scaling, "schedule": "constant", "globalBatchSize": 16}
    second = run(lab, bigger, attempt=2).done()
    assert "event=override setting=lr holds=now checkpoint=0.01 now=0.02" in second.log
    assert " lr=0.02 " in second.log and " lr=0.01 " not in second.log


def test_a_rate_for_an_optimizer_that_has_its_own_is_refused(lab: Lab) -> None:
    both = SCRIPT.replace("    max_steps=24,\n", "    max_steps=24,\n    learning_rate=0.5,\n")
    it = run(lab, {}, script=both)
    assert it.end() == ExitCode.BAD_CONFIGURATION and not it.losses
    assert "learning_rate=0.5) is for an optimizer given by its name" in it.message.message


MEASURED = SCRIPT.replace(
    "    max_steps=24,\n", "    max_steps=24,\n    metrics=lambda model, batch: {'accuracy': 0.5},\n"
)


def test_a_metric_that_the_evaluation_does_not_give_is_refused_before_the_first_step(lab: Lab) -> None:
    wanted = {"earlyStopping": {"patience": 1, "metric": "auc"}}
    it = run(lab, wanted, script=MEASURED, env={"EVAL": "1"})
    assert it.end() == ExitCode.BAD_CONFIGURATION and not it.losses
    assert "needs the metric 'auc', but an evaluation returns accuracy, loss" in it.message.message
    wanted = {"earlyStopping": {"patience": 100, "metric": "accuracy"}}
    plain = run(lab, {}, script=MEASURED, env={"EVAL": "1"}, at="plain").done()
    same = run(lab, wanted, script=MEASURED, env={"EVAL": "1"}, at="same").done()
    assert same.losses == plain.losses, "the look has left no trace"


def test_a_step_that_fp16_leaves_out_moves_neither_schedule_nor_average_and_its_scale_goes_on(
    lab: Lab,
) -> None:
    steep = SCHEDULED.replace(
        "    return torch.nn.functional.mse_loss(",
        "    if model.training: print('scale', trainer.step, trainer.scaler.get_scale(), flush=True)\n"
        "    steep = 1e30 if model.training and trainer.step < 3 else 1.0\n"
        "    return steep * torch.nn.functional.mse_loss(",
    )
    fp16 = {"precision": "fp16", "emaDecay": 0.9}
    it = stopped(lab, fp16, script=steep)
    skipped = it.log.count("event=step-skipped")
    assert skipped >= 3
    rates = [
        line.split(" lr=")[1].split()[0]
        for line in it.log.splitlines()
        if " step=" in line and " lr=" in line
    ]
    assert rates[: skipped + 2] == ["0"] * (skipped + 1) + ["0.0025"], (
        "the scheduler waited for the first step"
    )
    again = run(lab, fp16, script=steep, attempt=2).done()
    scales = [re.findall(r"^scale \d+ (\S+)", each.log, re.M) for each in (it, again)]
    assert scales[0][-1] == scales[1][0] != scales[0][0]


def test_gradients_that_overflow_at_every_scale_are_a_failure_that_says_so(lab: Lab) -> None:
    steep = SCRIPT.replace(
        "    return torch.nn.functional.mse_loss(", "    return 1e36 * torch.nn.functional.mse_loss("
    ).replace("    max_steps=24,\n", "    max_steps=100,\n")
    it = run(lab, {"precision": "fp16"}, script=steep)
    assert it.end() not in (ExitCode.DONE, ExitCode.BAD_CONFIGURATION)
    assert "gradients overflow at every loss scale down to" in it.message.message


def test_the_last_loss_is_known_where_the_end_was_decided_before_the_interruption(lab: Lab) -> None:
    told = SCRIPT.replace("trainer.fit()", "print('result', trainer.fit().loss)")
    held = told.replace(
        "spottrain.seed(3)\n",
        "spottrain.seed(3)\n"
        "import spottrain.training.engine\n"
        "def hold(*_, **__): print('all is saved', flush=True); time.sleep(60)\n"
        "spottrain.training.engine.FinalWeights = hold\n",
    )
    stopping = {"earlyStopping": {"patience": 1, "minDelta": 1e9}}
    first = (
        run(lab, stopping, script=held, env={"EVAL": "1"})
        .until("all is saved")
        .send(signal.SIGKILL)
        .ends(-signal.SIGKILL)
    )
    second = run(lab, stopping, script=told, env={"EVAL": "1"}, attempt=2).done()
    assert not second.losses
    last = float(second.log.split("result ")[1].split()[0])
    assert last == pytest.approx(number(first.losses[14]), rel=1e-6)
