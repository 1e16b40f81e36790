"""How long and how a training goes: the script's arguments, and the manifest, which wins and says so."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from spottrain.config import Training
from spottrain.errors import ConfigurationError
from spottrain.settings import Settings, resolve


def settings(manifest: str = "{}", **more: Any) -> Settings:
    arguments: dict[str, Any] = {
        "batch_size": 32,
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
    return resolve(Training.from_json(manifest), **arguments | more)


def test_without_a_manifest_the_script_s_arguments_hold(capsys: pytest.CaptureFixture[str]) -> None:
    it = settings(micro_batch_size=4, precision="bf16")
    assert (it.batch_size, it.micro_batch_size, it.precision, it.max_steps) == (32, 4, "bf16", 100)
    assert "override" not in capsys.readouterr().out


def test_the_manifest_wins_and_each_change_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    it = settings('{"globalBatchSize": 64, "precision": "fp32", "deterministic": true}')
    assert (it.batch_size, it.deterministic) == (64, True)
    told = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert told == [
        "event=override setting=batch_size manifest=64 script=32",
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


def test_epochs_of_unknown_length_are_no_end() -> None:
    with pytest.raises(ConfigurationError, match="give Trainer max_steps, or steps_per_epoch"):
        settings(max_steps=None, epochs=3).total_steps(None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_steps": None}, "the training has no end: give Trainer max_steps or epochs, or set"),
        ({"precision": "fp8"}, "precision 'fp8' is not known: use bf16, fp16 or fp32"),
        ({"batch_size": 0}, r"Trainer\(batch_size=0\): must be at least 1"),
        ({"micro_batch_size": 0}, r"Trainer\(micro_batch_size=0\): must be at least 1"),
        ({"epochs": -1}, r"Trainer\(epochs=-1\): must be at least 1"),
        ({"warmup_steps": -1}, r"Trainer\(warmup_steps=-1\): must be at least 0"),
        ({"clip_grad_norm": 0.0}, r"Trainer\(clip_grad_norm=0.0\): must be above 0"),
        ({"clip_grad_norm": float("nan")}, r"Trainer\(clip_grad_norm=nan\): must be above 0"),
        ({"batch_size": "32"}, r"Trainer\(batch_size='32'\): must be a whole number"),
        ({"batch_size": 32.0}, r"Trainer\(batch_size=32.0\): must be a whole number"),
        ({"batch_size": True}, r"Trainer\(batch_size=True\): must be a whole number"),
        ({"batch_size": None}, r"Trainer\(batch_size=None\): must be a whole number"),
        ({"micro_batch_size": 0.5}, r"Trainer\(micro_batch_size=0.5\): must be a whole number"),
        ({"max_steps": "ten"}, r"Trainer\(max_steps='ten'\): must be a whole number"),
        ({"epochs": 1.5}, r"Trainer\(epochs=1.5\): must be a whole number"),
        ({"warmup_steps": 1.5}, r"Trainer\(warmup_steps=1.5\): must be a whole number"),
        ({"clip_grad_norm": "1"}, r"Trainer\(clip_grad_norm='1'\): must be a number"),
        ({"clip_grad_norm": True}, r"Trainer\(clip_grad_norm=True\): must be a number"),
        ({"seed": "x"}, r"Trainer\(seed='x'\): must be a whole number"),
        ({"compile": "yes"}, r"Trainer\(compile='yes'\): must be True or False"),
        ({"deterministic": 1}, r"Trainer\(deterministic=1\): must be True or False"),
        ({"precision": None}, "precision None is not known: use bf16, fp16 or fp32"),
    ],
)
def test_a_bad_argument_is_a_sentence(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        settings(**arguments)


def test_numbers_of_numpy_are_numbers() -> None:
    it = settings(batch_size=numpy.int64(8), clip_grad_norm=numpy.float32(1))
    assert (it.batch_size, it.clip_grad_norm) == (8, 1.0)
    assert settings(clip_grad_norm=1).clip_grad_norm == 1
