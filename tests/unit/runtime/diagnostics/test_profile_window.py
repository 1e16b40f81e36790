"""Where `spottrain profile` puts its flags, and which steps it refuses to profile."""

from __future__ import annotations

import os

import pytest
from spottrain.cli.main import _read_command
from spottrain.contract import Env, profile_key
from spottrain.core.run_config import RunConfig
from spottrain.core.training_settings import Profile

from tests.support.sentences import Told


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"COLUMNS": "200"})


def read(*words: str) -> RunConfig:
    _read_command([*words, "train.py"])
    return RunConfig.from_env(os.environ, script="train.py")


def test_a_key_is_numbered_as_those_of_logs_are() -> None:
    assert profile_key(2, 3, "x") == "profiles/attempt-000002/rank-00003/x"


def test_profile_without_a_checkpoint_is_a_short_run_in_a_folder_of_its_own() -> None:
    found = _read_command(["profile", "--active", "4", "--wait", "1", "some/train.py", "--lr", "1"])
    assert (found.script, found.args, found.nproc) == ("some/train.py", ["--lr", "1"], "auto")
    run = RunConfig.from_env(os.environ, script="some/train.py")
    assert run.checkpoint_uri is not None and run.checkpoint_uri.startswith("profiles/train-")
    assert run.training["profile"] == Profile(wait=1, warmup=2, active=4)
    assert run.training["max_steps"] == 7


def test_profile_keeps_the_steps_and_settings_that_were_given() -> None:
    run = read("profile", "--training", '{"maxSteps": 50, "seed": 2}')
    assert run.training == {"max_steps": 50, "seed": 2, "profile": Profile()}


def test_profile_with_a_checkpoint_is_a_run_like_any_other() -> None:
    run = read("profile", "--checkpoint", "here")
    assert (run.checkpoint_uri, run.training) == ("here", {"profile": Profile()})


def test_run_profiles_nothing() -> None:
    assert read("run").training == {} and Env.CHECKPOINT_URI not in os.environ


@pytest.mark.parametrize("words", [["--active", "0"], ["--wait", "-1"], ["--warmup", "few"]])
def test_flags_that_are_no_steps_are_refused(words: list[str], told: Told) -> None:
    told(lambda: _read_command(["profile", *words, "train.py"]))


def test_the_flags_win_over_a_window_of_the_settings_and_that_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = read("profile", "--active", "4", "--training", '{"profile": {"wait": 100}}')
    assert run.training["profile"] == Profile(active=4)
    assert "event=override setting=profile" in capsys.readouterr().out
