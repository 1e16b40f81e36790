"""Signals for as long as something is done for a script that nobody of ours has launched, and no longer.

`python train.py`, torchrun or Lightning: there SIGTERM is the script's affair. But while it downloads for
minutes it has nothing to save yet, and at PID 1 a signal without a handler is thrown away: so in a pod, where
the script has made no arrangement of its own, a stop ends it meanwhile as it ends all data preparation.
Afterwards everything is as it was, until a Trainer or a Run takes the signals for good.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import NoReturn

from spottrain.contract import Env, Outcome
from spottrain.errors import RunError
from spottrain.lifecycle.session import Session, current, existing, see_out


@contextlib.contextmanager
def interruptible() -> Iterator[Session | None]:
    """The session of this process, where it has one or a stop is to end it meanwhile."""
    known = existing()
    if (known is not None and not known.interruption.given_back) or not _nobody_hears_signals():
        yield known
        return
    # With a checkpoint URI the operator expects a trainer that answers it, however long a download takes.
    managed = Env.CHECKPOINT_URI in os.environ
    session = None if managed else Session(os.environ)
    try:
        session = session or current()
        session.interruption.let_end(partial(_end, session))
        yield session
    except RunError:
        if session is not None and not managed:
            see_out(session)  # the last words, if nobody catches it
        raise
    finally:
        if made := session or existing():  # also where the environment was bad
            made.interruption.give_back()


def _end(session: Session) -> NoReturn:
    session.end_now(Outcome.INTERRUPTED, "Interrupted while data were downloaded (spottrain.cached).")


def _nobody_hears_signals() -> bool:
    """In a pod, in the process that the script is, and where it has not arranged for SIGTERM itself."""
    if Env.JOB_UID not in os.environ or multiprocessing.parent_process() is not None:
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    held = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not held
