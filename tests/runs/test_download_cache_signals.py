"""`spottrain.cached` and SIGTERM, in processes that no launcher of ours has started."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, Outcome
from spottrain.core.preemption import Preemption

from tests.support.heavy import sample
from tests.unit.runtime.data.test_download_cache import Process

MANAGED = pytest.mark.parametrize("managed", sample((False, True), True))
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
OWN_LOOP = """
spottrain.cached("set", make)
spottrain.cached("another", lambda folder: (folder / "file").touch())
signal.signal(signal.SIGTERM, own)
print("training", flush=True)
while not stop: time.sleep(0.02)
time.sleep(1.5)  # longer than the notice: nor may anybody force the end
print("saved", flush=True)
"""
OWN_BEFORE = """
signal.signal(signal.SIGTERM, own)
spottrain.cached("set", make)
print("heard", stop, flush=True)
"""
DEFAULT = """
before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
spottrain.cached("set", make)
assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
assert signal.set_wakeup_fd(-1) == -1
"""
THEN_OURS = """
spottrain.cached("set", make)
from spottrain.lifecycle import session
session.current()
print("ours", flush=True)
while True: time.sleep(0.02)
"""


def _start(folder: Path, script: str, managed: bool) -> Process:
    """As a container of the operator's, but for the launcher."""
    pod = {
        Env.JOB_UID: "uid",
        Env.JOB_NAME: "job",
        Env.ATTEMPT: "1",
        Env.GRACE_SECONDS: "1",
        Env.LOGS: "off",
        Env.TERMINATION_MESSAGE: str(folder / "words"),
    }
    if managed:
        pod[Env.CHECKPOINT_URI] = str(folder / "store")
    return Process(folder, 1, script=BEGIN + script, **{str(name): value for name, value in pod.items()})


@pytest.mark.heavy
@MANAGED
def test_after_it_the_scripts_own_handler_is_heard_and_nobody_ends_it(tmp_path: Path, managed: bool) -> None:
    (tmp_path / "go").touch()
    script = _start(tmp_path, OWN_LOOP, managed).until("training")
    assert script.send(signal.SIGTERM) == 0 and "saved" in script.log


@MANAGED
def test_a_handler_that_the_script_had_before_stays_in_force_meanwhile(tmp_path: Path, managed: bool) -> None:
    script = _start(tmp_path, OWN_BEFORE, managed).until("half")
    script.tell(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert script.end() == 0 and "heard [1]" in script.log


@MANAGED
def test_one_that_fills_in_a_pod_without_our_launcher_ends_as_interrupted(
    tmp_path: Path, managed: bool
) -> None:
    script = _start(tmp_path, DEFAULT, managed).until("half")
    assert script.send(signal.SIGTERM) == ExitCode.INTERRUPTED
    assert json.loads((tmp_path / "words").read_text())["outcome"] == Outcome.INTERRUPTED


@MANAGED
def test_after_it_all_of_the_signals_is_as_it_was(tmp_path: Path, managed: bool) -> None:
    (tmp_path / "go").touch()
    script = _start(tmp_path, DEFAULT, managed)
    assert script.end() == 0, script.log


@MANAGED
def test_a_trainer_that_comes_after_it_takes_the_signals_for_good(tmp_path: Path, managed: bool) -> None:
    (tmp_path / "go").touch()
    script = _start(tmp_path, THEN_OURS, managed).until("ours")
    assert script.send(signal.SIGTERM) == ExitCode.INTERRUPTED, script.log


@MANAGED
def test_what_ends_it_is_told_in_the_last_words_unless_the_script_catches_it(
    tmp_path: Path, managed: bool
) -> None:
    script = _start(tmp_path, "spottrain.cached('set', lambda folder: None)", managed)
    assert script.end() == ExitCode.BAD_CONFIGURATION
    assert "wrote no file" in json.loads((tmp_path / "words").read_text())["message"]


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that this script's own handler is called with."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_a_signal_that_comes_just_before_they_are_given_back_is_passed_on(heard: list[int]) -> None:
    preemption = Preemption(grace=30.0)
    preemption.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.stopping and heard == []
    preemption.give_back()
    assert heard == [signal.SIGTERM]
