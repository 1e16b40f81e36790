"""`spottrain`: what its help shows, what its flags set, and what it says of words that it does not know."""

from __future__ import annotations

import json.tool
import os
from collections.abc import Iterator

import pytest
from spottrain.cli.main import _read_command
from spottrain.contract import Env, OnExisting
from spottrain.core.run_config import RunConfig
from spottrain.errors import ConfigurationError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The flags end up in it."""
    monkeypatch.setattr(os, "environ", {"COLUMNS": "200"})
    yield


def refusal(*words: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        _read_command(list(words))
    return str(refused.value)


@pytest.mark.parametrize("value", OnExisting)
def test_what_to_do_with_checkpoints_of_another_job_can_be_said_on_a_laptop(value: OnExisting) -> None:
    assert _read_command(["run", "--on-existing", value.lower(), "train.py"]).words == ["train.py"]
    assert RunConfig.from_env(os.environ, script="train.py").on_existing is value


def test_what_comes_after_the_module_is_the_modules() -> None:
    given = _read_command(["run", "--nproc", "2", "-m", "json.tool", "--nproc", "3", "-m", "x"])
    assert (given.module, given.args, given.nproc) == ("json.tool", ["--nproc", "3", "-m", "x"], "2")
    assert given.script == json.tool.__file__ and given.words == ["-m", "json.tool", *given.args]
    assert _read_command(["run", "train.py", "-m", "json.tool"]).words == ["train.py", "-m", "json.tool"]


def test_without_the_flag_the_operators_word_stays() -> None:
    os.environ[Env.CHECKPOINT_ON_EXISTING] = "fresh"
    _read_command(["run", "train.py", "--on-existing", "its own"])
    assert RunConfig.from_env(os.environ, script="train.py").on_existing is OnExisting.FRESH


def test_another_word_is_refused_with_those_that_are_known() -> None:
    said = refusal("run", "--on-existing", "overwrite", "train.py")
    assert "--on-existing" in said and "'overwrite'" in said and "see spottrain run --help" in said
    assert "(choose from 'fail', 'resume', 'fresh')" in said


def test_an_unknown_command_is_answered_with_those_that_are_known() -> None:
    said = refusal("trian", "train.py")
    assert "'trian'" in said and said.endswith("; see spottrain --help")
    assert all(each in said for each in ("run", "profile", "checkpoints"))
    assert refusal().endswith("required: command; see spottrain --help")


def test_the_help_shows_all_three_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        _read_command(["--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert "run a training script" in out
    assert "run a training script and profile" in out
    assert "inspect and manage checkpoints" in out


def test_the_help_of_run_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _read_command(["run", "--help"])
    assert "--on-existing {fail,resume,fresh}" in capsys.readouterr().out
