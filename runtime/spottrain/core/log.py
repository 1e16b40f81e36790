"""Structured log events, through Python's `logging`: logger `spottrain`, steps by `spottrain.steps`.

`event("committed", step=120)` logs one record. Its message is a sentence; `msg` is the `Event`.
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
from typing import Final

from spottrain.contract import LOG_FORMAT
from spottrain.core.console import ConsoleHandler
from spottrain.core.log_format import FORMATS, STEP, Event, chosen_format, rfc3339

__all__ = ["console", "event", "flush", "rfc3339", "step", "text", "unhindered", "within_patience"]

PATIENCE: Final = 1.0
"""Seconds that a line or a flush may block a caller that must not be blocked."""

rank: int | None = None
"""Set if there are several ranks, whose lines share one stream."""

_logger = logging.getLogger("spottrain")
_steps = logging.getLogger("spottrain.steps")


def _progress_wanted() -> bool:
    return console in _logger.handlers and _steps.isEnabledFor(logging.INFO)


console: Final = ConsoleHandler(_progress_wanted)
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
