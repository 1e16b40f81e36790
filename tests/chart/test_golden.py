"""The rendered chart is what lies in golden/, so that its changes show in a diff: `make golden` renews it.

The definition is left out: it is a copy of crds/.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.helm import CHART, KUBERNETES, NAMESPACE, helm

FOLDER = Path(__file__).with_name("golden")
VALUES = sorted(FOLDER.glob("*.values.yaml"))
RENEW = "SPOTTRAIN_RENEW_GOLDEN"


def rendered(values: Path) -> str:
    words = ("--namespace", NAMESPACE, *KUBERNETES, "--set", "crds.enabled=false", "--values", values)
    done = helm("template", "spottrain", CHART, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.name.partition(".")[0])
def test_the_chart_renders_what_was_last_looked_at(values: Path) -> None:
    golden = values.with_name(values.name.replace(".values", ""))
    text = rendered(values)
    if os.environ.get(RENEW):
        golden.write_text(text)
    assert text == golden.read_text(), "the chart renders otherwise: run `make golden` and read its diff"


def test_each_golden_file_has_its_values() -> None:
    files = {path.name for path in FOLDER.iterdir()}
    assert files == {name for v in VALUES for name in (v.name, v.name.replace(".values", ""))}
