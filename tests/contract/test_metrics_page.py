"""docs/metrics.md names every metric of operator and trainers, with its type and labels, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase
from spottrain.core.progress import METRICS
from spottrain_operator.io import metrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(spottrain_\w+)` \| (\w+) \|([^|]*)\| [^|]+ \|$", re.MULTILINE)


Row = tuple[str, str, tuple[str, ...]]


def listed() -> tuple[set[Row], set[Row]]:
    """The operator's, and the trainers'."""
    parts = PAGE.read_text().split("## Each trainer")
    operator, trainer = (
        {(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(part)}
        for part in parts
    )
    return operator, trainer


def test_the_page_has_each_metric_of_the_operator() -> None:
    values = (*vars(metrics).values(), *metrics.MEASURED.values())
    assert listed()[0] == {
        (m._name + ("_total" if m._type == "counter" else ""), m._type, tuple(m._labelnames))
        for m in values
        if isinstance(m, MetricWrapperBase)
    }


def test_the_page_has_each_metric_of_a_trainer() -> None:
    kinds = {name: "counter" if name.endswith("_total") else "gauge" for name in METRICS}
    assert {(name, kind) for name, kind, _ in listed()[1]} == set(kinds.items())
