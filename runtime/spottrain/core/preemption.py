"""How a run learns that it must end: SIGTERM, SIGINT or the deadline file, whichever comes first.

First thing that `__main__` sets up, before any slow import, so only the standard library is used here.
The handler sets a flag and nothing else. The training loop polls `stopping`; where the main thread cannot
poll (an import, data preparation, a compilation) it declares with `let_end` how another thread may end the
process in its place. The watcher also forces the exit when a save does not finish in time.
"""

from __future__ import annotations

import atexit
import contextlib
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

from spottrain.core import log

POLL_SECONDS: Final = 0.25
"""How often the files are read; a stat and a read of a few bytes."""
FORCED_EXIT_SHARE: Final = 0.9
"""Share of the budget after which the exit is forced, so that our own last words come before SIGKILL."""
LEAST_BUDGET: Final = 2.0
"""Seconds given to a save even when the deadline has passed: SIGKILL comes when it comes."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
NAMES: Final = {signum.name for signum in SIGNALS}


def read_time(file: Path | None) -> float | None:
    """Unix seconds; None while nobody has written it."""
    try:
        text = file.read_text().strip() if file else ""
        return datetime.fromisoformat(text).timestamp() if text else None
    except (OSError, ValueError):
        return None  # absent, or half of a time: the next look is POLL_SECONDS away


def told_to_stop(deadline_file: Path | None) -> bool:
    """Before the handlers are there: a signal is held (`entry`), or the deadline file has a time."""
    return bool(signal.sigpending() & set(SIGNALS)) or read_time(deadline_file) is not None


class Interruption:
    """The flag, the deadline and the watcher thread.

    `grace`: seconds from SIGTERM to SIGKILL. `deadline_file`, `save_advised_file`: downward-API files that
    are absent or empty until somebody writes an RFC 3339 time into them.
    """

    def __init__(
        self, *, grace: float, deadline_file: Path | None = None, save_advised_file: Path | None = None
    ) -> None:
        self.grace = grace
        self.deadline_file = deadline_file
        self.save_advised_file = save_advised_file
        self.advised: float | None = None
        """Time in that file, Unix seconds: of an advice to save (`advice`)."""
        self.signalled_at: float | None = None
        self.deadline = float("inf")
        self.source = ""
        self.forced: Callable[[], None] = lambda: None
        """Called once when the budget is spent; must end the process."""
        self._held = threading.local()
        self._ending: Callable[[], None] | None = None
        self._ending_after = 0.0
        self._turn = threading.Lock()
        self._signal_seen = False
        self.given_back = False
        """Whether signals are the script's own affair again (`give_back`)."""
        self._over = threading.Event()
        """That ends the threads of one installation."""
        self._told: list[str] = []
        self._announced: list[str] = []

    @property
    def stopping(self) -> bool:
        return self.signalled_at is not None

    @property
    def forced_exit_at(self) -> float:
        """Unix seconds; infinite while nobody has asked for an end."""
        if self.signalled_at is None:
            return float("inf")
        return self.signalled_at + FORCED_EXIT_SHARE * max(self.deadline - self.signalled_at, LEAST_BUDGET)

    def seconds_left(self) -> float:
        """Seconds until the forced exit."""
        return self.forced_exit_at - time.time()

    def _share_spent(self) -> float:
        """Of the time from the signal to the forced exit."""
        if self.signalled_at is None:
            return 0.0
        return (time.time() - self.signalled_at) / (self.forced_exit_at - self.signalled_at)

    def install(self) -> None:
        """Handlers, then one look at the file: at PID 1 a SIGTERM that came before `entry` is lost."""
        self._wakeup, signal_end = socket.socketpair()
        self._wakeup.setblocking(False)
        signal_end.setblocking(False)
        self._signal_end = signal_end
        self._before = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        # The wake-up socket tells the watcher even while the main thread is inside a long C call.
        self._wakeup_before = signal.set_wakeup_fd(signal_end.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(
            before=self._hold, after_in_parent=self._release, after_in_child=self._leave_to_parent
        )
        atexit.unregister(self._end_of_interpreter)  # of an installation before this one
        atexit.register(self._end_of_interpreter)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # what `entry` has held arrives here
        self._read_files()
        watch = (self._wakeup, self._over)
        threading.Thread(target=self._watch, args=watch, name="spottrain-interruption", daemon=True).start()

    def give_back(self) -> None:
        """The reverse of `install`, but for handlers that others have put in since. By the main thread.

        A signal that has come and has not ended the process yet is sent again, to whom it now concerns.
        """
        self.let_end(None)
        self.given_back = True
        self._over.set()
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, signal.SIG_DFL if before is None else before)
        wakeup = signal.set_wakeup_fd(-1)
        ours = wakeup == self._signal_end.fileno()
        with contextlib.suppress(OSError, ValueError):  # it may be closed by now
            signal.set_wakeup_fd(self._wakeup_before if ours else wakeup)
        self._signal_end.close()
        if self._signal_seen:
            os.kill(os.getpid(), signal.Signals[self.source] if self.source in NAMES else signal.SIGTERM)

    def take_back(self, end: Callable[[], None]) -> None:
        """Installs it again, if it was given back, as for the first time: a stop makes `end` be called."""
        if self.given_back:
            self.given_back, self._over = False, threading.Event()
            self.install()
            self.let_end(end)

    def _end_of_interpreter(self) -> None:
        """Ignores the signals from here on: the run has ended, and all that is left is to take modules down.

        Python restores their default action there, which kills. With torch that takes seconds, in which a
        SIGTERM would make a finished run look like a lost one.
        """
        if not self.given_back:
            for signum in SIGNALS:
                signal.signal(signum, signal.SIG_IGN)

    def _hold(self) -> None:
        """Before a fork: the child of a Pool that ends at once is told SIGTERM before it has left ours."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._held.__dict__.setdefault("masks", []).append(mask)  # this thread's; a fork may be inside of one

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._held.masks.pop())

    def _leave_to_parent(self) -> None:
        """In a forked child: a signal to it is its own affair, and must not look like one to this process."""
        inherited = signal.set_wakeup_fd(-1)
        if inherited != self._signal_end.fileno():  # somebody else's
            signal.set_wakeup_fd(inherited)
        for signum, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, usual)
        self._release()

    def let_end(self, end: Callable[[], None] | None, *, after: float = 0.0) -> None:
        """From here on a stop makes another thread call `end`, which ends the process (None: nothing).

        `after`: share of the notice that the caller keeps for itself, to come back and end in its own way.
        A caller that comes here while `end` runs waits for ever, that is, until the process is gone.
        """
        with self._turn:
            self._ending, self._ending_after = end, after

    def stop_by(self, deadline: float, source: str) -> None:
        """Another rank was told to stop, so this one must too; Unix seconds."""
        if not self.stopping:
            self._told.append("stop")
        self._note(source or "another rank", min(deadline, time.time() + self.grace))

    def _handle(self, signum: int, _frame: object) -> None:
        self._note_signal(signum)

    def _note_signal(self, signum: int) -> None:
        if self._signal_seen:
            return
        self._signal_seen = True
        self._note(signal.Signals(signum).name, time.time() + self.grace)
        self._told.append("sigterm")

    def _note(self, source: str, deadline: float) -> None:
        self.deadline = min(self.deadline, deadline)
        if self.signalled_at is None:
            self.source = source
            self.signalled_at = time.time()

    def _read_files(self) -> None:
        self.advised = read_time(self.save_advised_file) or self.advised
        deadline = read_time(self.deadline_file)
        if deadline is not None:
            self._note("deadline-file", deadline)
            if "deadline" not in self._told:
                self._told.append("deadline")

    def _watch(self, wakeup: socket.socket, over: threading.Event) -> None:
        with wakeup:
            self._watch_until(wakeup, over)

    def _watch_until(self, wakeup: socket.socket, over: threading.Event) -> None:
        ending = False
        while not over.is_set():
            ready, _, _ = select.select([wakeup], [], [], POLL_SECONDS)
            if over.is_set():
                return
            for signum in wakeup.recv(4096) if ready else b"":
                if signum in SIGNALS:
                    self._note_signal(signum)
            self._read_files()
            if not self.stopping:
                continue
            self._announce()
            if not ending:
                ending = True
                # A thread of its own: `end` may wait for a store that does not answer, the watchdog may not.
                end = self._end_when_endable
                threading.Thread(target=end, args=[over], name="spottrain-end", daemon=True).start()
            if time.time() >= self.forced_exit_at:
                self.forced()

    def _announce(self) -> None:
        """Each way of being told, once: `event=deadline` of the file, `event=sigterm` of the signal."""
        for name in [name for name in self._told if name not in self._announced]:
            self._announced.append(name)
            log.unhindered(
                name,
                source=self.source,
                deadline=log.rfc3339(self.deadline),
                forced_exit=log.rfc3339(self.forced_exit_at),
            )

    def _end_when_endable(self, over: threading.Event) -> None:
        while not over.is_set():
            with self._turn:
                if self._ending is not None and self._share_spent() >= self._ending_after:
                    self._ending()
            time.sleep(0.05)
