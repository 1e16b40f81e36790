"""Signals to the whole process group, as Ctrl-C is one: loader workers of any library, pools of the script,
and errors that follow from a worker that is gone."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, Outcome

from tests.runs.conftest import SCRIPT, Lab, Start
from tests.runs.launched import OURS, Run, gone
from tests.support.heavy import sample


@pytest.fixture
def lab(lab: Lab) -> Lab:
    lab.logs = "keep"
    return lab


BOTH = pytest.mark.parametrize("signum", sample((signal.SIGTERM, signal.SIGINT), signal.SIGTERM))

LOOP = """\
import os, sys, time
import multiprocessing
import torch, spottrain

spottrain.seed(3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
PAUSE = float(os.environ.get("PAUSE", "0"))


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        if multiprocessing.parent_process() is not None:
            print(f"worker pid={os.getpid()}.", flush=True)
            time.sleep(PAUSE)
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x, x.sum()


loader = spottrain.data.loader(Noisy(), batch_size=4, shuffle=True)
"""
TRAIN = """
run = spottrain.Run(model=model, optimizer=optimizer, data=loader, max_steps=12, log_every=1)
for x, y in run.batches(loader):
    BEFORE
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x).squeeze(-1), y).backward()
    optimizer.step()
    BETWEEN
    run.step_completed()
    AFTER
run.finish()
"""


def loop(before: str = "pass", between: str = "pass", after: str = "pass", head: str = "") -> str:
    train = TRAIN.replace("BEFORE", before).replace("BETWEEN", between).replace("AFTER", after)
    return LOOP + head + train


def strike(run: Run, signum: signal.Signals = signal.SIGTERM) -> Run:
    """The trainer, and all that it has started."""
    os.killpg(run.trainer, signum)
    return run


EVALUATES = loop(
    head="evaluation = torch.utils.data.DataLoader(Noisy(), batch_size=4, num_workers=2)\n",
    after="sum(model(x).sum().item() for x, _ in evaluation); print('evaluated', flush=True)",
)


@pytest.mark.heavy
@BOTH
def test_the_workers_of_an_evaluation_loader_outlive_a_signal_to_the_group(
    lab: Lab, signum: signal.Signals
) -> None:
    run = lab.run(EVALUATES, interval="1h", env={"PAUSE": "0.05"}).until("evaluated").until("worker pid=")
    assert strike(run, signum).end() == ExitCode.INTERRUPTED, run.log
    assert run.message.durableStep == run.message.step and lab.head["state"] == "released"
    again = lab.run(EVALUATES).done()
    assert again.message.startStep == run.message.step


@pytest.mark.heavy
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_workers_of_hugging_faces_trainer_outlive_a_signal_to_the_group(
    lab: Lab, signum: signal.Signals
) -> None:
    pytest.importorskip("transformers")
    from tests.runs.test_transformers import CALLBACK as HUGGING_FACE

    env = {"PAUSE": "0.05", "ARGUMENTS": "{'dataloader_num_workers': 2}"}
    run = lab.run(HUGGING_FACE, interval="1h", env=env).until("step=3/")
    assert strike(run, signum).end() == ExitCode.INTERRUPTED, run.log
    assert (run.message.durableStep or 0) == (run.message.step or 0) >= 3


POOLED = """
from concurrent.futures import ProcessPoolExecutor

def work(n):
    time.sleep(PAUSE)
    return n

pool = ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
"""
ASKS = "print('asking', run.global_step, flush=True); list(pool.map(work, range(4)))"


@pytest.mark.parametrize("where", sample(("before", "after"), "before"))
def test_an_error_that_follows_from_the_stop_is_none_of_the_script_and_the_newest_step_is_saved(
    lab: Lab, where: str
) -> None:
    script = loop(head=POOLED, **{where: ASKS})
    plain = lab.run(loop(), at="plain").done()
    run = lab.run(script, interval="1h", env={"PAUSE": "0.3"}).until("asking 3")
    assert strike(run).end() == ExitCode.INTERRUPTED, run.log
    assert run.message.outcome is Outcome.INTERRUPTED and run.message.durableStep == run.message.step == 3
    assert "BrokenProcessPool" in run.message.message and "train.py:" in run.message.message
    again = lab.run(script).done()
    assert again.digest == plain.digest


@pytest.mark.heavy
def test_after_an_update_that_was_not_counted_what_is_durable_is_the_newest(lab: Lab) -> None:
    run = lab.run(loop(head=POOLED, between=ASKS), interval="1h", env={"PAUSE": "0.3"}).until("asking 3")
    assert strike(run).end() == ExitCode.INTERRUPTED_LOST, run.log
    assert "cannot be undone" in run.message.message and "BrokenProcessPool" in run.message.message
    assert lab.head["state"] == "released"


def test_a_training_script_that_breaks_while_data_are_fetched_is_saved(lab: Lab) -> None:
    fetches = "import multiprocessing\nPAUSE = 0.05\n" + POOLED
    script = SCRIPT.replace("class Augmented", fetches + "\nclass Augmented").replace(
        "        generator = torch",
        "        pool.submit(work, 1).result()\n        generator = torch",
        1,
    )
    run = lab.run(script, interval="1h", env={"PAUSE": "0.05"}).until("step=3/")
    assert strike(run).end() == ExitCode.INTERRUPTED, run.log
    assert run.message.durableStep == run.message.step and (run.message.step or 0) >= 3


def test_a_mistake_of_the_script_without_a_stop_is_still_a_failure(lab: Lab) -> None:
    run = lab.run(loop(after="assert run.global_step < 3, 'broken data'")).ends(ExitCode.FAILED)
    assert run.message.outcome is Outcome.FAILED and "broken data" in run.message.message


LEAVES = loop(
    head="import atexit\n",
    after="print('stepped', flush=True); time.sleep(PAUSE)\n    if run.should_stop: break",
)


def test_a_loop_that_leaves_by_itself_when_told_to_stop_has_not_failed(lab: Lab) -> None:
    script = LEAVES.replace("run.finish()", "if run.done: run.finish()")
    run = lab.run(script, interval="1h", env={"PAUSE": "0.3"}).until("stepped").stopped()
    assert run.message.durableStep == run.message.step


POOLS = {
    "Pool": "pool = multiprocessing.get_context('fork').Pool(2)\n",
    "ProcessPoolExecutor": POOLED,
}


@pytest.mark.parametrize(
    ("kind", "to"),
    sample(
        itertools.product(POOLS, ("process", "group")),
        *(("Pool", "group"), ("ProcessPoolExecutor", "process")),
    ),
)
def test_no_worker_of_a_pool_is_left_behind(lab: Lab, kind: str, to: str) -> None:
    tell = "def tell(n):\n    print(f'pooled pid={os.getpid()}.', flush=True)\n    time.sleep(0.2)\n"
    head = tell + POOLS[kind] + "list(pool.map(tell, range(4)))\n"
    run = lab.run(loop(head=head, after="time.sleep(0.1)"), interval="1h", env={Env.LOGS: "off"})
    run.until("step=3/")
    known = {int(word.split(".")[0]) for word in run.log.split("pooled pid=")[1:]}
    if to == "process":
        run.send()
    else:
        strike(run)
    assert run.end() == ExitCode.INTERRUPTED, run.log
    assert known and all(gone(pid) for pid in known)
    assert not in_group(run.pid), "a pool has replaced its dead workers"


def in_group(group: int, seconds: float = 5) -> list[int]:
    """Processes of it that are left after a while."""
    give_up = time.monotonic() + seconds
    while found := [pid for pid in pids() if alive_in(pid, group)]:
        if time.monotonic() > give_up:
            break
        time.sleep(0.05)
    return found


def pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def alive_in(pid: int, group: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return words[0] != "Z" and int(words[2]) == group


FOREIGN = "import time\nprint('works', flush=True)\ntime.sleep(60)\n"
USES = {
    "in the script": "import spottrain\n",
    "in a module": "import its_own\n",
    "in a function of a module": "from its_own import run\n",
}


def test_a_script_without_spottrain_that_is_told_to_stop_has_saved_nothing_and_is_told_what_to_do(
    start: Start,
) -> None:
    run = start(FOREIGN, *OURS, "train.py").until("works").send().ends(ExitCode.INTERRUPTED_LOST)
    assert run.message.outcome is Outcome.INTERRUPTED_LOST
    assert "does not use spottrain" in run.message.message and "spottrain.Run" in run.message.message


@pytest.mark.parametrize("how", sample(USES, "in a function of a module"))
def test_a_script_that_has_yet_to_begin_its_training_has_lost_nothing(
    start: Start, tmp_path: Path, how: str
) -> None:
    (tmp_path / "its_own.py").write_text("import spottrain\nrun = print\n")
    start(USES[how] + FOREIGN, *OURS, "train.py").until("works").stopped()
