"""Seconds, medians and percentiles, as all benchmarks tell them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 5),
        "least": round(min(values), 5),
        "greatest": round(max(values), 5),
        "n": len(values),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Of the pairs."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest that so many are not above; None where there are none."""
    ordered = sorted(values)
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3) if ordered else None


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "greatest": quantile(values, 1)}


def interval(values: Sequence[float], level: float = 0.95, draws: int = 5000) -> list[float]:
    """Both ends of the median's, by bootstrap; the seed is fixed."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    cut = int((1 - level) / 2 * draws)
    return [round(medians[cut], 3), round(medians[-cut - 1], 3)]
