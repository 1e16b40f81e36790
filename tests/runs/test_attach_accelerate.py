"""A loop around Accelerate that saves its own state, under `spottrain run`: there is nothing to attach to."""

from __future__ import annotations

import pytest
from spottrain.contract import Env, ExitCode, Outcome

from tests.runs.conftest import Start
from tests.runs.launched import OURS

pytest.importorskip("accelerate")

SCRIPT = """\
import os, time
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
if os.path.isdir("state"):
    accelerator.load_state("state")
for step in range(3):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    accelerator.save_state("state")
print("saved", flush=True)
time.sleep(float(os.environ.get("REST", "0")))
"""


def test_it_runs_as_it_is_and_is_told_once_what_to_do(start: Start) -> None:
    run = start(SCRIPT, *OURS, "train.py").done()
    assert run.message.outcome is Outcome.UNTRAINED
    assert run.log.count("event=advice about=attach") == 1
    assert "no training loop to attach to" in run.log
    assert "AccelerateRun" in run.log and "spottrain sync" in run.log


def test_stopped_it_does_not_claim_that_nothing_was_lost(start: Start) -> None:
    run = start(SCRIPT, *OURS, "train.py", REST="60", **{Env.JOB_UID: "uid"})
    run.until("saved").send().ends(ExitCode.INTERRUPTED_LOST)
    assert "nothing that train.py has done was saved" in run.message.message
