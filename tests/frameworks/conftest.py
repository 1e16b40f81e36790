"""Libraries that the main environment lacks, each in one of its own: `make test-frameworks FRAMEWORK=...`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

NAMES: Final = ("trl", "keras", "jax")
HERE: Final = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out the other frameworks' tests, if one is named."""
    named = os.environ.get("SPOTTRAIN_FRAMEWORK")
    others = {f"test_{name}.py" for name in NAMES} - {f"test_{named}.py"}
    return True if named and collection_path.name in others else None


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python of the framework's environment."""
    found = os.environ.get("SPOTTRAIN_FRAMEWORK_PYTHON")
    if not found:
        pytest.fail(
            "name the environment's Python in SPOTTRAIN_FRAMEWORK_PYTHON; `make test-frameworks` makes one"
        )
    return Path(found)
