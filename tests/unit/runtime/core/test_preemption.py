"""When a request to stop counts, by the deadline file, the operator and signals; with a clock of the test."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from spottrain.core.preemption import Preemption
from spottrain.errors import ConfigurationError

GRACE = 30.0


class Clock:
    now = 1_800_000_000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", lambda: clock.now)
    return clock


def preemption(clock: Clock, tmp_path: Path) -> Preemption:
    """Has a deadline in 100 s; void 60 s after it."""
    file = tmp_path / "deadline"
    file.write_text(datetime.fromtimestamp(clock.now + 100, UTC).isoformat())
    found = Preemption(grace=GRACE, deadline_file=file, stale_after=60.0)
    found._read_files()
    assert found.stopping and found.source == "deadline-file"
    return found


def test_a_deadline_that_took_nothing_away_is_void_and_a_signal_then_has_all_of_its_grace(
    clock: Clock, tmp_path: Path
) -> None:
    found = preemption(clock, tmp_path)
    clock.now += 161
    found._read_files()
    assert not found.stopping
    found._note_signal(signal.SIGTERM)
    found._read_files()
    assert found.stopping and found.source == "SIGTERM" and found.signalled_at == clock.now
    assert found.deadline == clock.now + GRACE
    clock.now += 1000
    assert found.stopping, "a signal is never void"


def test_a_signal_soon_after_a_deadline_adds_no_time(clock: Clock, tmp_path: Path) -> None:
    found = preemption(clock, tmp_path)
    before = found.deadline
    clock.now += 150
    found._note_signal(signal.SIGTERM)
    clock.now += 50
    assert found.stopping and found.deadline == before and found.source == "deadline-file"


def test_after_a_void_deadline_a_new_one_counts(clock: Clock, tmp_path: Path) -> None:
    found = preemption(clock, tmp_path)
    clock.now += 1000
    found.stop_by(clock.now + 10, "operator")
    found._read_files()
    assert found.stopping and found.source == "operator" and found.deadline == clock.now + 10


def test_without_a_limit_a_deadline_counts_for_ever(clock: Clock) -> None:
    found = Preemption(grace=GRACE)
    found.stop_by(clock.now + 10, "operator")
    clock.now += 10**6
    assert found.stopping


HANGS_UP = """\
import os, signal, sys, time
from spottrain.core.preemption import Preemption
if {own}:
    signal.signal(signal.SIGHUP, lambda *_: sys.stderr.write("own "))
stop = Preemption(grace=30)
stop.install()
os.kill(os.getpid(), signal.SIGHUP)
end = time.monotonic() + {wait}
while not stop.source and time.monotonic() < end:
    time.sleep(0.01)
sys.stderr.write(stop.source or "goes on")  # stdout is the watcher's, which logs in its own thread
sys.stderr.flush()
os._exit(0)  # the interpreter's end aborts where that thread holds stdout
"""


@pytest.mark.parametrize(
    ("start", "own", "says"),
    [("exec", False, "SIGHUP"), ("trap '' HUP; exec", False, "goes on"), ("exec", True, "own goes on")],
)
def test_a_lost_terminal_is_a_stop_but_under_nohup_or_where_the_script_uses_the_signal_itself(
    start: str, own: bool, says: str
) -> None:
    script = HANGS_UP.format(own=own, wait=60 if says == "SIGHUP" else 0.3)
    command = ["sh", "-c", f'{start} "$0" -c "$1"', sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == says


def test_outside_the_main_thread_it_is_refused_with_what_to_do() -> None:
    refused: list[str] = []

    def install() -> None:
        try:
            Preemption(grace=GRACE).install()
        except ConfigurationError as error:
            refused.append(str(error))

    worker = threading.Thread(target=install, name="trains")
    worker.start()
    worker.join()
    assert ["in the thread trains" in each and "spottrain run" in each for each in refused] == [True]
