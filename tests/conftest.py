"""For every level: counts the seconds of each, and prints them before pytest's closing line."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

LEVELS = ("unit", "contract", "chart", "runs", "s3", "api", "nodes", "containers")
# Two threads of OpenMP spin against each other on busy cores; one is faster, and sums in one order.
os.environ["OMP_NUM_THREADS"] = "1"
# Under nohup, which programs that the tests start would inherit.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Hypothesis fails an example that takes 0.2 s or is slow to draw: on busy cores that says nothing.
settings.register_profile("spottrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("spottrain")
_seconds: dict[str, float] = defaultdict(float)
_counts: dict[str, int] = defaultdict(int)


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """A variable that a test leaves behind reaches every program that later tests start."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
    left = {n for n in changed if n.startswith("SPOTTRAIN_")}  # libraries set variables of their own
    for name in left:
        os.environ.pop(name, None)
        os.environ.update({name: before[name]} if name in before else {})
    assert not left, f"left changed: {sorted(left)}"


def _level(nodeid: str) -> str:
    parts = Path(nodeid).parts
    return parts[1] if len(parts) > 1 and parts[1] in LEVELS else "other"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[_level(report.nodeid)] += report.duration
    _counts[_level(report.nodeid)] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for level in LEVELS:
        if level in _seconds:
            terminalreporter.write_line(
                f"level {level:<9} {_counts[level]:4d} tests {_seconds[level]:7.1f} s (fixtures included)"
            )
