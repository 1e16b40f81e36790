"""Our wheel beside another torch, in an environment of its own, which `make test-with X=torch` makes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from spottrain.contract import Env

from tests.runs.launched import Launched
from tests.support import optional

Train = Callable[..., Launched]


def missing(python: str) -> str:
    """What is wrong with the environment's Python, and how to get one; empty if nothing is."""
    way = "`make test-with X=torch TORCH=2.6.0` makes an environment and names it (5 to 7 GB)"
    if not python:
        return f"tests/torch_versions needs the Python of an environment in SPOTTRAIN_TORCH: {way}"
    return "" if Path(python).is_file() else f"SPOTTRAIN_TORCH={python} is no program: {way}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    optional.require(config, items, Path(__file__).parent, missing(os.environ.get("SPOTTRAIN_TORCH", "")))


@pytest.fixture(scope="session")
def other() -> Path:
    """The Python of that environment."""
    return Path(os.environ["SPOTTRAIN_TORCH"])


@pytest.fixture(scope="session")
def ours() -> Path:
    return Path(sys.executable)


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Train]:
    """Starts a Python's `spottrain run` in a folder of its own; `at` names the checkpoint folder."""
    begun: list[Launched] = []

    def train(python: Path, script: str, *words: str, at: str = "store", **env: str) -> Launched:
        folder = tmp_path / f"run-{len(begun)}"
        folder.mkdir()
        (folder / "train.py").write_text(script)
        command = [str(python), "-m", "spottrain", "run", *words, "train.py"]
        begun.append(Launched(folder, command, **{Env.CHECKPOINT_URI: str(tmp_path / at), **env}))
        return begun[-1]

    yield train
    for each in begun:
        each.close()


def version_of(python: Path) -> str:
    """The version of torch that it has."""
    shows = "from importlib.metadata import version; print(version('torch'))"
    return subprocess.run([python, "-c", shows], capture_output=True, text=True, check=True).stdout.strip()


def losses(*runs: Launched) -> dict[int, str]:
    """The logged loss of each step of these runs, as written; a later run's wins."""
    line = re.compile(r" step=(\d+)/\d+ (?:rank=0 )?loss=(\S+)")
    return {int(step): loss for run in runs for step, loss in line.findall(run.log)}
