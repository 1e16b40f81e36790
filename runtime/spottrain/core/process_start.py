"""Start time of a process, from which start-up time is counted."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_start(pid: int | str = "self") -> float:
    """Returns Unix seconds; the current time if there is no /proc."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, AttributeError, ValueError, IndexError):
        return time.time()
