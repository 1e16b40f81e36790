"""The package's names: loaded on first use, and all there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from spottrain import levers


def test_every_name_is_there_and_no_other() -> None:
    package: Any = levers
    for name in levers.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_importing_the_package_costs_no_torch() -> None:
    code = "import sys, spottrain.levers, spottrain.levers.rates; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
