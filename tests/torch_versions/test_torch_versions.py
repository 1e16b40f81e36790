"""Another torch than that of all other tests: exact within a version; checkpoints load across versions."""

from __future__ import annotations

import json
import signal
import subprocess
from itertools import cycle
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, Outcome

from tests.runs.conftest import SCRIPT
from tests.torch_versions.conftest import Train, losses, version_of

SHARDED = SCRIPT.replace("trainer = ", "spottrain.shard(model, [torch.nn.Linear])\ntrainer = ", 1)
STEADY = SCRIPT.replace("0.01 * torch.randn(4)", "0").replace("Dropout(0.1)", "Dropout(0.0)")
"""Without random numbers in a step: another version of torch may draw others from the same state."""
OWN_LOOP = """\
import torch, spottrain

spottrain.seed(3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.randn(4), torch.randn(1)) for _ in range(40)]
loader = spottrain.data.loader(data, 4, shuffle=True)
run = spottrain.Run(model=model, optimizer=optimizer, data=loader, max_steps=24, log_every=1)
for x, y in run.batches(loader):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.step_completed(loss=loss)
run.finish()
"""
CASES = {
    "plain": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "auto": {"precision": "auto"},
    "accumulated, averaged": {"microBatchSize": 2, "emaDecay": 0.9},
    "checkpointed, adafactor": {
        "activationCheckpointing": {"policy": "all"},
        "optimizer": {"name": "adafactor", "learningRate": 0.01},
    },
}


def test_the_environment_has_the_wheel_and_the_torch_that_was_asked_for(other: Path) -> None:
    shows = "import spottrain, torch; print(spottrain.__file__, torch.__version__)"
    shown = subprocess.run([other, "-c", shows], capture_output=True, text=True, check=True, cwd="/").stdout
    file, version = shown.split()
    assert "site-packages" in file and Path(file).is_relative_to(other.parents[1])
    assert version.split("+")[0] == version_of(other)


@pytest.mark.parametrize(("case", "signum"), list(zip(CASES, cycle([signal.SIGKILL, signal.SIGTERM]))))
def test_a_killed_training_goes_on_bit_for_bit(
    train: Train, other: Path, case: str, signum: signal.Signals
) -> None:
    settings = {Env.TRAINING: json.dumps(CASES[case]), Env.CHECKPOINT_INTERVAL: "4steps"}
    alone = train(other, SCRIPT, at="alone", **settings).done()
    first = train(other, SCRIPT, PAUSE="0.1", **settings).until(" step=9/24", "event=committed step=4")
    first.send(signum).ends(ExitCode.INTERRUPTED if signum == signal.SIGTERM else -signum)
    second = train(other, SCRIPT, **settings).done()
    assert second.message.startStep and len(losses(alone)) == 24
    assert losses(first, second) == losses(alone)


@pytest.mark.parametrize("script", [SCRIPT, SHARDED], ids=["DDP", "FSDP2"])
def test_two_ranks_go_on_bit_for_bit(train: Train, other: Path, script: str) -> None:
    if script == SHARDED and version_of(other).startswith("2.6."):
        pytest.skip("FSDP2 of torch 2.6 needs a GPU: its all-gather records an event of a CUDA stream")
    alone = train(other, script, "--nproc", "2", at="alone").done()
    first = train(other, script, "--nproc", "2", PAUSE="0.1").until(" step=5/24").stopped()
    second = train(other, script, "--nproc", "2").done()
    assert second.message.startStep == first.message.step
    assert losses(first, second) == losses(alone) and len(losses(alone)) == 24


def test_a_loop_of_ones_own_goes_on(train: Train, other: Path) -> None:
    loop = OWN_LOOP.replace("    loss = ", "    import time; time.sleep(0.1)\n    loss = ")
    first = train(other, loop, **{Env.CHECKPOINT_INTERVAL: "1h"}).until("step=5").stopped()
    second = train(other, OWN_LOOP).done()
    assert second.message.startStep == first.message.step and second.message.step == 24


@pytest.mark.parametrize(
    ("case", "older_first"), [("plain", True), ("plain", False), ("checkpointed, adafactor", True)]
)
def test_a_checkpoint_of_one_version_goes_on_in_another(
    train: Train, other: Path, ours: Path, case: str, older_first: bool
) -> None:
    one, two = (other, ours) if older_first else (ours, other)
    assert version_of(one) != version_of(two)
    settings = {Env.TRAINING: json.dumps(CASES[case])}
    alone = train(one, STEADY, at="alone", **settings).done()
    first = train(one, STEADY, PAUSE="0.1", **settings).until(" step=9/24").stopped()
    second = train(two, STEADY, **settings).done()
    assert second.message.outcome is Outcome.DONE and second.message.step == 24
    assert second.message.startStep == first.message.step
    expected, found = losses(alone), losses(first, second)
    assert found.keys() == expected.keys()
    for step in expected:
        assert float(found[step]) == pytest.approx(float(expected[step]), rel=1e-3), step
