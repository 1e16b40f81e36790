"""Levers by the manifest, in whole runs of `Trainer`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from spottrain.contract import ExitCode, Outcome, Reason

from tests.runs.conftest import SCRIPT, Lab
from tests.runs.zygote import Run


def run(lab: Lab, training: dict[str, Any], *, script: str = SCRIPT, **more: Any) -> Run:
    return lab.run(script=script, training=json.dumps(training), **more)


def done(of: Run, seconds: float = 60) -> Run:
    assert of.end(seconds) == ExitCode.DONE, of.log
    return of


def number(loss: str) -> float:
    return float(loss.removeprefix("loss="))


def test_what_does_not_improve_ends_early_and_is_done(lab: Lab) -> None:
    stopping = {"patience": 1, "minDelta": 1e9}
    it = done(run(lab, {"earlyStopping": stopping}, env={"EVAL": "1"}))
    assert (it.message.outcome, it.message.reason) == (Outcome.DONE, Reason.EARLY_STOPPED)
    assert it.message.step == 14, "the second evaluation, after two epochs of 7 steps of 24"
    assert "ended early: loss did not get better by more than 1e+09" in it.message.message
    again = done(run(lab, {"earlyStopping": stopping}, env={"EVAL": "1"}, attempt=2))
    assert again.message.outcome is Outcome.DONE and not again.losses, "it is not begun anew"


def test_early_stopping_without_an_evaluation_is_refused_before_the_first_step(lab: Lab) -> None:
    it = run(lab, {"earlyStopping": {"patience": 1}})
    assert it.end() == ExitCode.BAD_CONFIGURATION and not it.losses
    assert "there is no eval_set" in it.message.message


def test_an_unknown_metric_is_refused_before_the_first_step(lab: Lab) -> None:
    it = run(lab, {"earlyStopping": {"patience": 1, "metric": "auc"}}, env={"EVAL": "1"})
    assert it.end() == ExitCode.BAD_CONFIGURATION and not it.losses
    assert "waits for the metric 'auc', and an evaluation gives loss" in it.message.message


LITTLE_MEMORY = SCRIPT.replace(
    "def loss(model, batch):\n",
    "TRIED = []\ndef loss(model, batch):\n"
    "    TRIED.append(len(batch[1]))\n"
    "    limit = 4 if len(TRIED) < int(os.environ['ROOMY']) else 2\n"
    "    if len(batch[1]) > limit: raise torch.OutOfMemoryError('CUDA out of memory (as a test says it)')\n",
)


def test_the_largest_micro_batch_that_fits_is_found_and_the_batch_stays_what_it_is(lab: Lab) -> None:
    fixed = done(run(lab, {"microBatchSize": 4}, at="fixed"))
    found = done(run(lab, {"microBatchSize": "auto"}, script=LITTLE_MEMORY, env={"ROOMY": "999"}))
    assert "event=batch-size micro_batch_size=4 share=8" in found.log
    assert found.losses == fixed.losses and found.digest == fixed.digest, "the trials have left no trace"


def test_a_step_that_runs_out_of_memory_is_done_again_with_smaller_micro_batches(lab: Lab) -> None:
    it = done(run(lab, {"microBatchSize": "auto"}, script=LITTLE_MEMORY, env={"ROOMY": "20"}))
    assert 'event=batch-size micro_batch_size=2 was=4 why="a step ran out of memory"' in it.log
    assert sorted(it.losses) == list(range(1, 25)), "each step once"
    smaller = done(run(lab, {"microBatchSize": 2}, at="smaller"))
    assert number(it.losses[24]) == pytest.approx(number(smaller.losses[24]), rel=0.3), (
        "batch norm sees other micro-batches"
    )


def test_where_a_size_is_given_running_out_of_memory_is_a_failure_that_names_the_ways_out(lab: Lab) -> None:
    it = run(lab, {"microBatchSize": 4}, script=LITTLE_MEMORY, env={"ROOMY": "8"})
    assert it.end() not in (ExitCode.DONE, ExitCode.BAD_CONFIGURATION)
    assert "event=advice about=memory micro_batch_size=4" in it.log


def test_the_average_of_the_weights_is_what_is_stored(lab: Lab) -> None:
    plain = done(run(lab, {}, at="plain"))
    averaged = done(run(lab, {"emaDecay": 0.99}))
    assert averaged.losses == plain.losses, "the training is the same"
    assert averaged.digest != plain.digest


def test_an_average_that_is_new_in_an_attempt_begins_with_the_restored_weights(lab: Lab) -> None:
    first = run(lab, {}, env={"PAUSE": "0.02"}).until("step=9/")
    assert first.send().end() == ExitCode.INTERRUPTED
    second = done(run(lab, {"emaDecay": 0.9}, attempt=2))
    assert 'event=ema source="the restored weights"' in second.log


def test_a_loss_over_tokens_is_weighed_by_their_number(lab: Lab) -> None:
    weighed = SCRIPT.replace(
        "    max_steps=24,\n", "    loss_weight=lambda batch: float(batch[1].numel()),\n    max_steps=24,\n"
    )
    plain = done(run(lab, {"microBatchSize": 2}, at="plain"))
    same = done(run(lab, {"microBatchSize": 2}, script=weighed))
    assert same.losses.keys() == plain.losses.keys()
    for step, loss in plain.losses.items():
        assert number(same.losses[step]) == pytest.approx(number(loss), rel=1e-5), (
            "each sample counts as one here"
        )


def test_a_profile_of_the_steps_that_the_manifest_names_is_stored(lab: Lab) -> None:
    it = done(run(lab, {"profile": {"wait": 2, "warmup": 1, "active": 2}}))
    found = sorted(p.name for p in (lab.folder / "store" / "profiles").rglob("*.*"))
    assert any(name.endswith(".pt.trace.json.gz") for name in found), (found, it.log)
    assert any(name.endswith(".top.txt") for name in found)


def test_a_profile_past_the_end_is_refused_before_the_first_step(lab: Lab) -> None:
    it = run(lab, {"profile": {"wait": 30, "warmup": 1, "active": 2}})
    assert it.end() == ExitCode.BAD_CONFIGURATION and not it.losses
    assert "does not fit" in it.message.message


def test_where_the_time_went_is_told_at_the_end(lab: Lab) -> None:
    it = done(run(lab, {}, env={"PAUSE": "0.01"}))
    (line,) = [line for line in it.log.splitlines() if "event=time " in line]
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
    it = done(run(lab, {"microBatchSize": 2}, script=empty, env={"EVAL": "1"}))
    assert len(it.losses) == 24 and "nan" not in " ".join(it.losses.values()), it.log
    assert "eval_loss=nan" not in it.log


def test_an_optimizer_may_be_named_and_the_manifest_may_name_another(lab: Lab) -> None:
    named = SCRIPT.replace(
        "optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2)", 'optimizer="adamw", learning_rate=1e-2'
    )
    plain = done(run(lab, {}, at="plain"))
    assert done(run(lab, {}, script=named)).digest == plain.digest
    refused = run(lab, {"optimizer": {"name": "sgd"}}, script=named, at="other")
    assert refused.end() == ExitCode.BAD_CONFIGURATION
    assert "the optimizer sgd needs a learning rate" in refused.message.message


def test_a_checkpoint_of_another_optimizer_is_refused_in_a_sentence(lab: Lab) -> None:
    first = run(lab, {}, env={"PAUSE": "0.02"}).until("step=9/")
    assert first.send().end() == ExitCode.INTERRUPTED
    second = run(lab, {"optimizer": {"name": "sgd", "learningRate": 0.1}}, attempt=2)
    assert second.end() == ExitCode.BAD_CONFIGURATION
    assert "its optimizer is AdamW, and here it is SGD" in second.message.message


TIED = SCRIPT.replace(
    "        self.last = torch.nn.Linear(self.first.out_features, 1)\n",
    "        self.last = torch.nn.Linear(self.first.out_features, 1)\n"
    "        self.again = torch.nn.Linear(self.first.out_features, 1)\n"
    "        self.again.weight = self.last.weight\n",
).replace(
    'print("after fit")',
    "import glob\n"
    "found = spottrain.load_weights(glob.glob(os.environ['SPOTTRAIN_CHECKPOINT_URI'] + '/final/*')[0])\n"
    "print('tied', torch.equal(found['last.weight'], found['again.weight']),"
    " 'averaged', not torch.equal(found['last.weight'], model.last.weight))",
)


def test_weights_that_are_tied_are_averaged_under_all_of_their_names(lab: Lab) -> None:
    it = done(run(lab, {"emaDecay": 0.9}, script=TIED))
    assert "tied True averaged True" in it.log


def test_evaluations_use_the_size_that_was_found(lab: Lab) -> None:
    it = done(run(lab, {"microBatchSize": "auto"}, script=LITTLE_MEMORY, env={"ROOMY": "9999", "EVAL": "1"}))
    assert "event=evaluated step=7" in it.log, "with the whole batch it would have run out of memory"


def test_what_cannot_act_is_told(lab: Lab) -> None:
    own = SCRIPT.replace("    max_steps=24,\n", "    max_steps=24,\n    schedule=lambda step: 1.0,\n")
    it = done(run(lab, {"warmupSteps": 5}, script=own))
    assert 'event=advice about=learning-rate text="warmup_steps cannot act' in it.log
