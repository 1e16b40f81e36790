"""One line per happening on stdout: for people to read, for `dev/demo_local.py` and the tests to parse.

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
"""Seconds that a line, or a flush, may hold up who must not be held up."""

rank: int | None = None
"""Set by `session` where there are several ranks, whose lines share one stream."""


def rfc3339(seconds: float) -> str:
    """Unix seconds as UTC with milliseconds."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


def event(name: str, /, **facts: object) -> None:
    """`event=name key=value ...`; values with blanks are quoted, None is left out."""
    line("event=" + name, **facts)


def unhindered(name: str, /, **facts: object) -> None:
    """An event of whoever ends the process, or watches its deadline: nobody may be reading, and a full pipe
    would hold it for ever. After PATIENCE it goes on, and the line comes out when it can."""
    within_patience(partial(event, name, **facts))


stuck = False
"""Whether something could not be written in time: then the interpreter's own end would not come through."""


def within_patience(act: Callable[[], object]) -> None:
    global stuck
    done = threading.Thread(target=act, name="spottrain-line", daemon=True)
    try:
        done.start()
    except RuntimeError:  # the interpreter ends: no thread may begin any more
        act()
        return
    done.join(PATIENCE)
    stuck = stuck or done.is_alive()


def flush() -> None:
    """Of what was printed; by whoever ends the process."""
    within_patience(_flush)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def text(head: str, /, **facts: object) -> str:
    """A line as it is printed, its end included."""
    facts = facts if rank is None else {"rank": rank, **facts}
    words = [f"{key}={_word(value)}" for key, value in facts.items() if value is not None]
    return " ".join([rfc3339(time.time()), head, *words]) + "\n"


def line(head: str, /, **facts: object) -> None:
    # One write per line: threads of ours share stdout, and a line torn in two is read by nobody.
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more; that must not stop a save
        sys.stdout.write(text(head, **facts))
        sys.stdout.flush()


def _word(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "\n=') else text
