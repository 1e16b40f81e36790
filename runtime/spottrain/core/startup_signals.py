"""Holds SIGTERM, SIGINT and SIGHUP back while the command starts. Imported and called before anything else.

The command's imports take 0.2 s, or seconds where the container has a tenth of a core. A signal during that
time would end the process or, at PID 1, be discarded by the kernel. A held signal waits until its handler is
installed. Only the interpreter's own start comes earlier. The image's `spottrain` covers that too, because
`env --block-signal` starts its interpreter (Dockerfile).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the built-in part of `signal`: `signal` imports enum

# SIGHUP: the terminal is gone, such as with a lost ssh session. Under `nohup` it is ignored, and stays so.
_IGNORED = _signal.getsignal(_signal.SIGHUP) == _signal.SIG_IGN
SIGNALS = (_signal.SIGTERM, _signal.SIGINT, *(() if _IGNORED else (_signal.SIGHUP,)))


def hold_signals() -> None:
    _signal.pthread_sigmask(_signal.SIG_BLOCK, SIGNALS)


def release_signals() -> None:
    """For commands that a signal ends at once. A held signal arrives here."""
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, SIGNALS)
