"""What Prometheus' text format says: counters, and percentiles of histograms. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families


def value(text: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples with these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def buckets(text: str, name: str, **labels: str) -> dict[float, float]:
    """A histogram's observations up to each limit, added up over all other labels."""
    found: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
                limit = float(sample.labels["le"])
                found[limit] = found.get(limit, 0.0) + sample.value
    return found


def quantile(before: Mapping[float, float], after: Mapping[float, float], share: float) -> float | None:
    """Of what was observed in between, linear within a bucket, as Prometheus does it. None: nothing was."""
    counts = {limit: after[limit] - before.get(limit, 0.0) for limit in sorted(after)}
    wanted = share * counts.get(math.inf, 0.0)
    if not wanted:
        return None
    below, passed = 0.0, 0.0
    for limit, count in counts.items():
        if count >= wanted:
            within = 0.0 if limit == math.inf else (wanted - passed) / (count - passed)
            return below + (limit - below) * within if within else below
        below, passed = limit, count
    raise AssertionError("the last bucket has all")


def p99_ms(before: str, after: str, name: str, **labels: str) -> float | None:
    """The 99th percentile of what a histogram observed between two readings, in milliseconds."""
    found = quantile(buckets(before, name, **labels), buckets(after, name, **labels), 0.99)
    return None if found is None else round(1000 * found, 1)


def labels_of(text: str, name: str, label: str) -> list[str]:
    """Values of a label that a metric has."""
    families = text_string_to_metric_families(text)
    return sorted({s.labels[label] for family in families for s in family.samples if s.name == name})
