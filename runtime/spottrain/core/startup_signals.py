"""Holds SIGTERM and SIGINT back while the command starts: imported, and called, before anything else.

What the command needs takes 0.2 s to import, and seconds where the container has a tenth of a core. A signal
that comes meanwhile would end the process, or, at PID 1, be thrown away by the kernel. A held one waits until
its handler is there. Only the interpreter's own start comes before this; the image's `spottrain` covers that
too, because `env --block-signal` starts its interpreter (Dockerfile).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the built-in part of `signal`, which imports enum

SIGNALS = (_signal.SIGTERM, _signal.SIGINT)


def hold_signals() -> None:
    _signal.pthread_sigmask(_signal.SIG_BLOCK, SIGNALS)


def release_signals() -> None:
    """For commands that a signal ends at once. One that came meanwhile arrives here."""
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, SIGNALS)
