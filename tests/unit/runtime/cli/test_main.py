"""`spottrain`: what its help shows, what its flags set, and what it says of words that it does not know."""

from __future__ import annotations

import json
import json.tool
import os
from importlib.metadata import version
from typing import Any

import pytest
from spottrain.cli.main import _read_command, profile_variables
from spottrain.contract import Env, OnExisting
from spottrain.core.run_config import RunConfig
from spottrain.errors import ConfigurationError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags end up in it."""
    monkeypatch.setattr(os, "environ", {"COLUMNS": "200"})


def on_existing() -> OnExisting:
    return RunConfig.from_env(os.environ, script="train.py").on_existing


@pytest.mark.parametrize("value", OnExisting)
def test_what_to_do_with_checkpoints_of_another_job_can_be_said_on_a_laptop(value: OnExisting) -> None:
    assert _read_command(["run", "--on-existing", value.lower(), "train.py"]).words == ["train.py"]
    assert on_existing() is value


def test_without_the_flag_the_operators_word_stays() -> None:
    os.environ[Env.CHECKPOINT_ON_EXISTING] = "fresh"
    _read_command(["run", "train.py", "--on-existing", "its own"])
    assert on_existing() is OnExisting.FRESH


def test_what_comes_after_the_module_is_the_modules() -> None:
    given = _read_command(["run", "--nproc", "2", "-m", "json.tool", "--nproc", "3", "-m", "x"])
    assert (given.module, given.args, given.nproc) == ("json.tool", ["--nproc", "3", "-m", "x"], "2")
    assert given.script == json.tool.__file__ and given.words == ["-m", "json.tool", *given.args]
    assert _read_command(["run", "train.py", "-m", "json.tool"]).words == ["train.py", "-m", "json.tool"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["run", "--on-existing", "overwrite", "train.py"],
            [
                "--on-existing",
                "'overwrite'",
                "(choose from 'fail', 'resume', 'fresh'); see spottrain run --help",
            ],
        ),
        (["trian", "train.py"], ["'trian'", "run", "profile", "checkpoints", "; see spottrain --help"]),
        ([], ["required: command; see spottrain --help"]),
    ],
)
def test_a_word_that_is_not_known_is_refused_with_those_that_are(words: list[str], said: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        _read_command(words)
    assert all(each in str(refused.value) for each in said) and str(refused.value).endswith(said[-1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [],
            [
                "run a training script and profile",
                "run a training script\n",
                "the other verbs are in spottrain[cli]",
            ],
        ),
        (["run"], ["--on-existing {fail,resume,fresh}"]),
    ],
)
def test_the_help_shows_all_commands_and_a_commands_flags(
    capsys: pytest.CaptureFixture[str], words: list[str], said: list[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        _read_command([*words, "--help"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and all(each in out for each in said)


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        _read_command(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out == f"spottrain {version('spottrain')}\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--keep", "1"], "--keep 1 must be a whole number, at least 2"),
        (["--training", "{"], "--training is not JSON"),
        (["--training", "[]"], "--training must be a JSON object"),
        (["--init-ignore", "head.*"], "--init-ignore"),
        (["--interval", "5x"], "interval '5x' is not valid"),
    ],
)
def test_a_bad_value_of_a_flag_is_refused_before_anything_is_started_and_by_the_flags_name(
    flags: list[str], says: str
) -> None:
    for verb in ("run", "profile"):
        with pytest.raises(ConfigurationError) as refused:
            _read_command([verb, *flags, "train.py"])
        assert says in str(refused.value)
        given = [flag for flag in flags if flag.startswith("--")]
        assert not [name for name in Env if name in str(refused.value)] or given == ["--init-ignore"]


def test_a_bad_value_that_the_environment_has_is_refused_by_the_variables_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(Env.CHECKPOINT_KEEP, "1")
    with pytest.raises(ConfigurationError) as refused:
        _read_command(["run", "--interval", "auto", "train.py"])
    assert str(refused.value).startswith(f"{Env.CHECKPOINT_KEEP}='1': ")


# --- profile --------------------------------------------------------------------------------------------
FLAGS = {"wait": "1", "warmup": "2", "active": "3", "script": "train.py"}


@pytest.mark.parametrize(
    "training", [{}, {"warmupFraction": 0.5}, {"warmupSteps": 100}, {"precision": "bf16"}]
)
def test_the_short_run_of_a_profile_has_no_warm_up_which_would_not_end_in_it(
    training: dict[str, Any],
) -> None:
    made = json.loads(profile_variables(FLAGS, {Env.TRAINING: json.dumps(training)}, 0.0)[Env.TRAINING])
    assert (made["maxSteps"], made["warmupSteps"]) == (6, 0) and "warmupFraction" not in made
    assert made.get("precision") == training.get("precision")


def test_a_profile_of_a_run_with_checkpoints_of_its_own_changes_nothing_else() -> None:
    made = profile_variables(FLAGS, {Env.CHECKPOINT_URI: "s3://b/p"}, 0.0)
    assert json.loads(made[Env.TRAINING]) == {"profile": {"wait": 1, "warmup": 2, "active": 3}}
