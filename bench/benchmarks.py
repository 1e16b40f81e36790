"""The benchmarks that there are, and their goals: benchmarks.toml as objects."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Goal:
    """A line of bench/RESULTS.md."""

    what: str
    limit: str
    figures: tuple[str, ...]

    @property
    def compared(self) -> tuple[str, ...]:
        """The figure that the limit names."""
        limit = self.limit.rpartition(" ")[2]
        return (limit,) if limit.isidentifier() else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A benchmark, or one of the parts of it that have records of their own."""

    about: str
    theme: str
    module: str = ""
    part: str = ""
    goals: tuple[Goal, ...] = ()

    @classmethod
    def of(cls, table: dict[str, Any]) -> Benchmark:
        goals = tuple(Goal(what, limit, tuple(figures)) for what, limit, *figures in table.pop("goals", ()))
        return cls(**table, goals=goals)

    @property
    def name(self) -> str:
        """What follows `python -m bench`; "": another program records it, or a person."""
        return self.module.removeprefix("bench.") if self.module.startswith("bench.") else ""

    @property
    def command(self) -> str:
        if not self.name:
            return f"`python -m {self.module}`" if self.module else "by hand"
        return (
            f'`make bench NAME="{self.name} {self.part}"`' if self.part else f"`make bench NAME={self.name}`"
        )


BENCHMARKS: Final = {
    name: Benchmark.of(table)
    for name, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}
"""By the folder of the records, in the order of the page."""


def listed() -> Iterator[tuple[str, str]]:
    """Yields the words after `python -m bench` and what they measure."""
    for each in BENCHMARKS.values():
        if each.name:
            yield f"{each.name} {each.part}".strip(), each.about


def recorded_as(name: str, words: list[str]) -> str:
    """Returns the folder of the records of a benchmark with these arguments."""
    parts = {each.part: key for key, each in BENCHMARKS.items() if each.name == name}
    told = " ".join(words).replace("=", " ")
    return next((key for part, key in parts.items() if part and f"{part} " in f"{told} "), parts[""])
