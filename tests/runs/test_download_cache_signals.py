"""`spottrain.cached` and SIGTERM, in processes that no launcher of ours has started."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from spottrain.contract import Env, ExitCode, Outcome

from tests.unit.runtime.data.test_download_cache import Process

BEGIN = """
import os, signal, sys, time
from pathlib import Path
import spottrain

def make(folder):
    (folder / "file").touch()
    print("half", flush=True)
    while not Path("go").exists(): time.sleep(0.02)

stop = []
def own(*_): stop.append(1)
"""
OWN_BEFORE = """
signal.signal(signal.SIGTERM, own)
spottrain.cached("set", make)
print("heard", stop, flush=True)
"""
THEN_OURS = """
spottrain.cached("set", make)
from spottrain.lifecycle import session
session.current()
print("ours", flush=True)
while True: time.sleep(0.02)
"""


def _start(folder: Path, script: str) -> Process:
    """As a container of the operator's, but for the launcher."""
    pod = {
        Env.JOB_UID: "uid",
        Env.JOB_NAME: "job",
        Env.ATTEMPT: "1",
        Env.GRACE_SECONDS: "1",
        Env.LOGS: "off",
        Env.TERMINATION_MESSAGE: str(folder / "words"),
        Env.CHECKPOINT_URI: str(folder / "store"),
    }
    return Process(folder, 1, script=BEGIN + script, **{str(name): value for name, value in pod.items()})


def test_a_handler_that_the_script_had_before_stays_in_force_meanwhile(tmp_path: Path) -> None:
    script = _start(tmp_path, OWN_BEFORE).until("half")
    script.tell(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert script.end() == 0 and "heard [1]" in script.log


def test_one_that_fills_in_a_pod_without_our_launcher_ends_as_interrupted(tmp_path: Path) -> None:
    script = _start(tmp_path, 'spottrain.cached("set", make)').until("half")
    assert script.send(signal.SIGTERM) == ExitCode.INTERRUPTED
    assert json.loads((tmp_path / "words").read_text())["outcome"] == Outcome.INTERRUPTED


def test_a_trainer_that_comes_after_it_takes_the_signals_for_good(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    script = _start(tmp_path, THEN_OURS).until("ours")
    assert script.send(signal.SIGTERM) == ExitCode.INTERRUPTED, script.log


def test_what_ends_it_is_told_in_the_last_words_unless_the_script_catches_it(tmp_path: Path) -> None:
    script = _start(tmp_path, "spottrain.cached('set', lambda folder: None)")
    assert script.end() == ExitCode.BAD_CONFIGURATION
    assert "wrote no file" in json.loads((tmp_path / "words").read_text())["message"]
