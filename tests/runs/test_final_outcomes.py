"""Once a run has said how it ended, nothing that happens to its process afterwards changes that."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from spottrain.contract import Env, Outcome

from tests.runs.conftest import Start
from tests.runs.launched import BASE, OURS
from tests.runs.test_launcher_of_others import TORCHRUN
from tests.support.heavy import sample

# An object that `sys` holds is deleted when the interpreter takes itself down, after all exit handlers.
SLOW_END = (
    BASE
    + """
class Slow:
    def __del__(self, write=os.write, sleep=time.sleep, kill=os.kill, pid=os.getpid(), rank=rank):
        write(1, b"going-down-%d pid=%d.\\n" % (rank, pid))
        AT_THE_END
        write(1, b"went-down-%d\\n" % rank)


sys.slow = Slow()
"""
)
DONE = "session.enter(Phase.DONE)\n"


def slow_end(end: str = DONE, at_the_end: str = "sleep(0.7)") -> str:
    return SLOW_END.replace("AT_THE_END", at_the_end) + end


WAYS = {
    "python": ((sys.executable,), {}),
    "one process": (OURS, {}),
    "one rank": (OURS, {Env.LOGS: "keep"}),
    "two ranks": ((*OURS, "--nproc", "2"), {}),
}


FAILS = "raise ValueError('two is odd')"
REFUSES = "from spottrain.errors import ConfigurationError\nraise ConfigurationError('no')"


@pytest.mark.parametrize(
    ("way", "end", "code", "outcome"),
    [
        ("python", DONE, 0, Outcome.DONE),
        ("one process", REFUSES, 64, Outcome.BAD_CONFIGURATION),
        ("one rank", FAILS, 1, Outcome.FAILED),
        pytest.param("python", FAILS, 1, Outcome.FAILED, marks=pytest.mark.heavy),
        pytest.param("one process", DONE, 0, Outcome.DONE, marks=pytest.mark.heavy),
        pytest.param("one rank", DONE, 0, Outcome.DONE, marks=pytest.mark.heavy),
        ("two ranks", DONE, 0, Outcome.DONE),
    ],
    ids=lambda value: str(value).split()[0],
)
def test_a_signal_after_the_last_words_changes_neither_code_nor_message(
    start: Start, way: str, end: str, code: int, outcome: Outcome
) -> None:
    command, env = WAYS[way]
    run = start(slow_end(end), *command, "train.py", **env)
    run.until("going-down-0", *["going-down-1"] * (way == "two ranks")).send_group()
    assert run.end() == code, run.log
    assert run.message.outcome is outcome
    assert "went-down-0" in run.log


@pytest.mark.parametrize(
    ("way", "fault"),
    sample(
        itertools.product(("one rank", "two ranks"), ("SIGSEGV", "SIGKILL")),
        *(("one rank", "SIGSEGV"), ("two ranks", "SIGKILL")),
    ),
)
def test_a_rank_that_crashes_while_it_goes_down_is_done_all_the_same(
    start: Start, way: str, fault: str
) -> None:
    command, env = WAYS[way]
    run = start(
        slow_end(at_the_end=f"kill(pid, {int(signal.Signals[fault])})"), *command, "train.py", **env
    ).done()
    assert run.message.outcome is Outcome.DONE


def test_a_rank_that_hangs_while_it_goes_down_is_killed_in_time_and_done(start: Start) -> None:
    command, env = WAYS["one rank"]
    env |= {Env.GRACE_SECONDS: "3"}
    run = (
        start(slow_end(at_the_end="sleep(600)"), *command, "train.py", **env)
        .until("going-down-0")
        .send()
        .done()
    )
    assert "event=ranks-killed" in run.log and run.message.outcome is Outcome.DONE


@pytest.mark.heavy
def test_the_ranks_of_torchrun_go_down_in_peace(start: Start) -> None:
    run = start(slow_end(), *TORCHRUN, "train.py").until("going-down-0", "going-down-1")
    for rank in (0, 1):
        os.kill(int(run.log.split(f"going-down-{rank} pid=")[1].split(".")[0]), signal.SIGTERM)
    run.done()
    assert run.message.outcome is Outcome.DONE


TRAINED = """\
import sys, torch, spottrain
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
spottrain.Trainer(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    train_dataset=data,
    loss_fn=lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
    max_steps=3,
    global_batch_size=4,
).fit()
"""


@pytest.mark.heavy
@pytest.mark.parametrize("way", ["python", "one rank"])
def test_a_trained_job_that_is_signalled_at_its_very_end_stays_done(
    start: Start, way: str, tmp_path: Path
) -> None:
    command, env = WAYS[way]
    run = start(slow_end(TRAINED), *command, "train.py", **env).until("going-down-0").send().done()
    assert (run.message.outcome, run.message.step) == (Outcome.DONE, 3)
    assert json.loads((tmp_path / "store" / "HEAD").read_text())["state"] == "done"
