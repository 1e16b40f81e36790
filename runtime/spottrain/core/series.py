"""The series of steps of an attempt: loss, speed and utilisation over the steps, small enough to be rewritten
at each save. Pure.

One object for each claim of the checkpoint URI, `series/t<term>.jsonl.gz`: gzip, one JSON value a line. The
first line is an object, the attempt (`Attempt`). Each further line is an array, one point, with a value for
each name in the first line's `columns`. A point is a log line, or several in a row where an attempt has more
than MAX_POINTS of them: its loss is their mean, with the least and the greatest one beside it.

Terms give the order. An attempt resumes from a checkpoint, so its `startStep` cuts the series before it: what
came after that step was lost, or was written by a process that did not know yet that it was superseded.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, NamedTuple

from spottrain.contract import TimeSplit

FORMAT: Final = 1
MAX_POINTS: Final = 2048
"""Points of an attempt. Once there are as many, pairs of them become one."""
LEVEL: Final = 6


class Point(NamedTuple):
    """One log line, or several in a row. None: unknown."""

    step: int
    """Optimizer steps done at its end."""
    time: float
    """Unix seconds of its end."""
    loss: float | None = None
    lossMin: float | None = None
    lossMax: float | None = None
    steps: int = 1
    """Steps that `seconds` and `samples` are of."""
    seconds: float = 0.0
    samples: int = 0
    """0: unknown."""
    learningRate: float | None = None
    mfu: float | None = None
    gpuUtilisation: float | None = None
    gpuMemory: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What is known of the attempt when the object is written."""

    term: int
    """Of its claim of the checkpoint URI."""
    job: str
    jobUID: str
    number: int
    bornTime: float
    """Start of its process, in Unix seconds."""
    writtenTime: float
    startStep: int = 0
    totalSteps: int = 0
    """0: unknown."""
    step: int = 0
    durableStep: int | None = None
    outcome: str = ""
    """A `contract.Outcome`; empty while it runs, and where it ended without a word."""
    diagnosis: str = ""
    """What limits the training, and the fix."""
    timeSplit: TimeSplit | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    attempt: Attempt
    points: tuple[Point, ...]

    def to_bytes(self) -> bytes:
        """Returns the object's content."""
        first = {"format": FORMAT, "columns": Point._fields} | asdict(self.attempt)
        # With as many digits as a chart shows; the time to a hundredth of a second.
        short = ([point.step, round(point.time, 2), *map(_digits, point[2:])] for point in self.points)
        lines = [json.dumps(first), *map(json.dumps, short)]
        return gzip.compress("\n".join(lines).encode(), LEVEL, mtime=0)

    @classmethod
    def from_bytes(cls, body: bytes) -> Series:
        """Parses an object's content. Raises ValueError if it is none, or of a newer format."""
        try:
            first, *rest = map(json.loads, gzip.decompress(body).decode().splitlines())
            if first["format"] != FORMAT:
                raise ValueError(f"it has format {first['format']}, and this spottrain reads {FORMAT}")
            known = {field.name for field in fields(Attempt)}
            facts = {name: value for name, value in first.items() if name in known}
            facts["timeSplit"] = TimeSplit.from_raw(first.get("timeSplit"))
            points = tuple(_point(first["columns"], values) for values in rest)
            return cls(attempt=Attempt(**facts), points=points)
        except (OSError, EOFError, zlib.error, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no series of steps: {type(error).__name__}: {error}") from error


class SeriesBuilder:
    """Collects the points of one attempt, MAX_POINTS at most."""

    def __init__(self, most: int = MAX_POINTS) -> None:
        self._most = most
        self._points: list[Point] = []
        self._lines = 1
        """Log lines of a point."""
        self._open: list[Point] = []

    def add(self, point: Point) -> None:
        self._open.append(point)
        if len(self._open) < self._lines:
            return
        self._points.append(merged(self._open))
        self._open = []
        if len(self._points) >= self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points, self._lines = [merged(pair) for pair in pairs], 2 * self._lines

    def points(self) -> tuple[Point, ...]:
        return (*self._points, *([merged(self._open)] if self._open else []))


def merged(points: Sequence[Point]) -> Point:
    """Returns one point for several in a row."""
    if len(points) == 1:
        return points[0]
    last = points[-1]
    return Point(
        step=last.step,
        time=last.time,
        loss=_mean((p.loss, p.steps) for p in points),
        lossMin=min((low for p in points if (low := _first(p.lossMin, p.loss)) is not None), default=None),
        lossMax=max((high for p in points if (high := _first(p.lossMax, p.loss)) is not None), default=None),
        steps=sum(p.steps for p in points),
        seconds=sum(p.seconds for p in points),
        samples=sum(p.samples for p in points) if all(p.samples for p in points) else 0,
        learningRate=last.learningRate,
        mfu=_mean((p.mfu, p.seconds) for p in points),
        gpuUtilisation=_mean((p.gpuUtilisation, p.seconds) for p in points),
        gpuMemory=_mean((p.gpuMemory, p.seconds) for p in points),
    )


def cut(found: Iterable[Series]) -> list[Series]:
    """Returns the series in the order of their terms, each without the steps that a later one did again.

    A point that is of steps before and after such a cut is left out.
    """
    ordered = sorted(found, key=lambda series: series.attempt.term)
    limit, kept = float("inf"), []
    for series in reversed(ordered):
        points = tuple(point for point in series.points if point.step <= limit)
        kept.append(replace(series, points=points))
        limit = min(limit, series.attempt.startStep)
    return kept[::-1]


def _mean(weighted: Iterable[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in weighted if value is not None]
    total = sum(weight for _, weight in known)
    if not known or total <= 0:
        return known[-1][0] if known else None
    return sum(value * weight for value, weight in known) / total


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _digits(value: float | None) -> float | None:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _point(columns: Sequence[str], values: Sequence[Any]) -> Point:
    """Returns the point; columns that this version does not know are left out. Raises ValueError."""
    named = dict(zip(columns, values, strict=True))
    found = {name: named[name] for name in Point._fields if name in named}
    for name, value in found.items():
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise ValueError(f"its {name} {value!r} is not a finite number")
    return Point(**found)
