"""A run that was interrupted and went on equals one that was not: every loss, and the final weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import spottrain
from spottrain.checkpoint.final_weights import digest
from spottrain.contract import Env, ExitCode, Outcome, Reason

from tests.runs.conftest import SCRIPT, Lab, says_again_that_it_is_done
from tests.runs.launched import Run
from tests.support.command import checkpoints as main
from tests.support.heavy import sample


@pytest.fixture(scope="module")
def trained(others: Lab) -> Run:
    """A run that has done all its steps, in `store` of `others`."""
    return others.run(attempt=1).done()


@pytest.fixture
def done(lab: Lab, others: Lab, trained: Run) -> Run:
    """The same, in `store` of this lab."""
    lab.take(others.folder / "store")
    return trained


@pytest.fixture(scope="module")
def stopped(others: Lab) -> Run:
    """The second attempt of a run that was stopped on its way, with two checkpoints."""
    run = others.run(at="half", attempt=2, env={"PAUSE": "0.1"})
    return run.until("step=9/", "event=committed").stopped()


@pytest.fixture
def half(lab: Lab, others: Lab, stopped: Run) -> Path:
    lab.take(others.folder / "half")
    return lab.folder / "half"


CELLS = {
    "bf16, accumulation 4, 2 loader workers": ({"precision": "bf16", "microBatchSize": 2}, {"WORKERS": "2"}),
    "fp32, 2 loader workers, evaluation": ({}, {"WORKERS": "2", "EVAL": "1"}),
    "average, sgd, scaling, warm-up, recomputation, sizes by trial": (
        {
            "emaDecay": 0.9,
            "optimizer": {"name": "sgd", "learningRate": 0.01, "momentum": 0.9},
            "learningRateScaling": {"rule": "linear", "baseBatchSize": 4},
            "warmupFraction": 0.2,
            "clipGradNorm": 1.0,
            "activationCheckpointing": {"policy": "classes", "classes": ["Linear"]},
            "microBatchSize": "auto",
            "earlyStopping": {"patience": 100},
            "data": {"numWorkers": "auto"},
        },
        {"EVAL": "1"},
    ),
}


@pytest.mark.parametrize("cell", sample(CELLS, list(CELLS)[-1]))
def test_a_resumed_run_equals_an_uninterrupted_one_bit_by_bit(lab: Lab, cell: str) -> None:
    training, env = CELLS[cell]
    plain = lab.run(at="plain", attempt=1, training=json.dumps(training), env=env).done()

    slow = env | {"PAUSE": "0.05"}
    first = lab.run(attempt=1, training=json.dumps(training), env=slow).until("step=9/").stopped()
    slower = env | {"PAUSE": "0.1"}
    second = lab.run(attempt=2, training=json.dumps(training), interval="4steps", env=slower)
    second.until("event=committed").until(f"step={min(second.losses) + 5}/")
    second.killed()
    committed = lab.head["checkpoints"][0]["step"]
    third = lab.run(attempt=3, training=json.dumps(training), env=env).done()

    assert first.message.step == first.message.durableStep == min(second.losses) - 1
    assert committed >= min(second.losses) + 3, "by the interval, or a better evaluation after that"
    assert min(third.losses) == committed + 1, "a kill costs what was done since the last commit"
    assert first.losses | second.losses | third.losses == plain.losses
    assert third.digest == plain.digest
    newest = lab.head["checkpoints"][0]["key"]
    kept = json.loads((lab.folder / "store" / newest / "manifest.json").read_text())["tree"]["progress"]
    assert kept["losses"] == 1, "the first saved its last step; only the second lost some"


def test_the_final_weights_and_their_manifest_are_written_and_load(trained: Run, others: Lab) -> None:
    final = others.folder / "store" / "final"
    weights = spottrain.load_weights(final / "model.safetensors")
    manifest = json.loads((final / "manifest.json").read_text())
    assert manifest["digest"] == digest(weights) == trained.digest
    assert manifest["step"] == 24
    assert trained.message.outcome is Outcome.DONE
    assert trained.message.outputURI == str(final) + "/"
    assert trained.message.firstStepSeconds is not None and trained.message.startupSeconds is not None


def test_a_job_that_is_done_ends_with_0_and_trains_nothing(lab: Lab, done: Run) -> None:
    again = lab.run(attempt=2).done()
    assert not again.losses and "after fit" not in again.log
    assert again.message.outcome is Outcome.DONE and "done already" in again.message.message


def test_a_job_that_is_done_and_is_asked_for_more_steps_says_what_was_trained_and_how_to_go_on(
    lab: Lab, done: Run
) -> None:
    again = lab.run(attempt=2, training='{"maxSteps": 28}').done()
    assert not again.losses and (again.message.step, again.message.durableStep) == (24, 24)
    assert "24 steps were trained" in again.message.message and "28 steps are" in again.message.message

    new = str(lab.folder / "new")
    assert main(["copy", str(lab.folder / "store"), "--to", new]) == 0
    env: dict[str, str] = {Env.CHECKPOINT_ON_EXISTING: "resume"}
    on = lab.run(at="new", attempt=1, training='{"maxSteps": 28}', env=env).done()
    assert set(on.losses) == set(range(25, 29)), "as the message says"


def test_weights_that_could_not_be_left_are_left_by_the_next_attempt(lab: Lab, done: Run) -> None:
    says_again_that_it_is_done(lab, SCRIPT, done)


def test_nothing_is_saved_before_the_first_step(lab: Lab) -> None:
    run = lab.run(interval="1s", env={"PAUSE": "0.1"}).until("step=3/")
    assert not list(lab.folder.glob("store/checkpoints/*-s000000000-*/*.*"))
    run.send().end()
    assert not list(lab.folder.glob("store/checkpoints/*-s000000000-*/*.*"))


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(lab: Lab, half: Path) -> None:
    newest, before, *_ = json.loads((half / "HEAD").read_text())["checkpoints"]
    shard = half / newest["key"] / "r00000-00.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    again = lab.run(at="half", attempt=3).done()
    assert "event=damaged" in again.log and f"{shard.name} has a wrong checksum in chunk 0" in again.log
    assert min(again.losses) == before["step"] + 1


@pytest.mark.parametrize("harm", ["shard cut", "shard gone", "manifest gone", "manifest changed"])
def test_when_no_checkpoint_can_be_read_nothing_is_overwritten(lab: Lab, half: Path, harm: str) -> None:
    for manifest in list(half.glob("checkpoints/*/manifest.json")):
        _harm(manifest.parent, harm)
    before = {path: path.read_bytes() for path in half.glob("checkpoints/**/*.*")}
    again = lab.run(at="half", attempt=3).ends(ExitCode.BAD_CONFIGURATION)
    assert again.message.reason == "CheckpointDamaged"
    assert "Nothing was overwritten" in again.message.message
    assert before == {path: path.read_bytes() for path in half.glob("checkpoints/**/*.*")}


def test_another_model_is_refused_with_the_tensor_and_both_shapes(lab: Lab, half: Path) -> None:
    again = lab.run(at="half", attempt=3, env={"WIDTH": "8"}).ends(ExitCode.BAD_CONFIGURATION)
    assert again.message.reason == "CheckpointIncompatible"
    assert "first.weight has shape (16, 4) in the checkpoint and (8, 4) in the model" in again.message.message


def test_another_schedule_is_refused_and_another_rate_is_told(lab: Lab, half: Path) -> None:
    constant = SCRIPT.replace("    max_steps=24,", "    max_steps=24, schedule='constant',")
    other = lab.run(constant, at="half", attempt=3).ends(ExitCode.BAD_CONFIGURATION)
    assert "the checkpoint's schedule is cosine, the script's constant" in other.message.message
    assert other.message.reason == Reason.CHECKPOINT_INCOMPATIBLE
    changed = lab.run(SCRIPT.replace("lr=1e-2", "lr=2e-2"), at="half", attempt=4).done()
    assert "event=override setting=lr holds=checkpoint checkpoint=0.01 now=0.02" in changed.log


def test_a_late_attempt_is_fenced_out(lab: Lab, half: Path) -> None:
    late = lab.run(at="half", attempt=1).ends(ExitCode.SUPERSEDED)
    assert late.message.outcome is Outcome.SUPERSEDED


def test_an_owner_that_is_overtaken_commits_nothing_more_and_ends_with_76(lab: Lab) -> None:
    ghost = lab.run(attempt=1, interval="1steps", env={"PAUSE": "0.2"}).until("committed step=2")
    lab.run(attempt=2, interval="1steps").done()
    assert ghost.end() == ExitCode.SUPERSEDED, ghost.log
    assert ghost.message.outcome is Outcome.SUPERSEDED


def _harm(folder: Path, harm: str) -> None:
    shard, manifest = folder / "r00000-00.safetensors", folder / "manifest.json"
    if harm == "shard cut":
        shard.write_bytes(shard.read_bytes()[:100])
    elif harm == "shard gone":
        shard.unlink()
    elif harm == "manifest gone":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text().replace('"step":', '"stop":', 1))
