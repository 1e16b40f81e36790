"""What happened in each scene, line by line: kept only where something was wrong. Written by all parts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

EVERYWHERE: Final = "everywhere"
KEPT: Final = 5000
"""Lines of what concerns all scenes: the operator's life and clock, and cut watches."""


@dataclass(kw_only=True)
class Journal:
    folder: Path
    loud: bool = False
    """Prints each line as well."""
    _lines: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _since: dict[str, float] = field(default_factory=dict)

    def say(self, place: str, what: str) -> None:
        line = f"{datetime.now(UTC):%H:%M:%S.%f} {what}"
        self._since.setdefault(place, time.monotonic())
        self._lines[place].append(line)
        if place == EVERYWHERE:
            del self._lines[place][:-KEPT]
        if self.loud:
            print(line if place == EVERYWHERE else f"{place}: {line}", flush=True)

    def say_to_all(self, what: str) -> None:
        self.say(EVERYWHERE, what)

    def keep(self, place: str, head: Sequence[str], operator_log: Path) -> Path:
        """One file: the scene's lines and everybody's in their order, then the operator's about the scene."""
        own = self._lines[place]
        first = own[0] if own else ""
        common = [line for line in self._lines[EVERYWHERE] if line >= first]
        said = [line for line in operator_log.read_text(errors="replace").splitlines() if _is_of(place, line)]
        path = self.folder / f"{place}.log"
        parts = [*head, "", *sorted([*own, *common]), "", "--- the operator's log ---", *said]
        path.write_text("\n".join(parts) + "\n")
        return path

    def forget(self, place: str) -> None:
        self._lines.pop(place, None)


def _is_of(place: str, line: str) -> bool:
    """Of the operator's JSON lines; a traceback's paths name the namespace too."""
    return f'"{place}"' in line or f"/{place}/" in line
