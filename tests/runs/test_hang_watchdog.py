"""A training that gets on no more says so once, with the stacks of its threads, and is not ended for it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode

from tests.runs.conftest import SCRIPT, Lab, progress_of
from tests.runs.launched import Run
from tests.runs.test_run_ranks import SCRIPT as RANKS
from tests.support.heavy import sample

LIMIT: dict[str, str] = {Env.HANG_TIMEOUT: "1"}
WAITS = """\
def where_it_hangs():
    while trainer.step == 4 and not os.path.exists("go"):
        time.sleep(0.01)


"""
HOLDS = """\
import ctypes


def where_it_hangs():
    if trainer.step == 3:
        time.sleep(1.5)  # the watchdog looks once a second
    if trainer.step == 4:
        ctypes.PyDLL(None).read(os.open("go", os.O_RDWR), ctypes.create_string_buffer(1), 1)


"""


def hanging(how: str, script: str = SCRIPT) -> str:
    changed = script.replace(
        "def loss(model, batch):\n", how + "def loss(model, batch):\n    where_it_hangs()\n"
    )
    assert changed != script
    return changed


def stalled(run: Run) -> list[str]:
    """The lines that say so; what is in a dump begins with no time."""
    return [line for line in run.log.splitlines() if re.match(r"\S+Z event=stalled ", line)]


@pytest.mark.parametrize("logs", sample(("keep", "off"), "keep"))
def test_a_hang_is_told_once_with_the_stacks_and_the_training_may_go_on(lab: Lab, logs: str) -> None:
    run = lab.run(hanging(WAITS), env=LIMIT | {Env.PROGRESS_PORT: "0", Env.LOGS: logs})
    run.until(" event=stalled ").until("in where_it_hangs")
    assert f'File "{lab.folder}/train.py", line' in run.log, "the place in the script"
    assert run.log.count("most recent call first") >= 3, "of all threads"
    progress = progress_of(run)
    assert progress.hangSeconds == 1.0 and progress.idleSeconds is not None and progress.idleSeconds >= 1.0
    (lab.folder / "go").touch()
    run.done()
    (line,) = stalled(run)
    assert " step=4 state=Training idle=1." in line and " limit=1.000 " in line


@pytest.mark.heavy
def test_a_thread_that_hangs_with_the_interpreter_lock_is_dumped_all_the_same(lab: Lab) -> None:
    go = lab.folder / "go"
    os.mkfifo(go)
    run = lab.run(hanging(HOLDS), env={Env.HANG_TIMEOUT: "3"})
    run.until("Timeout (0:00:0").until("in where_it_hangs")
    assert stalled(run) == [] and "step=5/" not in run.log
    go.write_bytes(b"!")
    run.done()
    assert len(stalled(run)) == 1 and run.log.count("in where_it_hangs") == 1, "once, and not a second time"


@pytest.mark.heavy
def test_what_comes_before_the_first_step_is_no_hang(lab: Lab) -> None:
    slow = "import time\ntime.sleep(1.5)\n" + SCRIPT.replace(
        "    time.sleep(PAUSE)\n", "    time.sleep(1.5 if trainer.step == 0 else 0)\n"
    )
    run = lab.run(slow, training='{"maxSteps": 3}', env=LIMIT).done()
    assert stalled(run) == [] and "most recent call first" not in run.log


@pytest.mark.heavy
def test_an_evaluation_longer_than_the_limit_is_no_hang_as_long_as_its_batches_come(lab: Lab) -> None:
    env = LIMIT | {"EVAL": "1", "EVAL_PAUSE": "0.3"}  # seven batches
    run = lab.run(training='{"maxSteps": 2}', env=env).done()
    assert stalled(run) == [] and "event=evaluated" in run.log


GUARD = """\
import os, time
import torch, spottrain

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = spottrain.Run(model=model, optimizer=optimizer, max_steps=8, log_every=1)
while not run.done:
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    run.step_completed(loss=1.0)
    until = time.monotonic() + (1.5 if run.global_step == 2 else 0)
    while time.monotonic() < until and not run.should_stop:
        time.sleep(0.01)
    while run.global_step == 4 and not os.path.exists("go"):
        time.sleep(0.01)
run.finish()
"""


@pytest.mark.heavy
def test_in_a_loop_of_one_s_own_asking_whether_to_stop_is_a_sign_of_life(lab: Lab) -> None:
    run = lab.run(GUARD, env=LIMIT).until(" event=stalled ").until("train.py")
    (lab.folder / "go").touch()
    run.done()
    (line,) = stalled(run)
    assert " step=4 " in line, "not at step 2, where it asked"


@pytest.mark.heavy
def test_of_two_ranks_each_dumps_its_own(lab: Lab) -> None:
    one = "if os.environ['RANK'] == '1':\n        where_it_hangs()"
    script = hanging(WAITS, RANKS).replace("    where_it_hangs()\n", f"    {one}\n", 1)
    ranks = lab.ranks(2, script, env=LIMIT)
    for rank, run in enumerate(ranks):
        run.until(f" event=stalled rank={rank} ").until("most recent call first")
    assert "in where_it_hangs" in ranks[1].log and "in where_it_hangs" not in ranks[0].log
    Path(lab.folder / "go").touch()
    assert [run.end() for run in ranks] == [ExitCode.DONE] * 2, ranks[0].log
    assert [len(stalled(run)) for run in ranks] == [1, 1]
