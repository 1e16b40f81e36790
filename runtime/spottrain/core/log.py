"""Writes one line per event to stdout, readable by people and parsed by `dev/demo_local.py` and the tests.

2026-11-21T12:03:04.123Z event=claimed term=2 step=120 key=checkpoints/t000002-s000000120-ab/
2026-11-21T12:03:05.009Z step=121/400 loss=2.34567890 lr=0.0003 samples/s=812
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Final

PATIENCE: Final = 1.0
"""Seconds that a line or a flush may block a caller that must not be blocked."""

rank: int | None = None
"""Set if there are several ranks, whose lines share one stream."""


def rfc3339(seconds: float) -> str:
    """Unix seconds as UTC with milliseconds."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


def event(name: str, /, **facts: object) -> None:
    """Logs `event=name key=value ...`. Values with blanks are quoted; None is left out."""
    line("event=" + name, **facts)


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


def text(head: str, /, **facts: object) -> str:
    """Returns the formatted line, newline included."""
    facts = facts if rank is None else {"rank": rank, **facts}
    words = [f"{key}={_word(value)}" for key, value in facts.items() if value is not None]
    return " ".join([rfc3339(time.time()), head, *words]) + "\n"


def line(head: str, /, **facts: object) -> None:
    # One write per line: several threads share stdout, and a split line cannot be parsed.
    with contextlib.suppress(OSError, ValueError):  # the reader is gone; that must not stop a save
        sys.stdout.write(text(head, **facts))
        sys.stdout.flush()


def _word(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "\n=') else text
