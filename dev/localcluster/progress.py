"""One line for each long step, and never a silence of more than five seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Final

_QUIET_SECONDS: Final = 4.0
_lock = threading.RLock()
_steps: list[Progress] = []
_last = 0.0
"""When something was printed."""
_open = False
"""The cursor is behind dots, or behind a line that counts seconds."""


class Progress:
    """A step that takes a while: says what it does, how long that usually takes, and how long it took.

    A terminal sees the seconds count; elsewhere dots show that it is still at it. Steps may run side by side.
    """

    def __init__(self, text: str, *, usual: float) -> None:
        self._text, self._usual, self._began = text, usual, 0.0

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        with _lock:
            line(f"{self._text} (usually {seconds_in_words(self._usual)}) ...")
            _steps.append(self)
            if len(_steps) == 1:
                threading.Thread(target=_tick, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _steps.remove(self)
            took = seconds_in_words(time.monotonic() - self._began)
            line(f"{self._text}: {took}" if kind is None else f"{self._text}: stopped after {took}")

    def shown(self) -> str:
        return f"{self._text} {time.monotonic() - self._began:.0f} s"


def line(text: str) -> None:
    """Prints a line of its own, whatever stands at the cursor."""
    global _last, _open
    with _lock:
        live = sys.stderr.isatty()
        begin = ("\r\033[K" if live else "\n") if _open else ""
        print(f"{begin}{text}", file=sys.stderr, flush=True)
        _last, _open = time.monotonic(), False


def seconds_in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _tick() -> None:
    global _last, _open
    live = sys.stderr.isatty()
    while True:
        time.sleep(1.0)
        with _lock:
            if not _steps:
                return
            if live:
                text = ", ".join(step.shown() for step in _steps)
                print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
                _open = True
            elif time.monotonic() - _last >= _QUIET_SECONDS:
                print(".", end="", file=sys.stderr, flush=True)
                _last, _open = time.monotonic(), True
