"""Sends standard output and error of this machine's ranks through pipes to the log capture process.

That process forwards the output. This module also keeps the reading ends of the pipes: if the log capture
process dies, threads forward what the ranks wrote meanwhile, and no copy is stored any more. Standard library
only; log capture is a program of its own.
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
SPARE_SECONDS: Final = 1.0
"""Seconds of the notice period left after the last parts."""
DRAIN_SECONDS: Final = 0.5
"""Seconds for what is in the pipes, even if no time is left."""
READ_BYTES: Final = 1 << 16
MARK: Final[dict[str, str]] = {Env.LOGS: "off"}
"""Environment variables for the ranks: their output is captured already."""


class CapturedOutputs:
    """Captures the ranks' output. `where`: arguments of `open_store`. `attempt`: None without a number."""

    def __init__(self, ranks: Sequence[int], where: Mapping[str, Any], attempt: int | None) -> None:
        """Raises OSError if there is no output, or a pipe or process cannot be created."""
        self._usual = (_copy(STDOUT), _copy(STDERR))
        self._streams: list[tuple[int, int, int]] = []
        """Rank, reading end of the pipe, and standard output or error."""
        self._ends = [self._make_pipes(rank) for rank in ranks]
        """Writing ends of each rank's pipes, for both outputs."""
        self._owner = os.getpid()
        self._finishing = threading.Lock()
        self._finished = False
        self._forwarders: list[threading.Thread] = []
        """Replace the log capture process if it has died."""
        self._process, self._link = start_child(
            "spottrain.lifecycle.log_capture.relay",
            pass_fds=[source for _, source, _ in self._streams],
            stdout=self._usual[0],
            stderr=self._usual[1],
        )
        plan = {"streams": self._streams, "store": where, "attempt": attempt}
        self._link.send("plan", json.dumps(plan).encode())

    def redirect(self, number: int = 0) -> None:
        """Sends the output of this process and its children to the `number`th rank's pipes."""
        _flush()
        for end, fd in zip(self._ends[number], (STDOUT, STDERR), strict=True):
            os.dup2(end, fd)

    def leave_to_parent(self) -> None:
        """Closes everything in a forked child except its own output."""
        self._process.returncode = 0  # else it is reported as a forgotten child
        self._link.socket.close()
        self._close_ends()
        for fd in (*(source for _, source, _ in self._streams), *self._usual):
            os.close(fd)

    def _close_ends(self) -> None:
        for end in {end for ends in self._ends for end in ends}:
            os.close(end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self) -> None:
        """Takes note of the log capture process's death in a thread, if nothing else waits for children."""
        threading.Thread(target=self._watch, name="spottrain-log-capture", daemon=True).start()

    def _watch(self) -> None:
        self._process.wait()
        if not self._finished:
            self.died()

    def died(self) -> None:
        """Forwards the output here after the log capture process has ended and was reaped."""
        self._process.poll()
        self._link.socket.close()
        for _, source, target in self._streams:
            thread = threading.Thread(target=_forward, args=[source, self._usual[target - 1]], daemon=True)
            thread.start()
            self._forwarders.append(thread)
        why = "the process that keeps them has died"
        log.event("logs-not-kept", why=why, next="the output is forwarded, but no longer stored")

    def finish(self, seconds: float) -> None:
        """Forwards and stores the remaining output within `seconds`. Later output is not stored."""
        if os.getpid() != self._owner:
            return  # a child of this process, which has only inherited the object
        with self._finishing:  # a second thread that leaves must wait for the first
            if not self._finished:
                self._finished = True
                self._give_back()
                self._finish(max(0.0, min(seconds, LAST_SECONDS)))

    def _give_back(self) -> None:
        _flush()
        for usual, fd in zip(self._usual, (STDOUT, STDERR), strict=True):
            os.dup2(usual, fd)
        self._close_ends()

    def _finish(self, seconds: float) -> None:
        for thread in self._forwarders:
            thread.join(DRAIN_SECONDS)
        if self._forwarders:
            return
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # the process has died
            self._link.send("finish", json.dumps(seconds).encode())
            self._link.receive(DRAIN_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))

    # --- inside -------------------------------------------------------------------------------------
    def _make_pipes(self, rank: int) -> tuple[int, int]:
        """Creates one rank's pipes: a single one if both outputs had one destination, to keep their order."""
        out = self._pipe(rank, STDOUT)
        return out, out if os.path.sameopenfile(STDOUT, STDERR) else self._pipe(rank, STDERR)

    def _pipe(self, rank: int, target: int) -> int:
        source, end = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # a smaller pipe is enough
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._streams.append((rank, source, target))
        return end


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


def _forward(source: int, target: int) -> None:
    while data := os.read(source, READ_BYTES):
        with contextlib.suppress(OSError):  # the output is closed; the writers must not wait
            while data:
                data = data[os.write(target, data) :]


def _copy(fd: int) -> int:
    """Duplicates a descriptor to 10 or above, not inherited by started programs."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
