"""What a Guard takes up and what it leaves behind: parts that come and go between attempts, trackers
that have all, the average as the final weights, a word where it ended short. Real processes."""

from __future__ import annotations

from typing import Any

import pytest
from spottrain.contract import ExitCode

from tests.runs.conftest import Lab

HEAD = """\
import os, signal, sys, time
import torch
import spottrain
from spottrain.levers import EMA, Trackers

spottrain.seed(1)
STOP = int(os.environ.get("STOP", "0"))
dataset = [torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(32)]
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = spottrain.data.loader(dataset, batch_size=4)


def train(batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    if guard.step + 1 == STOP:
        os.kill(os.getpid(), signal.SIGTERM)
    return loss


"""


def ended(lab: Lab, code: ExitCode, script: str, **words: Any) -> Any:
    run = lab.run(script, **words)
    assert run.end() == code, run.log
    return run


# --- what comes and goes between attempts -----------------------------------------------------------------
PARTS = (
    HEAD
    + """\
given = {
    "scaler": lambda: torch.amp.GradScaler("cpu"),
    "off": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "scheduler": lambda: torch.optim.lr_scheduler.ConstantLR(optimizer),
    "ema": lambda: {"ema": EMA(model)},
    "teacher": lambda: {"teacher": torch.nn.BatchNorm1d(4)},
    "no ema": lambda: {"ema": None},
    "no teacher": lambda: {"teacher": None},
}
kind, _, name = os.environ["GIVE"].partition("=")
parts = {kind: given[name]() if name else None} if kind else {}
guard = spottrain.Guard(model=model, optimizer=optimizer, data=loader, max_steps=5, **parts)
for batch in guard.batches(loader):
    guard.advance(loss=train(batch))
guard.finish()
"""
)
THERE = "checkpoint=there script=none"
ANEW = 'checkpoint=none script="begins anew"'


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        ("scaler=scaler", "scaler=", f"setting=scaler {THERE}"),
        ("scaler=scaler", "scaler=off", f"setting=scaler {THERE}"),
        ("scaler=", "scaler=scaler", f"setting=scaler {ANEW}"),
        ("scaler=off", "scaler=", None),
        ("extra=teacher", "extra=no teacher", f"setting=extra.teacher {THERE}"),
    ],
)
def test_what_may_come_and_go_does_so_and_is_told(lab: Lab, first: str, then: str, told: str | None) -> None:
    ended(lab, ExitCode.INTERRUPTED, PARTS, env={"GIVE": first, "STOP": "2"}, attempt=1)
    run = ended(lab, ExitCode.DONE, PARTS, env={"GIVE": then}, attempt=2)
    overrides = [line.split("event=override ")[1] for line in run.log.splitlines() if "=override" in line]
    assert overrides == ([] if told is None else [told])


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        (
            "scheduler=scheduler",
            "scheduler=",
            "state of scheduler, which the Guard here is not given: give it, for",
        ),
        (
            "extra=ema",
            "extra=",
            "extra.ema, which the Guard here is not given: give it, or extra={'ema': None} to",
        ),
        (
            "extra=teacher",
            "",
            "extra.teacher, which the Guard here is not given: give it, or extra={'teacher': N",
        ),
    ],
)
def test_what_would_change_the_training_is_refused_with_what_helps(
    lab: Lab, first: str, then: str, says: str
) -> None:
    ended(lab, ExitCode.INTERRUPTED, PARTS, env={"GIVE": first, "STOP": "2"}, attempt=1)
    run = ended(lab, ExitCode.BAD_CONFIGURATION, PARTS, env={"GIVE": then}, attempt=2)
    assert says in run.message.message


# --- trackers -------------------------------------------------------------------------------------------
TRACKED = (
    HEAD
    + """\
class Slow:
    name = "slow"

    def begin(self, run_id, resumed_step):
        time.sleep(0.5)

    def log(self, step, values):
        print("tracked", step, flush=True)

    def close(self):
        print("tracker closed", flush=True)


trackers = Trackers([Slow()])
extra = {"trackers": trackers}
with spottrain.Guard(model=model, optimizer=optimizer, data=loader, extra=extra, max_steps=8) as guard:
    trackers.begin("run", guard.step)
    for batch in guard.batches(loader):
        loss = train(batch)
        trackers.log(guard.step + 1, {"loss": loss})
        if "FAIL" in os.environ and guard.step + 1 == 3:
            raise ValueError("a bug of the script")
        guard.advance(loss=loss)
    guard.finish()
trackers.log(9, {"test": 1.0})
"""
)


@pytest.mark.parametrize(
    ("env", "code", "last", "after"),
    [
        ({}, ExitCode.DONE, 8, "event=done"),
        ({"STOP": "5"}, ExitCode.INTERRUPTED, 5, "event=end outcome=interrupted"),
        ({"FAIL": "1"}, ExitCode.FAILED, 3, "event=released"),
    ],
    ids=["finished", "interrupted", "failed"],
)
def test_a_slow_tracker_has_every_line_after_what_was_trained_is_safe(
    lab: Lab, env: dict[str, str], code: ExitCode, last: int, after: str
) -> None:
    run = ended(lab, code, TRACKED, env=env)
    assert [line for line in run.log.splitlines() if line.startswith("tracked")] == [
        f"tracked {step}" for step in range(1, last + 1)
    ]
    assert run.log.index(after) < run.log.index("tracker closed")
    late = [line for line in run.log.splitlines() if "event=tracker-closed" in line]
    assert len(late) == (code == ExitCode.DONE) and all("step=9 " in line for line in late)
