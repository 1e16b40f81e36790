"""A stop in the first moments of `spottrain run` ends it with 75: nothing is lost yet."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, Outcome, Stop

from tests.runs.conftest import Start
from tests.runs.launched import WAITS
from tests.support.heavy import sample
from tests.support.pid1 import (
    HELD,
    NAMESPACE,
    NO_PID_1,
    can_be_pid_1,
    holds_signals,
    needs_root,
    once,
    pid_1_below,
)

RUN = ["-m", "spottrain", "run", "train.py"]
DELAYS = [0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0]
ALWAYS = [("a process", 0.1), ("a process", 0.3), ("PID 1", 0.0), ("PID 1", 0.15)]


def test_the_image_holds_signals_before_the_interpreter_starts() -> None:
    assert HELD[:-1] == ["--block-signal=TERM,INT"]
    shows = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    shown = subprocess.run(["env", *HELD, "-c", shows], capture_output=True, text=True, check=True)
    assert "SIGTERM" in shown.stdout and "SIGINT" in shown.stdout


@pytest.mark.parametrize(
    ("how", "after"),
    sample(
        [*(("a process", after) for after in DELAYS[::3]), *(("PID 1", after) for after in DELAYS)], *ALWAYS
    ),
)
def test_a_signal_at_any_point_of_the_first_two_seconds_ends_it_with_75(
    start: Start, after: float, how: str
) -> None:
    if how == "PID 1" and not can_be_pid_1():
        pytest.skip(NO_PID_1)
    namespace = NAMESPACE if how == "PID 1" else []
    run = start(WAITS, *namespace, "env", *HELD, *RUN, **{Env.JOB_UID: "uid"})
    pid = pid_1_below(run.pid) if how == "PID 1" else run.pid
    once(lambda: holds_signals(pid), "held SIGTERM")
    time.sleep(after)
    os.kill(pid, signal.SIGTERM)
    assert run.end() == ExitCode.INTERRUPTED, run.log
    assert run.message.outcome is Outcome.INTERRUPTED


@needs_root
@pytest.mark.parametrize(
    ("after", "nproc"),
    sample(itertools.product((0.0, 0.05, 0.5), ("1", "2")), (0.05, "1"), (0.0, "2")),
)
def test_a_signal_that_the_kernel_threw_away_is_made_up_for_by_the_deadline_file(
    start: Start, tmp_path: Path, after: float, nproc: str
) -> None:
    """The operator writes it before it deletes a pod; `python -m` holds nothing while Python starts."""
    deadline = tmp_path / "deadline"
    words = ["-m", "spottrain", "run", "--nproc", nproc, "train.py"]
    env = {Env.JOB_UID: "uid", Env.DEADLINE_FILE: str(deadline)}
    run = start(WAITS, *NAMESPACE, sys.executable, *words, **env)
    pid = pid_1_below(run.pid)
    time.sleep(after)
    deadline.write_text((datetime.now(UTC) + timedelta(seconds=25)).isoformat())
    os.kill(pid, signal.SIGTERM)
    assert run.end() == ExitCode.INTERRUPTED, run.log
    assert run.message.outcome is Outcome.INTERRUPTED


def test_a_pod_that_waits_for_its_gang_looks_at_the_deadline_file(start: Start, tmp_path: Path) -> None:
    meets = {Env.WORKERS: "2", Env.WORKER_INDEX: "1", Env.RENDEZVOUS: "nobody.invalid:29500"}
    (tmp_path / "deadline").write_text((datetime.now(UTC) + timedelta(seconds=25)).isoformat())
    start(WAITS, sys.executable, *RUN, **meets, **{Env.DEADLINE_FILE: str(tmp_path / "deadline")}).ends(
        ExitCode.INTERRUPTED
    )


AT_IMPORT = """\
import os, signal, sys

class Strikes:
    def find_spec(self, name, path=None, target=None):
        if name == "NAME" and "spottrain" in str(sys.orig_argv):
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Strikes())
"""
SCRIPT_OF_INSTALLER = "import sys; from spottrain.cli.entry import main; sys.argv[1:] = {}; sys.exit(main())"


@pytest.mark.parametrize(
    ("name", "how"),
    sample(
        itertools.product(
            ("argparse", "spottrain.contract", "spottrain.lifecycle.session"),
            ("python -m spottrain", "the installed command"),
        ),
        *(("argparse", "python -m spottrain"), ("spottrain.lifecycle.session", "the installed command")),
    ),
)
def test_a_signal_before_the_first_import_of_the_command_is_held(
    start: Start, tmp_path: Path, name: str, how: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT.replace("NAME", name))
    words = RUN if how == "python -m spottrain" else ["-c", SCRIPT_OF_INSTALLER.format(["run", "train.py"])]
    run = start(WAITS, sys.executable, *words, PYTHONPATH=str(tmp_path)).ends(ExitCode.INTERRUPTED)
    assert run.message.outcome is Outcome.INTERRUPTED


def test_a_command_other_than_run_still_ends_at_a_signal(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT.replace("NAME", "spottrain_cli.app"))
    words = ["-m", "spottrain", "checkpoints", "list", "x"]
    start(WAITS, "env", *HELD, *words, PYTHONPATH=str(tmp_path)).ends(-signal.SIGTERM)


def post(port: str, body: str, path: str = "/stop", length: str | None = None) -> int:
    """length: of the header Content-Length, where it is to be another than the body's."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body.encode(), method="POST")
    if length is not None:
        request.add_header("Content-Length", length)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def test_the_operators_word_by_the_progress_port_stops_this_trainer_and_no_other(start: Start) -> None:
    env = {Env.JOB_UID: "job", Env.POD_UID: "uid", Env.ATTEMPT: "3", Env.PROGRESS_PORT: "0"}
    run = start(WAITS, sys.executable, *RUN, **env).until("ready-0")
    port = run.log.split("event=progress-served port=")[1].split()[0]
    deadline = time.time() + 25
    right = Stop(podUID="uid", deadline=deadline)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=10) as reply:
        assert "uid" not in json.loads(reply.read()).values(), "whoever can ask must not be able to stop"
    for other in ("other", "job", ""):
        assert post(port, replace(right, podUID=other).to_json()) == 403
    assert post(port, right.to_json(), path="/else") == 404
    bad = ["", "[]", "{}", '{"podUID": "uid", "deadline": NaN}']
    assert [post(port, body) for body in bad] == [400] * len(bad)
    assert post(port, " " * 5000) == post(port, "", length="-1") == 413
    assert "event=stop" not in run.log
    assert post(port, right.to_json()) == 204
    assert run.end() == ExitCode.INTERRUPTED, run.log
