"""Loads recorded spot availability, and refuses inverted files. 1 (or a count) = available.

Other copies of these traces on the internet store 1 = NOT available. The index of windows names a group for
each window; the mean availability of a window must agree with its group.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Final

WINDOWS: Final = "uniform_progress_windows.json"
SCARCE: Final = "scarce"
PLENTIFUL: Final = "plentiful"


class TraceError(ValueError):
    """A trace or an index of windows that cannot be used; the message says which one and why."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Availability of one zone and instance type."""

    name: str
    tick_seconds: float
    available: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a trace on which a job is replayed."""

    trace: str
    group: str
    tick_seconds: float
    available: tuple[bool, ...]


def read_trace(path: Path, *, nodes: int = 1) -> Trace:
    """Reads one trace file.

    Args:
        path: A JSON file with `metadata.gap_seconds` and `data`.
        nodes: A tick is available if at least so many nodes are.

    Raises:
        TraceError: The file is missing or is not a trace.
    """
    try:
        content = json.loads(path.read_text())
        seconds = float(content["metadata"]["gap_seconds"])
        available = tuple(int(count) >= nodes for count in content["data"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is not a trace: {error!r}") from None
    if seconds <= 0 or not available:
        raise TraceError(f"{path} is not a trace: it has no ticks, or gap_seconds is not positive")
    return Trace(path.stem, seconds, available)


def merged(trace: Trace) -> Trace:
    """Merges ticks of less than a minute five by five, available only if all are: the optimum is slow."""
    if trace.tick_seconds >= 60:
        return trace
    starts = range(0, len(trace.available) - 4, 5)
    parts = tuple(all(trace.available[start : start + 5]) for start in starts)
    return Trace(trace.name, 5 * trace.tick_seconds, parts)


def read_windows(folder: Path) -> list[Window]:
    """Reads the windows that the index in `folder` names, and checks their polarity.

    Raises:
        TraceError: A file is missing or malformed, a window exceeds its trace, or the polarity is wrong.
    """
    index = folder / WINDOWS
    try:
        entries = json.loads(index.read_text())["windows"]
        wanted = [(str(e["trace"]), int(e["start_tick"]), int(e["ticks"]), str(e["group"])) for e in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{index} is not an index of windows: {error!r}") from None
    traces = {name: read_trace(folder / name) for name in {name for name, *_ in wanted}}
    windows = []
    for name, start, ticks, group in wanted:
        trace = traces[name]
        if not 0 <= start <= start + ticks <= len(trace.available):
            raise TraceError(f"{index}: ticks {start} to {start + ticks} are outside of {name}")
        windows.append(Window(trace.name, group, trace.tick_seconds, trace.available[start : start + ticks]))
    check_polarity(windows)
    return windows


def check_polarity(windows: list[Window]) -> None:
    """Raises TraceError where the groups' mean availability contradicts their names."""
    found: dict[str, list[float]] = defaultdict(list)
    for window in windows:
        found[window.group].append(mean(window.available))
    if set(found) != {SCARCE, PLENTIFUL}:
        raise TraceError(
            f"the index of windows must have the groups {SCARCE} and {PLENTIFUL}, not {set(found)}"
        )
    scarce, plentiful = mean(found[SCARCE]), mean(found[PLENTIFUL])
    if scarce >= plentiful:
        raise TraceError(
            f"windows named {SCARCE} have mean availability {scarce:.2f}, those named {PLENTIFUL} "
            f"{plentiful:.2f}: this copy of the traces stores 1 = NOT available. Use one with 1 = available."
        )
