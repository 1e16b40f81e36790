"""Handles stop signals during a long operation, such as a download, in scripts not started by our launcher.

Under `python train.py`, torchrun or Lightning, SIGTERM is the script's responsibility. During a download of
minutes there is nothing to save yet, and at PID 1 a signal without a handler is discarded. So in a pod, if
the script has no handler, a stop ends the process during the operation, as it ends all data preparation.
Afterwards the previous handlers are restored, until a Trainer or a Run takes the signals permanently.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Final

from spottrain.contract import Env, Outcome
from spottrain.errors import RunError
from spottrain.lifecycle.endings import Ending
from spottrain.lifecycle.session import Session, current, existing, install_exit_hooks

DOWNLOADING: Final = Ending(Outcome.INTERRUPTED, "Interrupted while data were downloaded (spottrain.cached).")


@contextlib.contextmanager
def interruptible() -> Iterator[Session | None]:
    """Yields the session of this process, if it has one or a stop may end it during the block."""
    known = existing()
    if (known is not None and not known.preemption.given_back) or not _nobody_hears_signals():
        yield known
        return
    # With a checkpoint URI the operator expects a trainer that responds, however long a download takes.
    managed = Env.CHECKPOINT_URI in os.environ
    session = None if managed else Session(os.environ)
    try:
        session = session or current()
        session.unsaved = DOWNLOADING
        yield session
    except RunError:
        if session is not None and not managed:
            install_exit_hooks(session)  # writes the termination message if the error is not caught
        raise
    finally:
        if made := session or existing():  # also if the environment was invalid
            made.preemption.give_back()
            made.unsaved = None


def _nobody_hears_signals() -> bool:
    """Whether this is a script's main process in a pod, without a SIGTERM handler of its own."""
    if Env.JOB_UID not in os.environ or multiprocessing.parent_process() is not None:
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    held = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not held
