"""`spottrain.cached` in a run: waits before any Trainer exists, keeps the heartbeat, and ends at SIGTERM."""

from __future__ import annotations

from pathlib import Path

from spottrain.contract import Env, ExitCode, Outcome

from tests.runs.conftest import Lab

FILLS = """
import time
from pathlib import Path
import spottrain

def make(folder):
    print("half", flush=True)
    while not Path("go").exists(): time.sleep(0.02)
    (folder / "file").touch()

spottrain.cached("set", make)
print("have it", flush=True)
"""
WAITS = """
import threading, time
import spottrain
from spottrain.lifecycle import session

def watch():
    heartbeat, last, beats = session.existing().board.heartbeat, 0.0, 0
    while beats < 3:
        beats += heartbeat.last > last
        last = heartbeat.last
        time.sleep(0.05)
    print("beats", flush=True)

threading.Thread(target=watch, daemon=True).start()
spottrain.cached("set", None)
print("have it", flush=True)
"""

FULL = """
import errno, os, spottrain

def make(folder):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "file"))

spottrain.cached("set", make)
"""


def _env(lab: Lab) -> dict[str, str]:
    return {Env.DATA_CACHE: str(lab.folder / "cache")}


def test_one_that_waits_beats_the_pulse_and_ends_at_sigterm_with_75(lab: Lab) -> None:
    first = lab.run(FILLS, env=_env(lab)).until("half")
    second = (
        lab.run(WAITS, env=_env(lab), at="other").until("event=data-cache-waiting").until("beats").stopped()
    )
    assert second.message.outcome is Outcome.INTERRUPTED
    (lab.folder / "go").touch()
    assert first.until("have it").end() == 0


def test_one_that_fills_ends_at_sigterm_and_the_next_attempt_fills_again(lab: Lab) -> None:
    lab.run(FILLS, env=_env(lab)).until("half").stopped()
    assert not (lab.folder / "cache" / "set").exists()
    (lab.folder / "go").touch()
    second = lab.run(FILLS, env=_env(lab), attempt=2)
    assert second.end() == 0 and "event=data-cache-leftover" in second.log
    assert [p.name for p in Path(lab.folder / "cache" / "set").iterdir()] == ["file"]
    third = lab.run(FILLS, env=_env(lab), attempt=3)
    assert third.end() == 0 and "event=data-cache-hit name=set" in third.log


def test_a_full_volume_ends_the_run_with_its_own_reason(lab: Lab) -> None:
    run = lab.run(FULL, env=_env(lab))
    assert run.end() == ExitCode.FAILED and run.message.reason == "DataCacheFull"
    assert "no space left for set in the data cache" in run.message.message
