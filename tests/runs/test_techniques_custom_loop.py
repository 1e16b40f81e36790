"""Techniques with a state, given to a `Run`: interrupted and resumed they are as if never interrupted, also
when a sharded run of two ranks goes on with one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from spottrain.contract import ExitCode

from tests.runs.conftest import Lab
from tests.runs.launched import Run
from tests.support.heavy import sample

SCRIPT = """\
import json, os, signal, sys, time
import torch
import spottrain
from spottrain.techniques import EMA, EarlyStopping, Trackers, optimizers
from spottrain.checkpoint.final_weights import digest

spottrain.seed(3)
STEPS, STOP = 24, int(os.environ.get("STOP", "0"))


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x, x.sum()


def whole(mean):
    return mean.full_tensor() if hasattr(mean, "full_tensor") else mean


def say(what, step):
    average = digest({name: whole(mean) for name, mean in ema.state_dict()["average"].items()})
    state = {"ema": average, "stopping": stopping.state_dict(), "trackers": trackers.state_dict()}
    sys.stdout.write(what + " " + json.dumps(state | {"step": step}) + "\\n")
    sys.stdout.flush()


model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
model = spottrain.shard(model, layers=[torch.nn.Linear])
optimizer = optimizers.make("adamw", model.parameters(), learning_rate=0.01, weight_decay=0.1)
ema = EMA(model, decay=0.9)
stopping = EarlyStopping(patience=2, min_delta=10.0)
trackers = Trackers([])
trackers.begin("run", 0)
loader = spottrain.data.loader(Numbers(), batch_size=4, shuffle=True)
extra = {"ema": ema, "stopping": stopping, "trackers": trackers}
run = spottrain.Run(model=model, optimizer=optimizer, data=loader, extra=extra, max_steps=STEPS)
say("begin", run.global_step)
for x, y in run.batches(loader):
    loss = torch.nn.functional.mse_loss(model(x).squeeze(-1), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step = run.global_step + 1
    ema.update(step)
    trackers.log(step, {"loss": loss})
    if step % 4 == 0:
        with ema.applied():
            model(x)
        stopping.note(step, {"loss": 1.0})
    say("at", step)
    if step == STOP:
        os.kill(os.getpid(), signal.SIGTERM)
    if STOP and step >= STOP:
        time.sleep(0.05)  # all ranks must come to hear of it before the end
    run.step_completed(loss=loss)
say("end", run.global_step)
run.finish()
"""


def said(run: Run, what: str) -> list[Any]:
    lines = [line for line in run.log.splitlines() if line.startswith(f"{what} ")]
    return [json.loads(line.removeprefix(f"{what} ")) for line in lines]


def ended(runs: list[Run], code: ExitCode) -> Run:
    assert [run.end() for run in runs] == [code] * len(runs), "\n".join(run.log for run in runs)
    return runs[0]


@pytest.mark.parametrize("ranks", sample([1, 2], 2))
def test_interrupted_they_are_as_if_never_interrupted(lab: Lab, ranks: int) -> None:
    whole = ended(lab.ranks(ranks, SCRIPT, at="whole", attempt=1), ExitCode.DONE)
    ended(lab.ranks(ranks, SCRIPT, at="cut", attempt=1, env={"STOP": "6"}), ExitCode.INTERRUPTED)
    second = ended(lab.ranks(ranks, SCRIPT, at="cut", attempt=2), ExitCode.DONE)
    (begun,), (end,) = said(second, "begin"), said(second, "end")
    assert 6 <= begun["step"] < 24
    assert [end] == said(whole, "end")
    assert "did not improve by more than 10 in 5 evaluation(s)" in end["stopping"]["reason"]


def test_a_sharded_average_goes_on_with_one_rank(lab: Lab) -> None:
    first = ended(lab.ranks(2, SCRIPT, attempt=1, env={"STOP": "6"}), ExitCode.INTERRUPTED)
    alone = ended(lab.ranks(1, SCRIPT, attempt=2), ExitCode.DONE)
    (begun,) = said(alone, "begin")
    assert begun == next(each for each in said(first, "at") if each["step"] == first.message.durableStep)
