"""The package's names: loaded on first use, and all there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from spottrain import techniques

from tests.support.fresh import Fresh


def test_every_name_is_there_and_no_other() -> None:
    package: Any = techniques
    for name in techniques.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_importing_the_package_costs_no_torch() -> None:
    code = (
        "import sys, spottrain.techniques, spottrain.techniques.lr_scaling; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_import_reaches_every_technique(fresh: Fresh) -> None:
    code = (
        "import sys, spottrain\n"
        "from spottrain.diagnostics import Profiler, Watch\n"
        "for name in spottrain.__all__ + ['techniques.' + n for n in spottrain.techniques.__all__]:\n"
        "    eval('spottrain.' + name)\n"
        "assert spottrain.diagnostics.Watch is Watch and spottrain.techniques.schedules.shape"
    )
    fresh.run(code)


def test_the_packages_themselves_cost_no_torch() -> None:
    code = (
        "import sys, spottrain\n"
        "spottrain.techniques.lr_scaling, spottrain.techniques.early_stopping\n"
        "spottrain.ActivationCheckpointing(policy='all')\n"
        "import spottrain.lifecycle.session\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
