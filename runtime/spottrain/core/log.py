"""Structured log events, through Python's `logging`: logger `spottrain`, steps by `spottrain.steps`.

`event("committed", step=120)` logs one record. Its message is a sentence; `msg` is the `Event`. The handler
`console` writes it to standard output: as text in a terminal, as logfmt elsewhere, or as SPOTTRAIN_LOG_FORMAT
says (`log_format`). If the program has given the logger a handler before, that one stays alone. By default
records do not propagate, so that a handler of the root logger repeats no line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TextIO

from spottrain.contract import LOG_FORMAT
from spottrain.core.log_format import FORMATS, STEP, Event, chosen_format, event_of, rfc3339, sentence_line

__all__ = ["console", "event", "flush", "on_terminal", "rfc3339", "step", "text", "unhindered"]

PATIENCE: Final = 1.0
"""Seconds that a line or a flush may block a caller that must not be blocked."""

rank: int | None = None
"""Set if there are several ranks, whose lines share one stream."""


class ConsoleHandler(logging.Handler):
    """Writes to what is standard output at the time. A reader that is gone must not stop a save."""

    _over = False
    """Whether the run has ended, after which a person needs no more sentences but warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event, write = event_of(record), _format(sys.stdout)
            ended, self._over = self._over, self._over or event.name == "end"
            wanted = event.for_people and not (ended and event.level < logging.WARNING)
            if write is sentence_line and is_terminal(sys.stdout) and not wanted:
                return
            line = (self.format(record) if self.formatter else write(event, record.levelno)) + "\n"
            try:
                sys.stdout.write(line)  # one write: a split line cannot be parsed
            except UnicodeEncodeError:
                sys.stdout.write(line.encode("ascii", "backslashreplace").decode())
            sys.stdout.flush()
        except (OSError, ValueError, AttributeError):  # closed, gone, or None
            return
        except Exception:  # such as arguments of another module's record that do not fit its text
            self.handleError(record)


def is_terminal(stream: TextIO) -> bool:
    """Whether a person reads the stream. In a Jupyter kernel only its descriptor is a terminal."""
    try:
        return stream.isatty() and os.isatty(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def on_terminal() -> bool:
    """Whether a person reads both the log and standard error in a terminal."""
    return is_terminal(sys.stdout) and is_terminal(sys.stderr) and _format(sys.stdout) is sentence_line


def _format(stream: TextIO) -> Callable[[Event, int], str]:
    return FORMATS[chosen_format(os.environ.get(LOG_FORMAT, ""), terminal=is_terminal(stream))]


console: Final = ConsoleHandler()
_logger = logging.getLogger("spottrain")
_steps = logging.getLogger("spottrain.steps")
if not _logger.handlers:
    _logger.addHandler(console)
    _logger.propagate = False
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.INFO)


def event(name: str, /, **facts: object) -> None:
    """Logs an event. Facts that are None are left out."""
    _log(_logger, name, facts)


def step(number: int, total: int | None, /, **figures: float | None) -> None:
    """Logs the figures of a training step. `total`: number of steps of the training, if known."""
    _log(_steps, STEP, {"step": number, "total_steps": total or None, **figures})


def _log(logger: logging.Logger, name: str, facts: dict[str, object]) -> None:
    found = _event(name, facts)
    if logger.isEnabledFor(found.level):
        logger.log(found.level, found, stacklevel=3)


def _event(name: str, facts: dict[str, object]) -> Event:
    return Event(name=name, facts=facts if rank is None else {"rank": rank, **facts}, at=time.time())


def text(name: str, /, **facts: object) -> str:
    """Returns the line of an event for an output that is no terminal, line break included."""
    found = _event(name, facts)
    kind = chosen_format(os.environ.get(LOG_FORMAT, ""), terminal=False)
    return FORMATS[kind](found, found.level) + "\n"


def unhindered(name: str, /, **facts: object) -> None:
    """Logs an event without blocking, for threads that end the process or watch its deadline.

    A full pipe that nobody reads would block for ever. After PATIENCE seconds this returns, and the line is
    written as soon as it can be."""
    within_patience(partial(event, name, **facts))


stuck = False
"""Whether a line could not be written in time. Then a normal interpreter exit would block too."""


def within_patience(act: Callable[[], object]) -> None:
    global stuck
    done = threading.Thread(target=act, name="spottrain-line", daemon=True)
    try:
        done.start()
    except RuntimeError:  # the interpreter is shutting down, so no thread can start
        act()
        return
    done.join(PATIENCE)
    stuck = stuck or done.is_alive()


def flush() -> None:
    """Flushes stdout and stderr, for at most PATIENCE seconds."""
    within_patience(_flush)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
