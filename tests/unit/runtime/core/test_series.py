"""The series of steps: bounded, written and read as it is, and without a step twice."""

from __future__ import annotations

import gzip
import json

import pytest
from spottrain.contract import Outcome, TimeSplit, is_own, series_key
from spottrain.core.series import Attempt, Point, Series, SeriesBuilder, cut, merged


def attempt(term: int = 1, start: int = 0) -> Attempt:
    return Attempt(
        term=term,
        job="gpt",
        jobUID="uid",
        number=term,
        bornTime=100.5,
        writtenTime=200.0,
        startStep=start,
        totalSteps=1000,
        step=42,
        durableStep=40,
        outcome=Outcome.INTERRUPTED,
        diagnosis="data-bound: it waits",
        timeSplit=TimeSplit(productive=90.0, startup=9.5),
    )


def points(*steps: int) -> tuple[Point, ...]:
    return tuple(Point(step=step, time=1000.0 + step, loss=1 / step, seconds=0.5) for step in steps)


def test_what_is_written_is_read() -> None:
    point = Point(
        step=7, time=1700000000.12, loss=1.25, steps=5, seconds=2.5, samples=40, learningRate=3e-4, mfu=0.4
    )
    series = Series(attempt=attempt(), points=(point, Point(step=9, time=1.0)))
    assert Series.from_bytes(series.to_bytes()) == series


@pytest.mark.parametrize(
    ("steps", "most"), [(10_000, 64), pytest.param(1_000_000, 2048, marks=pytest.mark.heavy)]
)
def test_however_many_steps_are_few_points_with_their_extremes(steps: int, most: int) -> None:
    builder = SeriesBuilder(most)
    for step in range(1, steps + 1):
        loss = 99.0 if step == 7777 else 2.0 + (step * 7919 % 1000) / 1e4
        builder.add(Point(step=step, time=float(step), loss=loss, seconds=0.25, samples=8))
    found = builder.points()
    assert most / 2 <= len(found) <= most
    assert sum(point.steps for point in found) == steps and found[-1].step == steps
    assert sum(point.samples for point in found) == 8 * steps
    assert max(point.lossMax or 0.0 for point in found) == 99.0
    assert all(point.loss is not None and point.lossMin is not None for point in found)
    assert len(Series(attempt=attempt(), points=found).to_bytes()) < 100 * most


def test_one_point_of_several_has_their_mean_and_their_extremes_and_does_not_invent_samples() -> None:
    one, other = Point(step=1, time=1.0, loss=4.0, seconds=3.0), Point(step=4, time=9.0, loss=1.0, steps=3)
    found = merged([one, other._replace(samples=8, mfu=0.5, seconds=1.0)])
    assert (found.step, found.time, found.steps, found.seconds) == (4, 9.0, 4, 4.0)
    assert (found.loss, found.lossMin, found.lossMax) == (1.75, 1.0, 4.0)
    assert found.samples == 0 and found.mfu == 0.5


def test_the_start_of_a_later_term_cuts_what_came_before() -> None:
    first = Series(attempt=attempt(1), points=points(5, 10, 15))
    superseded = Series(attempt=attempt(2, start=10), points=points(11, 20))
    third = Series(attempt=attempt(3, start=10), points=points(11, 12))
    found = cut([third, first, superseded])
    assert [[point.step for point in series.points] for series in found] == [[5, 10], [], [11, 12]]
    again = cut([first, Series(attempt=attempt(4), points=points(1))])  # a fresh start
    assert [len(series.points) for series in again] == [0, 1]


def test_a_reader_takes_columns_that_it_does_not_know() -> None:
    first, line = gzip.decompress(Series(attempt=attempt(), points=points(4)).to_bytes()).decode().split("\n")
    facts = json.loads(first)
    facts |= {"columns": [*facts["columns"], "gradNorm"], "newer": 1}
    text = json.dumps(facts) + "\n" + json.dumps([*json.loads(line), 0.1])
    assert Series.from_bytes(gzip.compress(text.encode())).points == points(4)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no gzip",
        gzip.compress(b""),
        gzip.compress(b"[]"),
        gzip.compress(b'{"format": 2}'),
        gzip.compress(b'{"format": 1, "columns": ["step"]}'),
        Series(attempt=attempt(), points=points(3)).to_bytes()[:-9],
        Series(attempt=attempt(), points=(Point(step=1, time=1.0, loss="<b>"),)).to_bytes(),  # type: ignore[arg-type]
        Series(attempt=attempt(), points=(Point(step=1, time=1.0, loss=float("nan")),)).to_bytes(),
    ],
    ids=["empty", "no gzip", "no line", "a list", "format 2", "a column alone", "cut off", "a text", "NaN"],
)
def test_another_content_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        Series.from_bytes(body)


def test_only_its_own_keys_are_deleted_with_a_job() -> None:
    assert series_key(12) == "series/t000012.jsonl.gz" and is_own(series_key(1_234_567))
    assert not is_own("series/t12.jsonl.gz") and not is_own("series/notes.jsonl.gz")
