"""Libraries that the main environment lacks, each in one of its own: `make test-with X=frameworks`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from tests.support import optional

NAMES: Final = ("trl", "keras", "jax")
HERE: Final = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out the other frameworks' tests, if one is named."""
    named = os.environ.get("SPOTTRAIN_FRAMEWORK")
    if named not in NAMES:
        return None
    others = {f"test_{name}.py" for name in NAMES} - {f"test_{named}.py"}
    return True if collection_path.name in others else None


def missing(framework: str, python: str) -> str:
    """What is wrong with the environment, and how to get one; empty if nothing is."""
    known = ", ".join(NAMES)
    way = f"`make test-with X=frameworks FRAMEWORK=keras` makes an environment and names it ({known})"
    if not (framework and python):
        words = "SPOTTRAIN_FRAMEWORK and the Python of its environment in SPOTTRAIN_FRAMEWORK_PYTHON"
        return f"tests/frameworks needs one framework in {words}: {way}"
    if framework not in NAMES:
        return f"SPOTTRAIN_FRAMEWORK={framework} has no tests: {way}"
    return "" if Path(python).is_file() else f"SPOTTRAIN_FRAMEWORK_PYTHON={python} is no program: {way}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = (os.environ.get(name, "") for name in ("SPOTTRAIN_FRAMEWORK", "SPOTTRAIN_FRAMEWORK_PYTHON"))
    optional.require(config, items, HERE, missing(*named))


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python of the framework's environment."""
    return Path(os.environ["SPOTTRAIN_FRAMEWORK_PYTHON"])
