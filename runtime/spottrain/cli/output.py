"""What a command answers: facts for `-o json`, lines for a person. Used by all of `cli/`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spottrain.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    facts: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    ok: bool = True
    """False: exit code 1."""
    body: Iterable[bytes] | None = None
    """In place of `lines`: bytes as they are, too many to be held at once."""


def size(number: int) -> str:
    """In binary units, three digits."""
    amount = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"


def age(seconds: float) -> str:
    """In the largest unit that gives 2 at least."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def confirm(question: str, *, sure: bool) -> None:
    """Returns when the person says yes, or said so before. Raises ConfigurationError."""
    if sure:
        return
    if sys.stdin.isatty():
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise ConfigurationError("nothing was changed; --yes says that it is meant, --dry-run shows what it is")
