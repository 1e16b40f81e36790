"""bench/RESULTS.md: a line for each goal, with the newest figure that there is."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bench.benchmarks import BENCHMARKS, Benchmark, Goal

HEAD: Final = """\
# Results

Written by `python -m bench.record` from `bench/results/`, whose files have all figures of a run, the commit
and the machine; do not edit it. **Bold** is a goal that was missed; a line without a goal is only told. Empty
cells are as above. Seconds of one machine mean little on another; ratios are of both sides in one run.
"""
COMPARES: Final = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}
BY_HAND: Final = "'by hand'"
"""Command of a record whose figures a person gave (`bench.record --by-hand`)."""
Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""Of each benchmark, the newest first."""


def page(records: Records) -> str:
    themes = dict.fromkeys(each.theme for each in BENCHMARKS.values())
    parts = [HEAD]
    for theme in themes:
        rows = [
            row
            for name, each in BENCHMARKS.items()
            if each.theme == theme
            for row in rows_of(each, records.get(name, ()))
        ]
        parts.append(f"## {theme}\n{table(['what', 'goal', 'figure', 'date', 'machine', 'command'], rows)}\n")
    return "\n".join(parts)


def told(name: str, figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each goal of a run, for a person who has just made it."""
    record = {"figures": figures}
    for goal in BENCHMARKS[name].goals if name in BENCHMARKS else ():
        found, values = newest(goal, [record])
        if found is not None:
            said = cell(goal, values, found)
            missed = ", missed" if "**" in said else ""
            yield f"{goal.what}: {said.replace('**', '')} ({limit_of(goal, found) or 'no goal'}){missed}"


def rows_of(benchmark: Benchmark, records: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yields a row for each goal; date, machine and command stand where they change."""
    before: list[str] = []
    for goal in benchmark.goals:
        record, values = newest(goal, records)
        where = [record["date"][:10], machine(record)] if record else ["", ""]
        by_hand = record is not None and record["command"] == BY_HAND and benchmark.command != "by hand"
        told = [*where, f"by hand, as {benchmark.command}" if by_hand else benchmark.command]
        yield [
            goal.what,
            limit_of(goal, record),
            cell(goal, values, record),
            *(told if told != before else [""] * 3),
        ]
        before = told


def newest(goal: Goal, records: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any] | None, list[Any]]:
    """Returns the newest record that has all figures of a goal, and these."""
    for record in records:
        values = [at(record["figures"], path) for path in (*goal.figures, *goal.compared)]
        if None not in values:
            return record, values[: len(goal.figures)]
    return None, []


def at(figures: Any, path: str) -> Any:
    """Returns the figure at that place; None if there is none. A name may have dots itself."""
    if not isinstance(figures, Mapping):
        return None
    if path in figures:
        return figures[path]
    names = (name for name in figures if path.startswith(f"{name}."))
    return next(
        (found for name in names if (found := at(figures[name], path[len(name) + 1 :])) is not None), None
    )


def limit_of(goal: Goal, record: Mapping[str, Any] | None) -> str:
    """Returns the goal with the number of the figure that it names."""
    for name in goal.compared if record else ():
        assert record is not None
        return goal.limit.replace(name, text(at(record["figures"], name)))
    return goal.limit


def cell(goal: Goal, values: Sequence[Any], record: Mapping[str, Any] | None) -> str:
    """Returns the figures, those that miss the goal in bold."""
    compare, _, limit = limit_of(goal, record).partition(" ")
    met = [not limit or COMPARES[compare](value, float(limit)) for value in values]
    said = (text(value) if good else f"**{text(value)}**" for value, good in zip(values, met, strict=True))
    return ", ".join(said) or "not measured"


def machine(record: Mapping[str, Any]) -> str:
    """Returns the GPU, or the processor without the words that all have."""
    found = str(record["figures"].get("device", "cpu"))
    if found == "cpu":
        found = re.sub(
            r"\((R|TM)\)|\b(Intel|Processor|CPU|virtual machine)\b|@", "", str(record["machine"]["cpu"])
        )
    return f"{' '.join(found.split())}, {record['machine']['cores']} cores"


def text(value: Any) -> str:
    """Returns four digits of a float, and no exponent."""
    if isinstance(value, float):
        digits = max(0, 4 - len(str(int(abs(value))))) if abs(value) >= 1 else 4
        return f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"
    return str(value).replace("|", "\\|")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))
