"""torchrun, `accelerate launch`, a shell, plain `python`: the script's own process has the last words."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, Outcome

from tests.runs.conftest import Lab, Start
from tests.runs.launched import BASE, WAITS

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
PORT = (
    "--main_process_port",
    "0",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
)
LONG_GRACE = {Env.GRACE_SECONDS: "120"}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(TORCHRUN, id="torchrun"),
        pytest.param((*ACCELERATE, *PORT), id="accelerate", marks=pytest.mark.heavy),
    ],
)
def test_a_reclaim_under_anothers_launcher_is_told_by_the_message(
    start: Start, command: tuple[str, ...]
) -> None:
    run = start(WAITS, *command, "train.py", **LONG_GRACE).until("ready-0", "ready-1")
    assert "event=grace-shortened" in run.log and "grace=30.000" in run.log, "else its SIGKILL comes first"
    assert run.send().end() != 0, "torchrun has no other code for it"
    assert run.message.outcome is Outcome.INTERRUPTED and run.message.message == "Saved by rank 0."
    assert "--shutdown-timeout 120" in run.message.warning


@pytest.mark.heavy
def test_a_failure_of_another_rank_is_named_and_a_raised_limit_of_torchruns_is_believed(start: Start) -> None:
    fails = BASE + "if rank == 1:\n    raise ValueError('two is odd')\n" + WAITS.removeprefix(BASE)
    run = start(fails, *TORCHRUN, "--shutdown-timeout", "150", "train.py", **LONG_GRACE).ends(1)
    assert "grace=120.000" in run.log and "event=grace-shortened" not in run.log
    assert run.message.outcome is Outcome.FAILED
    assert run.message.message.startswith("Rank 1: ValueError: two is odd (")


@pytest.mark.heavy
def test_what_ranks_have_saved_at_a_deadline_stays_their_last_word_though_torchrun_starts_them_again(
    start: Start, tmp_path: Path
) -> None:
    deadline = tmp_path / "deadline"
    env = {Env.DEADLINE_FILE: str(deadline)}
    run = start(WAITS, *TORCHRUN, "--max-restarts", "3", "train.py", **env).until("ready-0", "ready-1")
    deadline.write_text((datetime.now(UTC) + timedelta(seconds=30)).isoformat())
    run.end()
    assert run.message.outcome is Outcome.INTERRUPTED and run.message.message == "Saved by rank 0."


def test_a_rank_that_is_told_to_stop_by_another_before_its_first_step_has_lost_nothing(lab: Lab) -> None:
    gone = BASE + "import spottrain.errors\nready()\nraise spottrain.errors.PeerLost('rank 1 is gone')\n"
    run = lab.run(gone).ends(ExitCode.INTERRUPTED)
    assert run.message.outcome is Outcome.INTERRUPTED


def test_behind_a_shell_the_deadline_file_tells(start: Start, tmp_path: Path) -> None:
    deadline = tmp_path / "deadline"
    run = start(WAITS, "sh", "-c", "python train.py; exit $?", **{Env.DEADLINE_FILE: str(deadline)}).until(
        "ready-0"
    )
    deadline.write_text((datetime.now(UTC) + timedelta(seconds=20)).isoformat())
    assert run.end() == ExitCode.INTERRUPTED, run.log
    assert run.message.outcome is Outcome.INTERRUPTED


@pytest.mark.parametrize(
    ("end", "code", "outcome"),
    [
        ("raise ValueError('two is odd')", 1, Outcome.FAILED),
        (
            "from spottrain.errors import ConfigurationError\nraise ConfigurationError('no')",
            64,
            Outcome.BAD_CONFIGURATION,
        ),
        ("session.end(Ending(Outcome.INTERRUPTED, 'saved'))", 75, Outcome.INTERRUPTED),
        ("session.enter(Phase.DONE)", 0, Outcome.DONE),
    ],
)
def test_every_end_under_plain_python_has_its_message(
    start: Start, end: str, code: int, outcome: Outcome
) -> None:
    run = start(BASE + end, sys.executable, "train.py").ends(code)
    assert run.message.outcome is outcome
    assert ("Traceback" in run.log) == (outcome is Outcome.FAILED)


def test_a_script_that_ends_itself_untrained_is_judged_by_its_exit_code(start: Start, tmp_path: Path) -> None:
    start(BASE + "sys.exit(3)", sys.executable, "train.py").ends(3)
    assert not (tmp_path / "message.json").exists()


WEDGED = (
    """\
import torch.distributed as dist
dist.init_process_group("gloo")
"""
    + BASE
    + """
ready()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
while not stopping.stopping:
    time.sleep(0.01)
try:
    session.end(Ending(Outcome.INTERRUPTED, "Saved by rank 0."))
finally:
    print("finally", flush=True)
    dist.barrier()
"""
)


@pytest.mark.heavy
def test_a_script_leaves_in_time_though_its_peer_does_not_answer(lab: Lab) -> None:
    first, _ = lab.ranks(2, WEDGED, env={Env.GRACE_SECONDS: "2"})
    first.until("ready-0").send()
    assert first.end() == ExitCode.INTERRUPTED, first.log
    assert "finally" in first.log and first.message.message == "Saved by rank 0."


@pytest.mark.heavy
def test_a_round_that_torchrun_restarted_has_words_of_its_own(start: Start) -> None:
    once = BASE + "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    raise ValueError('two is odd')\n"
    run = start(once + WAITS.removeprefix(BASE), *TORCHRUN, "--max-restarts", "1", "train.py")
    run.until("ready-0", "ready-1")
    assert "two is odd" in run.log
    run.send().end()
    assert run.message.outcome is Outcome.INTERRUPTED
