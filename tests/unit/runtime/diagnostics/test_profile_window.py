"""Which steps are profiled, and what is refused; where `spottrain profile` puts its flags."""

from __future__ import annotations

import os

import pytest
from spottrain.cli.main import _read_command
from spottrain.contract import PROFILE, Env
from spottrain.core import profile_window as windows
from spottrain.core.profile_window import asked_for, chosen, not_made, profile_key, require_within
from spottrain.core.run_config import RunConfig
from spottrain.core.training_settings import Profile

from tests.support.sentences import Told

WINDOW = Profile(wait=1, warmup=2, active=3)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"COLUMNS": "200"})


def test_a_window_that_just_fits_is_taken() -> None:
    require_within(WINDOW, total_steps=6)
    require_within(WINDOW, total_steps=106, start=100)


def test_a_window_past_the_end_of_the_run_is_refused_with_what_to_change(told: Told) -> None:
    told(lambda: require_within(WINDOW, total_steps=5))
    told(lambda: require_within(WINDOW, total_steps=105, start=100))


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"steps": 3}', '{"active": 0}', '{"wait": true}', '{"warmup": "2"}'], ids=str
)
def test_a_bad_window_is_refused_by_name(text: str, told: Told) -> None:
    told(lambda: asked_for({PROFILE: text}))


def test_no_window_is_no_profile() -> None:
    assert asked_for({}) is None
    assert asked_for({PROFILE: ""}) is None


def test_what_is_written_is_read_again() -> None:
    window = Profile(wait=0, warmup=1, active=9)
    assert asked_for({PROFILE: window.to_json()}) == window


def test_a_key_is_numbered_as_those_of_logs_are() -> None:
    assert profile_key(2, 3, "x") == "profiles/attempt-000002/rank-00003/x"


def test_profile_without_a_checkpoint_is_a_short_run_in_a_folder_of_its_own() -> None:
    read = _read_command(["profile", "--active", "4", "--wait", "1", "some/train.py", "--lr", "1"])
    assert (read.script, read.args, read.nproc) == ("some/train.py", ["--lr", "1"], "auto")
    assert asked_for(os.environ) == Profile(wait=1, warmup=2, active=4)
    run = RunConfig.from_env(os.environ, script="some/train.py")
    assert run.checkpoint_uri is not None and run.checkpoint_uri.startswith("profiles/train-")
    assert run.training["max_steps"] == 7


def test_profile_keeps_the_steps_and_settings_that_were_given() -> None:
    _read_command(["profile", "--training", '{"maxSteps": 50, "seed": 2}', "train.py"])
    training = RunConfig.from_env(os.environ, script="train.py").training
    assert training == {"max_steps": 50, "seed": 2}


def test_profile_with_a_checkpoint_is_a_run_like_any_other() -> None:
    _read_command(["profile", "--checkpoint", "here", "train.py"])
    run = RunConfig.from_env(os.environ, script="train.py")
    assert (run.checkpoint_uri, run.training) == ("here", {})
    assert asked_for(os.environ) == Profile()


def test_run_profiles_nothing() -> None:
    _read_command(["run", "train.py"])
    assert PROFILE not in os.environ and Env.CHECKPOINT_URI not in os.environ


@pytest.mark.parametrize("words", [["--active", "0"], ["--wait", "-1"], ["--warmup", "few"]])
def test_flags_that_are_no_steps_are_refused(words: list[str], told: Told) -> None:
    told(lambda: _read_command(["profile", *words, "train.py"]))


def test_the_environments_window_wins_over_that_of_the_settings_and_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine, theirs = Profile(wait=1, warmup=1, active=2), Profile(wait=100)
    assert chosen({PROFILE: mine.to_json()}, theirs) == mine
    assert "event=override setting=profile" in capsys.readouterr().out
    assert chosen({}, theirs) == Profile(wait=100, warmup=2, active=3) and chosen({}, None) is None
    assert chosen({PROFILE: mine.to_json()}, Profile(wait=1, warmup=1, active=2)) == mine
    assert capsys.readouterr().out == "", "what is equal is no change"


@pytest.mark.parametrize(
    ("env", "lacks", "told"),
    [
        ({}, False, False),
        ({PROFILE: "{}"}, True, False),
        ({PROFILE: "{}", Env.JOB_UID: "uid"}, False, True),
        ({Env.TRAINING: '{"profile": {}}', Env.JOB_UID: "uid"}, False, True),
        ({Env.TRAINING: '{"profile": {}}'}, False, True),
    ],
)
def test_a_profile_that_is_owed_fails_the_command_and_is_told_in_a_job(
    env: dict[str, str],
    lacks: bool,
    told: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(windows, "MADE", [])
    assert bool(not_made(env)) == lacks
    assert ("event=profile-not-made" in capsys.readouterr().out) == told
    windows.MADE.append("profiles/attempt-000001/rank-00000/")
    assert not not_made(env) and capsys.readouterr().out == ""


def test_a_window_of_the_manifest_does_not_refuse_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    _read_command(["profile", "--active", "4", "--training", '{"profile": {"wait": 100}}', "train.py"])
    assert "profile" not in RunConfig.from_env(os.environ, script="train.py").training
    assert "event=override setting=profile" in capsys.readouterr().out
