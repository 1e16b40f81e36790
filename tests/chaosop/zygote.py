"""The operator as a child process with a clock that jumps, without paying seconds of imports for each start.

Run as a program it imports the operator once, forks a child for each line on standard input, and prints its
pid. The child is `python -m spottrain_operator` in all but two things: its modules are loaded, and the
service's `now` is the real time plus what the file in CHAOSOP_CLOCK says. Started by process.py.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NoReturn

import kopf
from spottrain_operator.control.handlers import registry
from spottrain_operator.control.service import Service
from spottrain_operator.io import logs
from spottrain_operator.settings import Settings

CLOCK: Final = "CHAOSOP_CLOCK"
"""A file of 8 bytes: seconds by which the operator's clock is ahead, as a C double."""
LOG: Final = "CHAOSOP_LOG"
PR_SET_PDEATHSIG: Final = 1


def jumping_clock(path: Path) -> Callable[[], datetime]:
    with path.open("rb") as file:
        ahead = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)

    def now() -> datetime:
        return datetime.now(UTC) + timedelta(seconds=struct.unpack("d", ahead[:])[0])

    return now


def set_clock(path: Path, ahead: float) -> None:
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.write(struct.pack("d", ahead))


async def operate() -> None:
    settings = Settings.from_env()
    service = Service(settings, now=jumping_clock(Path(os.environ[CLOCK])))
    await kopf.operator(
        registry=registry(service),
        clusterwide=not settings.namespaces,
        namespaces=list(settings.namespaces),
        standalone=True,
    )


def child() -> NoReturn:
    """As __main__.py has it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(0)
    logs.set_up(os.environ["SPOTTRAIN_OPERATOR_LOG_LEVEL"])
    code = 1
    try:
        asyncio.run(operate())
        code = 0
    except BaseException:
        logging.exception("the operator has ended")
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    gc.freeze()
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child()
        print(pid, flush=True)


if __name__ == "__main__":
    main()
