"""How long and how a training goes: the script's arguments, and the manifest, which wins and says so."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import spottrain
import torch
from spottrain.core.training_settings import (
    ActivationCheckpointing,
    EarlyStoppingSpec,
    LearningRateScaling,
    Profile,
    Settings,
    read_manifest,
    resolve,
)
from spottrain.errors import ConfigurationError

from tests.support.sentences import Told, of_error


def settings(manifest: str = "{}", **more: Any) -> Settings:
    arguments: dict[str, Any] = {
        "global_batch_size": 32,
        "micro_batch_size": None,
        "max_steps": 100,
        "epochs": None,
        "precision": "fp32",
        "compile": False,
        "clip_grad_norm": None,
        "warmup_steps": 0,
        "seed": 1,
        "deterministic": False,
    }
    return resolve(read_manifest(manifest), **arguments | more)


def test_without_a_manifest_the_script_s_arguments_hold(capsys: pytest.CaptureFixture[str]) -> None:
    it = settings(micro_batch_size=4, precision="bf16")
    assert (it.global_batch_size, it.micro_batch_size, it.precision, it.max_steps) == (32, 4, "bf16", 100)
    assert "override" not in capsys.readouterr().out


def test_the_manifest_wins_and_each_change_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    it = settings('{"globalBatchSize": 64, "precision": "fp32", "deterministic": true}')
    assert (it.global_batch_size, it.deterministic) == (64, True)
    told = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert told == [
        "event=override setting=global_batch_size manifest=64 script=32",
        "event=override setting=deterministic manifest=True script=False",
    ], "what is equal is no change"


@pytest.mark.parametrize(
    ("max_steps", "epochs", "per_epoch", "total"),
    [(100, None, 7, 100), (None, 3, 7, 21), (100, 3, 7, 21), (10, 3, 7, 10), (100, None, None, 100)],
)
def test_it_ends_with_whichever_end_comes_first(
    max_steps: int | None, epochs: int | None, per_epoch: int | None, total: int
) -> None:
    assert settings(max_steps=max_steps, epochs=epochs).total_steps(per_epoch) == total


def test_the_manifest_s_steps_alone_say_when_it_ends() -> None:
    assert settings('{"maxSteps": 50}', max_steps=None, epochs=1).total_steps(7) == 50


def test_epochs_of_unknown_length_are_no_end(told: Told) -> None:
    told(lambda: settings(max_steps=None, epochs=3).total_steps(None))


BAD: dict[str, list[Any]] = {
    "max_steps": [None, "ten"],
    "precision": ["fp8", None],
    "global_batch_size": [0, "32", 32.0, True, None],
    "micro_batch_size": [0, 0.5],
    "epochs": [-1, 1.5],
    "warmup_steps": [-1, 1.5],
    "warmup_fraction": [1.0],
    "clip_grad_norm": [0.0, float("nan"), "1", True],
    "seed": ["x"],
    "compile": ["yes"],
    "compile_mode": ["fast"],
    "deterministic": [1],
    "num_workers": [-1],
    "activation_checkpointing": ["some", 0, ActivationCheckpointing(policy="evry")],
    "early_stopping": [0, spottrain.EarlyStopping(patience=1.5)],  # type: ignore[arg-type]
    "profile": [{"wait": 1}, Profile(active=0)],
    "learning_rate_scaling": [
        LearningRateScaling(rule="linear", baseBatchSize="256"),  # type: ignore[arg-type]
        LearningRateScaling(rule="cubic", baseBatchSize=256),
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_a_sentence(name: str, told: Told) -> None:
    told("\n".join(refused(**{name: value}) for value in BAD[name]))


def test_a_warm_up_is_given_in_one_unit(told: Told) -> None:
    told(refused(warmup_epochs=1, warmup_fraction=0.1))
    told(lambda: settings('{"warmupSteps": 1, "warmupEpochs": 1}', warmup_epochs=None))


def refused(**arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        settings(**arguments)
    return of_error(error.value)


def test_numbers_of_numpy_are_numbers() -> None:
    it = settings(global_batch_size=numpy.int64(8), clip_grad_norm=numpy.float32(1))
    assert (it.global_batch_size, it.clip_grad_norm) == (8, 1.0)
    assert settings(clip_grad_norm=1).clip_grad_norm == 1


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("all", ActivationCheckpointing(policy="all")),
        (2, ActivationCheckpointing(policy="every", every=2)),
        (1, ActivationCheckpointing(policy="all")),
        ([torch.nn.Linear], ActivationCheckpointing(policy="classes", classes=("Linear",))),
        (["Block"], ActivationCheckpointing(policy="classes", classes=("Block",))),
    ],
)
def test_activation_checkpointing_may_be_said_shortly(given: Any, means: ActivationCheckpointing) -> None:
    assert settings(activation_checkpointing=given).activation_checkpointing == means


@pytest.mark.parametrize("of_loop", [False, True])
def test_none_is_off(of_loop: bool) -> None:
    it = settings(activation_checkpointing=None, of_loop=of_loop)
    assert it.activation_checkpointing == ActivationCheckpointing()
    manifest = '{"activationCheckpointing": {"policy": "all"}}'
    assert settings(manifest, activation_checkpointing=None).activation_checkpointing.policy == "all"


def test_parts_that_a_script_makes_may_have_numbers_of_numpy() -> None:
    scaling = LearningRateScaling(rule="linear", baseBatchSize=numpy.int64(256))  # type: ignore[arg-type]
    found = settings(learning_rate_scaling=scaling).learning_rate_scaling
    assert found == LearningRateScaling(rule="linear", baseBatchSize=256)
    classes = ActivationCheckpointing(policy="classes", classes=("Block",))
    assert settings(activation_checkpointing=classes).activation_checkpointing == classes


def test_a_manifest_s_parts_win_whole_and_are_told_in_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    it = settings('{"earlyStopping": {"patience": 3}, "data": {"numWorkers": 2}}', early_stopping=5)
    assert it.early_stopping == EarlyStoppingSpec(patience=3) and (it.num_workers, it.drop_last) == (2, False)
    lines = capsys.readouterr().out.splitlines()
    assert any("setting=early_stopping" in line and "patience=3" in line for line in lines)


def test_a_manifest_s_warm_up_replaces_the_script_s_in_other_units() -> None:
    it = settings('{"warmupFraction": 0.1}', warmup_steps=7)
    assert (it.warmup_steps, it.warmup_fraction) == (None, 0.1)


def test_how_to_compile_without_compile_is_refused_whoever_says_it(told: Told) -> None:
    told(lambda: settings(compile_mode="max-autotune"))
    told(lambda: settings('{"compileMode": "max-autotune"}'))
    assert settings(compile=True, compile_mode="max-autotune").compile_mode == "max-autotune"
    assert settings('{"compile": true}', compile_mode="max-autotune").compile
    switched_off = settings('{"compile": false}', compile=True, compile_mode="max-autotune")
    assert not switched_off.compile, "the manifest may switch it off"


def test_a_loop_of_ones_own_takes_what_it_names_and_needs_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest('{"globalBatchSize": 64, "precision": "bf16"}')
    it = resolve(manifest, of_loop=True, global_batch_size=32)
    assert (it.global_batch_size, it.precision, it.max_steps) == (64, "fp32", None)
    assert "setting=precision" not in capsys.readouterr().out
