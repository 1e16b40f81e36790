"""The small decisions of a launcher and a run: how many processes, what a parent does, whose words stay."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from spottrain.contract import TIME_BEFORE, Outcome, TerminationMessage, TimeSplit
from spottrain.core.preemption import Preemption
from spottrain.core.progress import ProgressFacts
from spottrain.errors import PeerLost
from spottrain.lifecycle.endings import Ending, done_before, interrupted
from spottrain.lifecycle.log_capture.outputs import seconds_for_logs
from spottrain.lifecycle.parent_signals import agent_limit, deaf_init
from spottrain.lifecycle.session import Session
from spottrain.lifecycle.termination_message import outranking, revise
from spottrain.lifecycle.topology import count_gpus

from tests.support.sentences import Told

ASKED = 7
"""What torch answers in these tables."""


@pytest.mark.parametrize(
    ("files", "env", "count"),
    [
        ([], {}, 1),
        ([], {"CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], {}, 2),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "1"}, ASKED),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": ""}, ASKED),
        (["nvidia0", "nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2"], {}, 1),
        (["nvidia0", *(f"nvidia-caps/nvidia-cap{n}" for n in (1, 2, 12))], {}, ASKED),
        (["kfd"], {}, ASKED),
    ],
)
def test_one_process_per_device_file_and_torch_is_asked_where_they_do_not_say(
    tmp_path: Path, files: list[str], env: dict[str, str], count: int
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert count_gpus(env, tmp_path, lambda: ASKED) == count


def test_a_device_that_torch_does_not_see_still_gives_one_process(tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    assert count_gpus({}, tmp_path, lambda: 0) == 1


@pytest.mark.parametrize(
    ("env", "command", "limit"),
    [
        ({}, "torchrun --shutdown-timeout 90 train.py", math.inf),
        ({"TORCHELASTIC_RUN_ID": "x"}, "python torchrun train.py", 30),
        ({"TORCHELASTIC_RUN_ID": "x"}, "python torchrun --shutdown-timeout 90 train.py", 90),
        ({"TORCHELASTIC_RUN_ID": "x"}, "python torchrun --shutdown_timeout=90 train.py", 90),
        ({"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}, "python torchrun", 60),
        (
            {
                "TORCHELASTIC_RUN_ID": "x",
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60",
                "PET_SHUTDOWN_TIMEOUT": "70",
            },
            "python torchrun",
            70,
        ),
    ],
)
def test_torchruns_own_limit_is_read_where_torchrun_reads_it(
    env: dict[str, str], command: str, limit: float
) -> None:
    assert agent_limit(env, command) == limit


def status(proc: Path, pid: int, parent: int, *, name: str, caught: int = 0) -> None:
    (proc / str(pid)).mkdir()
    text = f"Name:\t{name}\nPPid:\t{parent}\nSigCgt:\t{caught:016x}\n"
    (proc / str(pid) / "status").write_text(text)


SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


@pytest.mark.parametrize(
    ("init", "caught", "parent", "deaf"),
    [
        ("sh", 0, 1, "sh"),
        ("bash", SIGTERM_BIT, 1, ""),  # it has a trap
        ("tini", 0, 1, ""),
        ("sh", 0, 0, ""),  # kubectl exec: no child of it
    ],
)
def test_a_shell_at_pid_1_is_named(tmp_path: Path, init: str, caught: int, parent: int, deaf: str) -> None:
    status(tmp_path, 1, 0, name=init, caught=caught)
    status(tmp_path, 7, parent, name="accelerate")
    status(tmp_path, 9, 7, name="python")
    assert deaf_init(9, tmp_path) == deaf


def test_the_gravest_words_stay_and_among_equals_the_first(tmp_path: Path) -> None:
    path = tmp_path / "message"
    told = [
        (Outcome.INTERRUPTED, "first"),
        (Outcome.FAILED, "cause"),
        (Outcome.FAILED, "consequence"),
        (Outcome.INTERRUPTED_LOST, "peer"),
    ]
    for outcome, text in told:
        revise(path, outranking(TerminationMessage(outcome=outcome, message=text)), since=0.0)
    found = TerminationMessage.from_json(path.read_text())
    assert found is not None and found.message == "cause"


def test_the_last_message_that_it_is_done_stays_for_it_has_the_whole_time(tmp_path: Path) -> None:
    path = tmp_path / "message"
    for seconds in (3.0, 4.0):
        message = TerminationMessage(outcome=Outcome.DONE, timeSplit=TimeSplit(other=seconds))
        revise(path, outranking(message), since=0.0)
    assert TerminationMessage.from_json(path.read_text()) == message


def test_what_a_rank_starts_does_not_count_the_time_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"born": time.time() - 1e6, "split": asdict(TimeSplit(waiting=1e6))}
    monkeypatch.setenv(TIME_BEFORE, json.dumps(told))
    rank = Session(os.environ, Preemption(grace=30.0)).board.clock.split()
    command = [sys.executable, "-c", f"import os; print({TIME_BEFORE!r} in os.environ)"]
    assert rank.waiting == 1e6 and subprocess.check_output(command, text=True) == "False\n"


@pytest.mark.parametrize("before", ['{"outcome": "failed"}', "Traceback (most recent call last)", ""])
def test_words_of_an_earlier_run_or_of_somebody_else_are_replaced(tmp_path: Path, before: str) -> None:
    path = tmp_path / "message"
    path.write_text(before)
    done = TerminationMessage(outcome=Outcome.DONE, message="x")
    revise(path, outranking(done), since=time.time() + 60)
    assert TerminationMessage.from_json(path.read_text()) == done


@pytest.mark.parametrize(
    ("left", "seconds"), [(float("inf"), 5.0), (100.0, 5.0), (4.0, 3.0), (1.0, 0.0), (0.5, -0.5)]
)
def test_the_last_parts_of_a_log_leave_a_second_of_the_notice(left: float, seconds: float) -> None:
    assert seconds_for_logs(time.time() + left) == pytest.approx(seconds, abs=0.1)


@pytest.mark.parametrize(
    ("trained", "total", "wanted"), [(24, 24, 24), (24, 24, 0), (14, 24, 24), (24, 24, 40)]
)
def test_a_job_that_is_done_says_how_many_steps_were_trained_and_how_to_train_more(
    trained: int, total: int, wanted: int, told: Told
) -> None:
    for in_job in (True, False):
        told(done_before("u", trained, total=total, wanted=wanted, in_job=in_job).text)


@pytest.mark.parametrize(
    ("durable", "outcome", "says"),
    [
        (
            7,
            Outcome.INTERRUPTED,
            "Interrupted at step 7, which is saved; the same command resumes from there.",
        ),
        (
            4,
            Outcome.INTERRUPTED_LOST,
            "Interrupted at step 7; 3 step(s) since the last commit are lost: the store is silent.",
        ),
    ],
)
def test_a_stop_says_where_the_run_stands_and_only_lost_steps_make_it_a_loss(
    durable: int, outcome: Outcome, says: str
) -> None:
    facts = ProgressFacts(step=7, start_step=2, durable_step=durable)
    ending = interrupted(facts, "the store is silent")
    assert (ending.outcome, ending.text) == (outcome, says)
    assert Ending.of(PeerLost("another rank is gone"), facts).outcome is outcome


@pytest.mark.parametrize("durable", [None, 40])
def test_a_stop_before_the_first_step_has_lost_nothing(durable: int | None) -> None:
    """Nor where the script begins a training again that failed in the same process."""
    ending = interrupted(ProgressFacts(step=0, start_step=0, durable_step=durable), "no reason is needed")
    assert (ending.outcome, ending.text) == (Outcome.INTERRUPTED, "Interrupted at step 0; nothing was lost.")
