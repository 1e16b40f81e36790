"""The user's command as a child process. It and what it starts get the signals, and end before the last look.

A command is often a shell, and the program that writes the folder is its child. So signals go to the process
group, and the command has ended when the group is empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from spottrain.contract import Reason
from spottrain.core.startup_signals import release_signals
from spottrain.errors import ConfigurationError

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
POLL_SECONDS: Final = 0.05
KILLED_SECONDS: Final = 5.0
"""For the kernel, to end killed processes. One that waits for a dead disk cannot end."""


class ChildCommand:
    """A running command, in a process group of its own: Ctrl-C in a terminal reaches it once, through us."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        """Raises ConfigurationError if it cannot be started."""
        self._signalled = False
        if sys.platform == "linux":  # what a dead shell leaves behind becomes our child, and `_reap` finds it
            _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._process = subprocess.Popen(
                words,
                env=dict(env),
                process_group=0,
                stdin=subprocess.DEVNULL if os.isatty(0) else None,
                preexec_fn=_prepare,
            )
        except OSError as error:
            raise ConfigurationError(
                f"the command {words[0]} cannot be started: {error.strerror}; give a program that exists",
                reason=Reason.SCRIPT_NOT_FOUND,
            ) from error

    @property
    def code(self) -> int | None:
        """The command's own exit code, 128 and more for a signal as in a shell; None while it runs."""
        found = self._process.poll()
        return found if found is None or found >= 0 else 128 - found

    @property
    def running(self) -> bool:
        """Whether the command or a process of its group runs."""
        if self._process.poll() is None:
            return True
        self._reap()
        return self._send(0)

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def stop(self, signum: signal.Signals) -> None:
        """Sends the signal to the group, the first time that it is called."""
        if not self._signalled:
            self._signalled = True
            self._send(signum)

    def end(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Ends the group: by SIGTERM, unless it got a signal before, and after `seconds` by SIGKILL.

        `meanwhile` is called again and again until it is empty.
        """
        self.stop(signal.SIGTERM)
        self._until_empty(seconds, meanwhile)
        self.kill()
        self._until_empty(KILLED_SECONDS, lambda: None)

    def kill(self) -> None:
        """Sends SIGKILL to the group, and does not wait."""
        self._send(signal.SIGKILL)

    def _until_empty(self, seconds: float, meanwhile: Callable[[], None]) -> None:
        until = time.monotonic() + seconds
        while self.running and time.monotonic() < until:
            meanwhile()
            time.sleep(POLL_SECONDS)

    def _send(self, signum: int) -> bool:
        """Returns whether there is a process to send it to. macOS refuses where all have ended."""
        try:
            os.killpg(self._process.pid, signum)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _reap(self) -> None:
        """Takes notice of ended processes of the group: until then they count as running."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self._process.pid, os.WNOHANG)[0]:
                pass


def _prepare() -> None:
    release_signals()
    if sys.platform == "linux":  # elsewhere a killed `spottrain sync` leaves the command behind
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


_LIBC: Final = ctypes.CDLL(None)
