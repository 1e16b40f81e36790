"""Standard output and error of this machine's ranks go through pipes to the scribe, which passes them on.

Used by `launcher`, the parent of all ranks, and by `session` where there is no launcher of ours. The pipes'
reading ends are kept here too: a scribe that dies is replaced, and what the ranks wrote meanwhile is read by
the next one. Standard library only; the scribe is a program of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spottrain.contract import Env
from spottrain.core import log
from spottrain.core.child_process import import_path
from spottrain.core.preemption import SIGNALS
from spottrain.core.run_config import RunConfig
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.log_capture.relay import Relay, Stream

STDOUT: Final = 1
STDERR: Final = 2
PIPE_BYTES: Final = 1 << 20
"""What a pipe holds where the system allows it: an output that comes in bursts stops nobody."""
LAST_SECONDS: Final = 5.0
"""For the last parts, at most."""
SPARE_SECONDS: Final = 1.0
"""Of a notice, that the last parts leave."""
DRAIN_SECONDS: Final = 0.5
"""For what is in the pipes, even where no time is left."""
TRIES: Final = 3
"""Scribes; if all of them die, a thread of this process passes the output on."""
MARK: Final[dict[str, str]] = {Env.LOGS: "off"}
"""Environment of ranks: their output is kept already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pipes:
    """Ends to write into, of one rank; the same one where both outputs went to the same place."""

    out: int
    err: int


class Outputs:
    """`where`: arguments of `open_store`. `attempt`: None where nobody has numbered it."""

    def __init__(self, ranks: Sequence[int], where: Mapping[str, Any], attempt: int | None) -> None:
        """Raises OSError where there is no output, no pipe or no process to be had."""
        self._where = where
        self._attempt = attempt
        self._usual = (_copy(STDOUT), _copy(STDERR))
        self._streams: list[tuple[int, int, int]] = []
        self._pipes = [self._make(rank) for rank in ranks]
        self._owner = os.getpid()
        self._finishing = threading.Lock()
        self._finished = False
        self._deaths = 0
        self._relay: Relay | None = None
        """In place of a scribe, where none lives."""
        self._start()

    def take_over(self) -> None:
        """This process's own output becomes the first rank's, and its children's."""
        self.give(0)

    def give(self, number: int) -> None:
        """The same with the `number`th rank; in the process that becomes it."""
        _flush()
        os.dup2(self._pipes[number].out, STDOUT)
        os.dup2(self._pipes[number].err, STDERR)

    def leave_to_parent(self) -> None:
        """In a forked child: nothing of it is this process's but its own output."""
        self._process.returncode = 0  # else it is taken for one that was forgotten
        self._sock.close()
        for fd in self._fds():
            os.close(fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self) -> None:
        """Looks after the scribe in a thread, where nobody else waits for children."""
        threading.Thread(target=self._watch, name="spottrain-scribe", daemon=True).start()

    def _watch(self) -> None:
        while self._relay is None:
            self._process.wait()
            if self._finished:
                return
            self.died()

    def died(self) -> None:
        """The scribe has ended and was waited for: another one takes its place."""
        self._deaths += 1
        self._process.poll()
        self._sock.close()
        try:
            if self._deaths >= TRIES:
                raise OSError("too many have died")
            self._start()
            log.event("scribe-died", deaths=self._deaths, next="another one is started")
        except OSError as error:
            self._pass_on_here()
            log.event("logs-not-kept", why=str(error), next="the output is passed on, and no more stored")

    def _pass_on_here(self) -> None:
        streams = [
            Stream(rank=rank, source=source, target=self._usual[target - 1])
            for rank, source, target in self._streams
        ]
        self._relay = Relay(streams, lambda rank, data: None)
        threading.Thread(target=self._relay.run, name="spottrain-relay", daemon=True).start()

    def finish(self, seconds: float) -> None:
        """Returns when all is passed on and stored, or when time is over. From then on nothing is kept."""
        if os.getpid() != self._owner:
            return  # of a child of this process, which has only inherited it
        with self._finishing:  # a second thread that wants to leave has to wait for the first
            if not self._finished:
                self._finished = True
                self._give_back()
                self._finish(max(0.0, min(seconds, LAST_SECONDS)))

    def _give_back(self) -> None:
        _flush()
        for usual, fd in zip(self._usual, (STDOUT, STDERR), strict=True):
            os.dup2(usual, fd)
        for end in {end for pipes in self._pipes for end in (pipes.out, pipes.err)}:
            os.close(end)

    def _finish(self, seconds: float) -> None:
        if self._relay is not None:
            self._relay.finish()
            self._relay.done.wait(DRAIN_SECONDS)
            return
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # it has died
            self._say({"finish": seconds})
            select.select([self._sock], [], [], DRAIN_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))

    # --- inside -------------------------------------------------------------------------------------
    def _make(self, rank: int) -> _Pipes:
        """Standard output and error share a pipe where they went to one place: so their order is kept."""
        ends = [self._pipe(rank, STDOUT)]
        if not os.path.sameopenfile(STDOUT, STDERR):
            ends.append(self._pipe(rank, STDERR))
        return _Pipes(out=ends[0], err=ends[-1])

    def _pipe(self, rank: int, target: int) -> int:
        source, end = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # a smaller one does
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._streams.append((rank, source, target))
        return end

    def _start(self) -> None:
        self._sock, theirs = socket.socketpair()
        # Held over the start, so that a stop cannot end the new process before it ignores it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "spottrain.lifecycle.log_capture", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *(source for _, source, _ in self._streams)],
                stdin=subprocess.DEVNULL,
                stdout=self._usual[0],
                stderr=self._usual[1],
                env=os.environ | {"PYTHONPATH": import_path()},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._say({"streams": self._streams, "store": self._where, "attempt": self._attempt})

    def _say(self, message: Mapping[str, Any]) -> None:
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def _fds(self) -> set[int]:
        ends = {fd for pipes in self._pipes for fd in (pipes.out, pipes.err)}
        return ends | {source for _, source, _ in self._streams} | set(self._usual)


def keep(env: Mapping[str, str], ranks: Sequence[int], script: str, *, parent: bool) -> Outputs | None:
    """None where it is not wanted, or cannot be: what is bad about the environment is told by `prepare`.

    `parent`: of the ranks, not a rank itself. With PID 1 all processes of a container end at once: a rank
    that crashed there would take along what the scribe has not passed on yet.
    """
    try:
        run = RunConfig.from_env(env, script=script)
    except ConfigurationError:
        return None
    if not run.logs:
        return None
    if not parent and os.getpid() == 1:
        why = "this is PID 1 of its container, and a crash would lose its last lines to everybody"
        log.event("logs-not-kept", why=why, remedy="start the script by spottrain run")
        return None
    try:
        return Outputs(ranks, run.where, run.attempt)
    except OSError as error:
        log.event("logs-not-kept", why=str(error))
        return None


def seconds_for_logs(deadline: float) -> float:
    """Seconds for the last parts of a process that must be gone by `deadline` (Unix seconds)."""
    return min(LAST_SECONDS, deadline - SPARE_SECONDS - time.time())


def _copy(fd: int) -> int:
    """Out of the way of the first ten, and not for programs that are started."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
