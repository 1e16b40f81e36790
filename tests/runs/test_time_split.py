"""Where the seconds of real small trainings went: each slow thing shows up in its own part, and nowhere else.

What is slow sleeps, which it does for so long at least, so a part has a lower bound. The parts add up to the
age of the process, which is measured apart from it, so nothing is in two of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from spottrain.contract import Env, ExitCode, Outcome, TimeSplit

from tests.runs.conftest import Lab, progress_of, served
from tests.runs.launched import Run
from tests.runs.test_run_ranks import SCRIPT as RANKS
from tests.support.heavy import sample
from tests.support.ports import free_port

SLACK: Final = 0.03
"""Seconds: /proc and the file system count in units of 10 ms and 4 ms."""

SCRIPT = """\
import atexit, os, sys, time
import torch, spottrain
from spottrain.storage.local import FolderStore

NAMES = ("BEFORE", "DATA", "STEP", "EVAL", "READ", "AFTER")
SLEEP = {name: float(os.environ.get(name, "0")) for name in NAMES}
read_into = FolderStore.read_into


def slow_read(*arguments, **options):
    time.sleep(SLEEP["READ"])
    return read_into(*arguments, **options)


FolderStore.read_into = slow_read


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        time.sleep(SLEEP["DATA"])
        return torch.randn(4, generator=torch.Generator().manual_seed(i))


spottrain.seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
time.sleep(SLEEP["BEFORE"])
"""

TRAINER = (
    SCRIPT
    + """\
BEST_AT = 8


def loss(model, batch):
    time.sleep(SLEEP["STEP" if model.training else "EVAL"])
    return model(batch).square().mean() + (0 if model.training else abs(trainer.step - BEST_AT))


trainer = spottrain.Trainer(
    model=model,
    optimizer=optimizer,
    train_dataset=Noise(),
    eval_dataset=[torch.zeros(4)] * 12 if "EVAL" in os.environ else None,
    eval_every=4,
    loss_fn=loss,
    max_steps=12,
    global_batch_size=4,
    log_every=1,
)
print(f"fit-at={time.time()}", flush=True)
trainer.fit()
time.sleep(SLEEP["AFTER"])
print(f"end-at={time.time()}", flush=True)
"""
)

OWN_LOOP = (
    SCRIPT
    + """\
HOW = os.environ["HOW"]
if HOW == "plain":
    sampler = spottrain.data.BatchSampler(Noise(), batch_size=4)
    loader = torch.utils.data.DataLoader(Noise(), batch_sampler=sampler)
else:
    loader = spottrain.data.loader(Noise(), batch_size=4)
run = spottrain.Run(model=model, optimizer=optimizer, data=loader, max_steps=12, log_every=1)


def step(batch):
    time.sleep(SLEEP["STEP"])
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return run.step_completed(loss=loss)


if HOW == "batches":
    for batch in run.batches(loader):
        step(batch)
elif HOW == "ahead":
    batches = run.ahead(loader)
    while not run.done:
        step(next(batches))
else:
    while not run.done:
        for batch in loader:
            if not step(batch):
                break
run.finish()
print(f"end-at={time.time()}", flush=True)
"""
)

END_OF_FIRST = 'if os.environ["RANK"] == "0":\n    print(f"end-at={time.time()}", flush=True)\n'


class Timed:
    """A run, and when its process started: between two moments of this test's own clock."""

    def __init__(self, start: Callable[[], Run]) -> None:
        self._not_before = time.time()
        self.run = start()
        self._not_after = time.time()

    def split(self) -> TimeSplit:
        """That of the message at the end. Its total must be the age of the process when it was written."""
        split = self.run.message.timeSplit
        assert split is not None, self.run.words
        written = self.run._message.stat().st_mtime
        last = float(self.run.log.rsplit("end-at=", 1)[1].split()[0]) if "end-at=" in self.run.log else 0.0
        assert split.total <= (written - self._not_before) * 1.001 + SLACK
        assert split.total >= (last - self._not_after) * 0.999 - SLACK
        assert 0 <= split.unsaved <= split.productive
        return split


def timed(lab: Lab, script: str = TRAINER, **more: Any) -> Timed:
    return Timed(lambda: lab.run(script, **more))


def done(lab: Lab, script: str = TRAINER, **more: Any) -> TimeSplit:
    it = timed(lab, script, **more)
    it.run.done()
    return it.split()


def moment(run: Run, name: str) -> float:
    return float(run.until(f"{name}=").log.rsplit(f"{name}=", 1)[1].split()[0])


# --- each slow thing in its own part ----------------------------------------------------------------------
def test_steps_data_and_what_is_before_and_after_them(lab: Lab) -> None:
    split = done(lab, env={"BEFORE": "0.5", "DATA": "0.04", "STEP": "0.02", "AFTER": "0.3"})
    assert split.startup >= 0.5 + 4 * 0.04 + 0.02, "with the first step"
    assert split.dataWait >= 11 * 4 * 0.04 and split.productive >= 11 * 0.02
    assert split.other >= 0.3
    assert split.productive < split.dataWait, "the waits are in one part"
    assert split.unsaved == 0 and split.restore < split.startup, "nothing is read but two short lists"


def test_an_evaluation_is_productive_and_also_the_one_that_a_stop_has_put_off(lab: Lab) -> None:
    first = lab.run(TRAINER, env={"EVAL": "1"}).until(" step=4/").stopped()
    assert "event=evaluated" not in first.log, "else it shows nothing"
    it = timed(lab, attempt=2, env={"EVAL": "0.05"})
    it.run.done()
    assert it.run.log.index("event=evaluated step=4 ") < it.run.log.index(" step=5/")
    assert it.split().productive >= 3 * 3 * 0.05


@pytest.mark.heavy
def test_a_slow_store_is_a_stall_where_a_save_must_be_durable_before_the_end(lab: Lab) -> None:
    split = done(lab, env={"STEP": "0.02"}, uploads="time.sleep(0.5)")
    assert split.checkpointStall >= 0.5


@pytest.mark.heavy
def test_a_slow_read_is_a_restore(lab: Lab) -> None:
    lab.run(TRAINER, env={"STEP": "0.05"}).until(" step=5/").stopped()
    split = done(lab, attempt=2, env={"READ": "0.5", "BEFORE": "0.3"})
    assert split.restore >= 0.5 and split.startup >= 0.3


@pytest.mark.heavy
def test_a_gate_is_waited_at(lab: Lab) -> None:
    lab.run(TRAINER, env={"STEP": "0.2"}).until("event=committed step=7 ").killed()
    until = time.time() + 4
    it = timed(lab, attempt=2, env={Env.GATE_UNTIL: str(until)})
    it.run.done()
    began = moment(it.run, "fit-at")
    assert began < until, "else it shows nothing"
    assert it.split().waiting >= until - began - 1, "HEAD is looked at each second"


# --- custom loops -------------------------------------------------------------------------------------------
@pytest.mark.heavy
@pytest.mark.parametrize("how", sample(("batches", "ahead", "loader"), "loader"))
def test_a_custom_loop_that_takes_its_batches_from_us_tells_how_long_it_waits(lab: Lab, how: str) -> None:
    split = done(lab, OWN_LOOP, env={"HOW": how, "DATA": "0.04", "STEP": "0.02"})
    assert split.dataWait >= 11 * 4 * 0.04 and split.productive >= 11 * 0.02
    assert split.productive < split.dataWait


@pytest.mark.heavy
def test_waits_of_a_loop_over_a_plain_loader_are_not_known_and_count_as_productive(lab: Lab) -> None:
    split = done(lab, OWN_LOOP, env={"HOW": "plain", "DATA": "0.03", "STEP": "0.02"})
    assert split.dataWait == 0 and split.productive >= 11 * (4 * 0.03 + 0.02)


# --- what is saved ------------------------------------------------------------------------------------------
def test_work_is_unsaved_until_its_checkpoint_is_durable(lab: Lab) -> None:
    go_on = "while not __import__('os').path.exists('go'): time.sleep(0.01)"
    env = {"STEP": "0.1", Env.PROGRESS_PORT: "0"}
    run = lab.run(TRAINER, interval="4steps", uploads=go_on, env=env).until("putting", " step=8/")
    split = progress_of(run).timeSplit
    assert split is not None and split.unsaved == split.productive >= 7 * 0.1
    (lab.folder / "go").touch()
    run.until("event=committed step=4 ")
    now = progress_of(run).timeSplit
    assert now is not None and now.productive - now.unsaved >= 3 * 0.1, "the first step is start-up"
    assert 'spottrain_seconds_total{part="productive"} ' in served(run, "metrics")
    run.stopped()
    assert run.message.timeSplit is not None
    assert run.message.durableStep == run.message.step
    assert run.message.timeSplit.unsaved < split.unsaved, "at most the step that the stop cut short"


def test_what_is_not_saved_is_lost_without_a_store(lab: Lab) -> None:
    run = lab.run(TRAINER, at="", env={"STEP": "0.1"}).until(" step=6/").send()
    assert run.end() == ExitCode.INTERRUPTED_LOST
    split = run.message.timeSplit
    assert split is not None and split.unsaved == split.productive >= 5 * 0.1


# --- several ranks ------------------------------------------------------------------------------------------
@pytest.mark.heavy
def test_ranks_count_from_the_start_of_their_launcher(lab: Lab) -> None:
    script = RANKS + END_OF_FIRST
    split = done(lab, script, nproc=2, env={"PAUSE": "0.03"})
    assert split.productive > 0 and split.waiting > 0, "for the other rank"


def listens(port: int) -> bool:
    """Whether a process on this machine listens on the port: /proc lists it in the state 0A."""
    text = "".join(path.read_text() for path in Path("/proc/net").glob("tcp*"))
    lines = [line.split() for line in text.splitlines()]
    return any(words[1].endswith(f":{port:04X}") and words[3] == "0A" for words in lines)


@pytest.mark.heavy
@pytest.mark.parametrize("logs", sample(("off", "keep"), "keep"))
def test_a_pod_waits_for_the_others_also_before_it_starts_its_ranks(lab: Lab, logs: str) -> None:
    """With `keep` the launcher is another process than the rank."""
    lab.logs, port = logs, free_port()
    env: dict[str, str] = {Env.WORKERS: "2", Env.RENDEZVOUS: f"localhost:{port}"}
    script = RANKS + END_OF_FIRST
    it = timed(lab, script, attempt=1, env=env | {Env.WORKER_INDEX: "0"})
    give_up = time.monotonic() + 60
    while not listens(port + 1):
        assert time.monotonic() < give_up, it.run.log
        time.sleep(0.01)
    time.sleep(0.5)
    other = lab.run(script, attempt=1, env=env | {Env.WORKER_INDEX: "1"})
    it.run.done()
    other.done()
    assert it.split().waiting >= 0.5 and it.split().productive > 0


# --- the best evaluation, and who reports nothing -----------------------------------------------------------
def best(run: Run) -> int:
    """The step of the lowest loss in the log."""
    lines = [line.split() for line in run.log.splitlines() if "event=evaluated" in line]
    found = [dict(word.split("=", 1) for word in words if "=" in word) for words in lines]
    return int(min(found, key=lambda each: float(each["eval_loss"]))["step"])


@pytest.mark.heavy
def test_the_step_of_the_best_evaluation_is_known_to_later_attempts(lab: Lab) -> None:
    env = {"EVAL": "0.01", "STEP": "0.1"}
    first = lab.run(TRAINER, interval="1steps", env=env).until(" step=9/").stopped()
    assert first.message.bestStep == best(first) == 8
    again = lab.run(TRAINER, env=env, attempt=2).done()
    assert best(again) == 12 and again.message.bestStep == 8


def test_a_script_without_our_training_has_no_split(lab: Lab) -> None:
    run = lab.run("print('nothing')\n").done()
    assert run.message.outcome is Outcome.UNTRAINED
    assert "timeSplit" not in json.loads(run.words)


def test_an_image_that_saves_by_itself_has_no_split_even_if_it_fails(lab: Lab) -> None:
    run = lab.run("raise ValueError\n", at="").ends(ExitCode.FAILED)
    assert run.message.timeSplit is None


def test_a_script_that_fails_before_its_training_has_only_started(lab: Lab) -> None:
    run = lab.run("import time\ntime.sleep(0.5)\nraise ValueError\n").ends(ExitCode.FAILED)
    split = run.message.timeSplit
    assert split is not None and split.startup == split.total >= 0.5
