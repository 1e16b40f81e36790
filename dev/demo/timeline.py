"""The live timeline of the demo: one line for each thing that happened, as it happens. Used by the story."""

from __future__ import annotations

import sys
import threading
import time
from datetime import datetime


class Timeline:
    """Prints `seconds  who  what`, from any thread, each line whole."""

    def __init__(self) -> None:
        self._start = time.time()
        self._lock = threading.Lock()
        self._colour = sys.stdout.isatty()
        self._open_line = False

    def seconds(self) -> float:
        return time.time() - self._start

    def say(self, who: str, what: str, *, at: float | None = None, mark: bool = False) -> None:
        """`at` is a Unix time; `mark` makes a line that a reader must not miss stand out."""
        seconds = (at or time.time()) - self._start
        text = f"{seconds:7.1f} s  {who:<12} {what}"
        self._write(f"\033[1;33m{text}\033[0m" if mark and self._colour else text)

    def progress(self, text: str) -> None:
        """A line that the next one overwrites on a terminal; elsewhere nothing."""
        if not self._colour:
            return
        with self._lock:
            sys.stdout.write(f"\r\033[K{self.seconds():7.1f} s  {text}")
            sys.stdout.flush()
            self._open_line = True

    def _write(self, text: str) -> None:
        with self._lock:
            sys.stdout.write(("\r\033[K" if self._open_line else "") + text + "\n")
            sys.stdout.flush()
            self._open_line = False


def unix(text: str) -> float:
    """Unix seconds of an RFC 3339 time."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)
