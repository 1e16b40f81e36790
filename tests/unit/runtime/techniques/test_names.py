"""The package's names: loaded on first use, and all there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from spottrain import techniques

from tests.support.fresh import Fresh
from tests.support.sentences import Told


def test_a_name_that_is_not_there_is_an_attribute_error(told: Told) -> None:
    package: Any = techniques
    with pytest.raises(AttributeError) as refused:
        _ = package.nothing
    told(refused)


def test_one_import_reaches_every_name(fresh: Fresh) -> None:
    code = (
        "import sys, spottrain\n"
        "from spottrain.diagnostics import Profiler, Watch\n"
        "for name in spottrain.__all__ + ['techniques.' + n for n in spottrain.techniques.__all__]:\n"
        "    assert eval('spottrain.' + name) is not None\n"
        "assert spottrain.diagnostics.Watch is Watch and spottrain.techniques.schedules.shape"
    )
    fresh.run(code, seconds=120)


def test_the_packages_themselves_cost_no_torch() -> None:
    code = (
        "import sys, spottrain\n"
        "import spottrain.techniques.lr_scaling\n"
        "spottrain.techniques.early_stopping\n"
        "spottrain.ActivationCheckpointing(policy='all')\n"
        "import spottrain.lifecycle.session\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
