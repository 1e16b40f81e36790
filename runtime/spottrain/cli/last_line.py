"""The last line that a script wrote, for the message of its failure: `sys.exit(1)` alone does not say why."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Final

from spottrain.core import patches

MAX_CHARACTERS: Final = 500
"""Characters of the line that are kept, counted from its end."""
EVENT: Final = re.compile(r'\d{4}-\d\d-\d\dT\S+ (event|step)=|\{"time": |\d\d:\d\d:\d\d ')
"""Beginning of a line of our own log (core/log_format.py), which goes to standard output too."""


class LastLine:
    """Follows what Python code writes to standard output and error."""

    def __init__(self) -> None:
        self._said: dict[int, str] = {}
        """By stream: its last line."""
        self._begun: dict[int, str] = {}
        """By stream: the part of a line that has no end yet."""

    def follow(self) -> None:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            if hasattr(stream, "__dict__"):  # as of a TextIOWrapper
                patches.replace(stream, "write", self._following(number, stream.write))

    @property
    def text(self) -> str:
        """The last line of standard error, else of standard output; "" without any."""
        for number in (2, 1):
            if line := self._begun.get(number, "").strip() or self._said.get(number, ""):
                return line[-MAX_CHARACTERS:]
        return ""

    def _following(self, number: int, write: Callable[[str], int]) -> Callable[[Any], int]:
        def following(text: Any) -> int:
            if isinstance(text, str):
                self._take(number, text)
            return write(text)

        return following

    def _take(self, number: int, text: str) -> None:
        *lines, begun = re.split(r"[\r\n]", self._begun.get(number, "") + text)
        self._begun[number] = begun[-MAX_CHARACTERS:]
        said = (line.strip() for line in reversed(lines) if not EVENT.match(line))
        self._said[number] = next(filter(None, said), self._said.get(number, ""))
