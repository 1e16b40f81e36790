"""What a Guard leaves behind when a loop of one's own ends: trackers that have all, the average as the final
weights, a word where it ended short. Real processes."""

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
