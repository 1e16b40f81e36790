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


def test_one_import_reaches_every_lever() -> None:
    code = (
        "import sys, spottrain\n"
        "from spottrain.diagnosis import Profiler, Watch\n"
        "for name in ('accumulation', 'rates', 'activations', 'batchsize', 'optimizers', 'compression',"
        " 'precision', 'compiling', 'ema', 'stopping', 'trackers', 'memory', 'autofit'):\n"
        "    getattr(spottrain.levers, name)\n"
        "for name in spottrain.__all__ + ['levers.' + n for n in spottrain.levers.__all__]:\n"
        "    eval('spottrain.' + name)\n"
        "assert spottrain.diagnosis.Watch is Watch and spottrain.schedule.shape"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_packages_themselves_cost_no_torch() -> None:
    code = (
        "import sys, spottrain\n"
        "spottrain.levers.rates, spottrain.levers.stopping, spottrain.diagnosis.window\n"
        "spottrain.ActivationCheckpointing(policy='all')\n"
        "import spottrain.process.session\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
