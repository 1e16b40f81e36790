"""Sends standard output and error of this machine's ranks through pipes to the log capture process.

That process forwards the output. This module keeps the reading ends of the pipes too, so that another one can
read on if it dies. Standard library only; log capture is a program of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spottrain.contract import Env
from spottrain.core import log
from spottrain.core.run_config import RunConfig
from spottrain.distributed.channel import start_child
from spottrain.errors import ConfigurationError

STDOUT: Final = 1
STDERR: Final = 2
PIPE_BYTES: Final = 1 << 20
"""Capacity of a pipe if the system allows it, so that bursts of output block no writer."""
LAST_SECONDS: Final = 5.0
"""Maximum seconds for the last parts."""
RESTART_SECONDS: Final = 1.0
"""At least between two starts: a process that dies each time must not take the training's cores."""
SPARE_SECONDS: Final = 1.0
"""Seconds of the notice period left after the last parts."""
DRAIN_SECONDS: Final = 0.5
"""Seconds for what is in the pipes, even if no time is left."""
MARK: Final[dict[str, str]] = {Env.LOGS: "off"}
"""Environment variables for the ranks: their output is captured already."""


class CapturedOutputs:
    """Captures the ranks' output. `where`: arguments of `open_store`. `attempt`: None without a number."""

    def __init__(self, ranks: Sequence[int], where: Mapping[str, Any], attempt: int | None) -> None:
        """Raises OSError if there is no output, or a pipe or process cannot be created."""
        self._usual = (_copy(STDOUT), _copy(STDERR))
        self._streams: list[tuple[int, int, int]] = []
        """Rank, reading end of the pipe, and standard output or error."""
        # A single pipe for both outputs if they have one destination, to keep their order.
        targets = (STDOUT,) if os.path.sameopenfile(STDOUT, STDERR) else (STDOUT, STDERR)
        self._ends = [[self._pipe(rank, target) for target in targets] for rank in ranks]
        """Writing ends of each rank's pipes."""
        self._plan = json.dumps({"streams": self._streams, "store": where, "attempt": attempt}).encode()
        self._owner = os.getpid()
        self._turn = threading.Lock()
        self._finished = False
        self._start()

    def _pipe(self, rank: int, target: int) -> int:
        source, end = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # a smaller pipe is enough
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._streams.append((rank, source, target))
        return end

    def _start(self) -> None:
        self._started = time.monotonic()
        self._process, self._link = start_child(
            "spottrain.lifecycle.log_capture.relay",
            pass_fds=[source for _, source, _ in self._streams],
            stdout=self._usual[0],
            stderr=self._usual[1],
        )
        with contextlib.suppress(OSError):  # it has died already: whoever reaps it calls `died`
            self._link.send("plan", self._plan)

    def redirect(self, number: int = 0) -> None:
        """Sends the output of this process and its children to the `number`th rank's pipes."""
        _flush()
        os.dup2(self._ends[number][0], STDOUT)
        os.dup2(self._ends[number][-1], STDERR)

    def leave_to_parent(self) -> None:
        """Closes everything in a forked child except its own output."""
        self._process.returncode = 0  # else it is reported as a forgotten child
        self._link.socket.close()
        self._close_ends()
        for fd in (*(source for _, source, _ in self._streams), *self._usual):
            os.close(fd)

    def _close_ends(self) -> None:
        for ends in self._ends:
            for end in ends:
                os.close(end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self) -> None:
        """Takes note of the log capture process's death in a thread, if nothing else waits for children."""

        def watch() -> None:
            while not self._finished:
                self._process.wait()
                self._start_again()

        threading.Thread(target=watch, name="spottrain-log-capture", daemon=True).start()

    def died(self) -> None:
        """Starts log capture again, in a thread, after its process has ended and was reaped."""
        threading.Thread(target=self._start_again, name="spottrain-log-capture", daemon=True).start()

    def _start_again(self) -> None:
        """Returns once another process was started, or nothing more is to be kept.

        Until then the training waits where the pipes are full, so a start that fails is tried again.
        """
        while True:
            time.sleep(max(0.0, self._started + RESTART_SECONDS - time.monotonic()))
            with self._turn:
                if self._finished:
                    return
                self._process.poll()
                self._link.socket.close()
                try:
                    self._start()
                    break
                except OSError:  # such as too little memory
                    continue
        why = "the process that keeps them has died, with what it had not stored"
        log.unhindered("logs-not-kept", why=why, next="another one keeps them from here on")

    def finish(self, seconds: float) -> None:
        """Forwards and stores the remaining output within `seconds`. Later output is not stored."""
        if os.getpid() != self._owner:
            return  # a child of this process, which has only inherited the object
        with self._turn:  # a second thread that leaves must wait for the first
            if self._finished:
                return
            self._finished = True
            _flush()
            for usual, fd in zip(self._usual, (STDOUT, STDERR), strict=True):
                os.dup2(usual, fd)
            self._close_ends()
            seconds = max(0.0, min(seconds, LAST_SECONDS))
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._link.send("finish", json.dumps(seconds).encode())
                self._process.wait(max(seconds, DRAIN_SECONDS))


def capture(
    env: Mapping[str, str], ranks: Sequence[int], script: str, *, parent: bool
) -> CapturedOutputs | None:
    """Starts log capture. Returns None if it is disabled or impossible; `prepare` reports a bad environment.

    `parent`: whether this is the parent of the ranks, not a rank itself. With PID 1 all processes of a
    container end at once: a rank that crashed there would lose what is not forwarded yet.
    """
    try:
        run = RunConfig.from_env(env, script=script)
    except ConfigurationError:
        return None
    if not run.logs:
        return None
    if not parent and os.getpid() == 1:
        why = "this process is PID 1 of its container, where a crash would lose the last lines"
        log.event("logs-not-kept", why=why, remedy="start the script by spottrain run")
        return None
    try:
        return CapturedOutputs(ranks, run.where, run.attempt)
    except OSError as error:
        log.event("logs-not-kept", why=str(error))
        return None


def seconds_for_logs(deadline: float) -> float:
    """Returns the seconds for the last parts of a process that must end by `deadline` (Unix seconds)."""
    return min(LAST_SECONDS, deadline - SPARE_SECONDS - time.time())


def _copy(fd: int) -> int:
    """Duplicates a descriptor to 10 or above, not inherited by started programs."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
