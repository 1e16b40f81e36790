"""The user's command as a child process: it gets the signals, and does not outlive `spottrain sync`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from spottrain.contract import Reason
from spottrain.core.startup_signals import release_signals
from spottrain.errors import ConfigurationError

PR_SET_PDEATHSIG: Final = 1


class Command:
    """A running command, in a process group of its own: Ctrl-C in a terminal reaches it once, through us."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        """Raises ConfigurationError if it cannot be started."""
        self._signalled = False
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
        """The exit code, 128 and more for a signal as in a shell; None while it runs."""
        found = self._process.poll()
        return found if found is None or found >= 0 else 128 - found

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def stop(self, signum: signal.Signals) -> None:
        """Sends the signal, the first time that it is called."""
        if not self._signalled:
            self._signalled = True
            self._process.send_signal(signum)

    def kill(self) -> None:
        """Kills the command and the processes that it has started in its group."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _prepare() -> None:
    release_signals()
    if sys.platform == "linux":  # elsewhere a killed `spottrain sync` leaves the command behind
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


_LIBC: Final = ctypes.CDLL(None)
