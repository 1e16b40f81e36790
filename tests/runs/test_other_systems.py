"""The way without Linux: Python's functions for Linux's own calls are taken away, and /proc is empty. So the
code that runs is that of macOS, though the kernel is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from spottrain.contract import ExitCode, Outcome, TerminationMessage

from tests.runs.conftest import Start
from tests.runs.launched import OURS, WAITS, Launched
from tests.support.pid1 import needs_root

WITHOUT = """\
import fcntl, os, select, signal, time

for module, names in (
    (os, "memfd_create MFD_CLOEXEC sched_getaffinity waitid eventfd pipe2 fdatasync posix_fadvise "
         "posix_fallocate copy_file_range splice sendfile pidfd_open getrandom O_DIRECT O_TMPFILE O_PATH"),
    (signal, "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR pidfd_send_signal"),
    (time, "CLOCK_BOOTTIME CLOCK_TAI"),
    (fcntl, "F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS F_OFD_SETLK"),
    (select, "epoll"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""
EMPTY_PROC = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"']
TRAINS = """\
import time, torch, spottrain
spottrain.seed(1)
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))

def loss(model, batch):
    time.sleep(0.05)
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

spottrain.Trainer(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
    train_dataset=data,
    loss_fn=loss,
    max_steps=30,
    global_batch_size=4,
    log_every=1,
    num_workers=1,
).fit()
"""


@pytest.fixture(autouse=True)
def no_linux(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)


def without_linux(start: Start, script: str, *words: str, proc: str = "proc") -> Launched:
    before = EMPTY_PROC if proc == "no proc" else []
    return start(script, *before, *OURS, *words, "train.py", PYTHONPATH=".")


PROC = pytest.mark.parametrize("proc", ["proc", pytest.param("no proc", marks=needs_root)])


def stopped(start: Start, proc: str) -> TerminationMessage:
    run = without_linux(start, TRAINS, proc=proc).until("step=3/").stopped()
    assert run.message.outcome is Outcome.INTERRUPTED and run.message.durableStep == run.message.step
    return run.message


@pytest.mark.heavy
def test_a_training_saves_at_a_signal(start: Start) -> None:
    stopped(start, "proc")


@pytest.mark.heavy
@PROC
def test_a_training_goes_on_to_its_end(start: Start, proc: str) -> None:
    first = stopped(start, proc)
    again = without_linux(start, TRAINS, proc=proc).done()
    assert again.message.startStep == first.step and again.message.step == 30


@PROC
def test_several_ranks_are_started_told_and_ended(start: Start, proc: str) -> None:
    run = without_linux(start, WAITS, "--nproc", "2", proc=proc).until("ready-0", "ready-1").stopped()
    assert run.message.message == "Saved by rank 0."


def test_a_rank_that_fails_ends_the_others(start: Start) -> None:
    fails = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('two is odd')\n" + WAITS
    run = without_linux(start, fails, "--nproc", "2").ends(ExitCode.FAILED)
    assert "Rank 1: ValueError: two is odd" in run.log  # no kubelet is there to read a termination message
