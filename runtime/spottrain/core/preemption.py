"""Detects that a run must end: SIGTERM, SIGINT, SIGHUP or the deadline file, whichever comes first.

It is set up before any slow import, so only the standard library is used here. The signal handler only sets
a flag. The training loop polls `stopping`. Where the main thread cannot poll (an import, data preparation, a
compilation), another thread ends the process, by `on_stop`. The watcher thread also forces the exit when a
save does not finish in time.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final

from spottrain.core import log, startup_signals
from spottrain.errors import ConfigurationError

POLL_SECONDS: Final = 0.25
"""How often the files are read; each read is a stat and a few bytes."""
FORCED_EXIT_SHARE: Final = 0.9
"""Share of the budget after which the exit is forced, so that the termination message precedes SIGKILL."""
MIN_BUDGET: Final = 2.0
"""Minimum seconds for a save, even if the deadline has passed: the time of SIGKILL is not known exactly."""
SIGNALS: Final = tuple(map(signal.Signals, startup_signals.SIGNALS))


def read_time(file: Path | None) -> float | None:
    """Returns the RFC 3339 time in the file as Unix seconds; None if the file is absent or empty."""
    try:
        text = file.read_text().strip() if file else ""
        return datetime.fromisoformat(text).timestamp() if text else None
    except (OSError, ValueError):
        return None  # absent, or half written: the next read is POLL_SECONDS away


def told_to_stop(deadline_file: Path | None) -> bool:
    """Whether a stop is pending before `install`: a held signal (`startup_signals`), or a deadline file."""
    return bool(signal.sigpending() & set(SIGNALS)) or read_time(deadline_file) is not None


class Preemption:
    """Stop flag, deadline and watcher thread.

    `grace`: seconds from SIGTERM to SIGKILL. `deadline_file`, `save_advised_file`: downward-API files, absent
    or empty until an RFC 3339 time is written to them. `stale_after`: so many seconds after it a deadline is
    void, unless a signal has come: the node was not taken away.
    """

    def __init__(
        self,
        *,
        grace: float,
        deadline_file: Path | None = None,
        save_advised_file: Path | None = None,
        stale_after: float = float("inf"),
    ) -> None:
        self.grace = grace
        self._stale_after = stale_after
        self.deadline_file = deadline_file
        self.save_advised_file = save_advised_file
        self.advised: float | None = None
        """Unix seconds in `save_advised_file`: time of the last advice to save."""
        self.signalled_at: float | None = None
        self.deadline = float("inf")
        self.source = ""
        self.on_stop: Callable[[bool], None] = lambda time_up: None
        """Called with False, again and again from a stop on, by a thread that holds `turn`.

        Another thread calls it with True when the budget is spent; then it must end the process."""
        self.turn = threading.RLock()
        """Whoever holds it is not ended by `on_stop(False)`, and waits for one that is ending the process."""
        self._held = threading.local()
        self.signal_arrived = False
        """Whether a signal is among the requests to stop."""
        self._told: dict[str, bool] = {}
        """Kinds of requests to stop, and whether the log has each."""

    @property
    def stopping(self) -> bool:
        return self.signalled_at is not None and not self._void

    @property
    def _void(self) -> bool:
        """Whether the deadline has passed so long ago that it does not count any more."""
        return not self.signal_arrived and time.time() > self.deadline + self._stale_after

    @property
    def forced_exit_at(self) -> float:
        """Unix seconds; infinite until a stop is requested."""
        if self.signalled_at is None:
            return float("inf")
        return self.signalled_at + FORCED_EXIT_SHARE * max(self.deadline - self.signalled_at, MIN_BUDGET)

    def seconds_left(self) -> float:
        """Seconds until the forced exit."""
        return self.forced_exit_at - time.time()

    def share_spent(self) -> float:
        """Share of the time from the signal to the forced exit that has passed."""
        if self.signalled_at is None:
            return 0.0
        return (time.time() - self.signalled_at) / (self.forced_exit_at - self.signalled_at)

    def install(self) -> None:
        """Installs the signal handlers and starts the watcher thread.

        A script's own use of SIGHUP, such as to read its settings again, stays. Raises ConfigurationError
        outside of the main thread.
        It also reads the deadline file: the kernel drops a SIGTERM that PID 1 gets before `hold_signals`.
        """
        if (here := threading.current_thread()) is not threading.main_thread():
            raise ConfigurationError(
                f"spottrain is first used in the thread {here.name}, but Python lets only the main thread "
                "handle SIGTERM: make the Trainer, Run or callback in the main thread, or start the script "
                "with spottrain run"
            )
        self._wakeup, signal_end = socket.socketpair()
        self._wakeup.setblocking(False)
        signal_end.setblocking(False)
        self._signal_end = signal_end
        own = signal.getsignal(signal.SIGHUP) not in (signal.SIG_DFL, self._note_signal)
        self._taken = [signum for signum in SIGNALS if not (own and signum == signal.SIGHUP)]
        for signum in self._taken:
            signal.signal(signum, self._note_signal)
        # The wake-up socket wakes the watcher even while the main thread is inside a long C call.
        signal.set_wakeup_fd(signal_end.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(
            before=self._hold, after_in_parent=self._release, after_in_child=self._leave_to_parent
        )
        atexit.register(self._end_of_interpreter)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # signals held since the start arrive here
        self._read_files()
        threading.Thread(target=self._watch, name="spottrain-interruption", daemon=True).start()

    def _end_of_interpreter(self) -> None:
        """Ignores the signals from here on: the run is over, only the interpreter's shutdown is left.

        Python would restore their default action, which kills. With torch the shutdown takes seconds, and a
        SIGTERM in that time would make a finished run look like a lost one.
        """
        for signum in self._taken:
            signal.signal(signum, signal.SIG_IGN)

    def _hold(self) -> None:
        """Before a fork: a Pool may SIGTERM its child before the child has left our handlers."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._held.__dict__.setdefault("masks", []).append(mask)  # per thread; forks may nest

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._held.masks.pop())

    def _leave_to_parent(self) -> None:
        """In a forked child: a signal to the child must not count as one to the parent process."""
        inherited = signal.set_wakeup_fd(-1)
        if inherited != self._signal_end.fileno():  # set by other code
            signal.set_wakeup_fd(inherited)
        for signum in self._taken:
            if signal.getsignal(signum) == self._note_signal:
                interrupts = signum == signal.SIGINT
                signal.signal(signum, signal.default_int_handler if interrupts else signal.SIG_DFL)
        self._release()

    def stop_by(self, deadline: float, source: str) -> None:
        """Records a stop request that came without a signal, from another rank or the operator.

        `deadline`: Unix seconds; limited by the grace period. `source`: who asked, for the log.
        """
        if not self.stopping:
            self._told.setdefault("stop", False)
        self._note(source or "another rank", min(deadline, time.time() + self.grace))

    def _is_stop(self, signum: int) -> bool:
        """Whether the signal, which has a handler, is a request to stop. A script may use SIGHUP itself."""
        own = signum == signal.SIGHUP and signal.getsignal(signum) != self._note_signal
        return signum in SIGNALS and not own

    def _note_signal(self, signum: int, _frame: object = None) -> None:
        """Records a stop by a signal."""
        if self.signal_arrived:
            return
        self._note(signal.Signals(signum).name, time.time() + self.grace)
        self.signal_arrived = True
        self._told.setdefault("sigterm", False)

    def _note(self, source: str, deadline: float) -> None:
        if self.signalled_at is None or self._void:
            self.source, self.signalled_at, self.deadline = source, time.time(), deadline
        else:
            self.deadline = min(self.deadline, deadline)

    def _read_files(self) -> None:
        self.advised = read_time(self.save_advised_file) or self.advised
        deadline = read_time(self.deadline_file)
        if deadline is not None and time.time() <= deadline + self._stale_after:
            self._note("deadline-file", deadline)
            self._told.setdefault("deadline", False)

    def _watch(self) -> None:
        ending = False
        while True:
            ready, _, _ = select.select([self._wakeup], [], [], POLL_SECONDS)
            for signum in self._wakeup.recv(4096) if ready else b"":
                if self._is_stop(signum):
                    self._note_signal(signum)
            self._read_files()
            if not self.stopping:
                continue
            self._announce()
            if not ending:
                ending = True
                # Another thread: it may wait for an unreachable store, the watchdog must not.
                threading.Thread(target=self._ask_to_end, name="spottrain-end", daemon=True).start()
            if time.time() >= self.forced_exit_at:
                self.on_stop(True)

    def _announce(self) -> None:
        """Logs each kind of request once: `event=deadline` for the file, `event=sigterm` for the signal."""
        for name in [name for name, announced in list(self._told.items()) if not announced]:
            self._told[name] = True
            log.unhindered(
                name,
                source=self.source,
                deadline=log.rfc3339(self.deadline),
                forced_exit=log.rfc3339(self.forced_exit_at),
            )

    def _ask_to_end(self) -> None:
        while True:
            with self.turn:
                self.on_stop(False)
            time.sleep(0.05)
