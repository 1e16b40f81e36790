"""A training that is slow for a known reason is told that reason. Each is real, in processes of its own."""

from __future__ import annotations

import random
import re

import pytest
import torch
from spottrain.diagnostics.bottleneck import Measurements, Name, Verdict, diagnose
from spottrain.diagnostics.flops import counted
from spottrain.techniques.compilation import compilations

from tests.runs.conftest import SCRIPT, Lab
from tests.runs.test_techniques_ranks import BEGIN, found
from tests.support.slowtrainings import ALONE, TOGETHER, facts_of, play


def test_there_is_a_training_for_every_verdict() -> None:
    assert {*ALONE, *TOGETHER} == set(Name)


def require_told(name: Name, verdict: Verdict | None, facts: Measurements) -> None:
    assert verdict is not None and verdict.name is name, f"{verdict} of {facts}"
    assert sum(facts.shares.shares.values()) == pytest.approx(1)


@pytest.mark.heavy
@pytest.mark.parametrize("name", Name)
def test_a_slow_training_is_told_why(name: Name) -> None:
    require_told(name, *play(name, seed=7))


@pytest.mark.heavy
def test_a_slow_dataset_is_told_in_this_process_too() -> None:
    facts = facts_of(ALONE[Name.DATA](random.Random(7)))
    require_told(Name.DATA, diagnose(facts), facts)


HOOKED = (
    BEGIN
    + """
from spottrain.diagnostics.step_timer import StepTimer


def trained(split):
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(4)))
    replica = DDP(model, bucket_cap_mb=0.05)
    if split is not None:
        replica.register_comm_hook(None, split.timed())
    torch.manual_seed(world.rank)
    for _ in range(2):  # after the first step DDP sorts its buckets again
        model.zero_grad()
        loss = replica(torch.randn(8, 100)).square().mean()
        if split is None:
            loss.backward()
            continue
        with split.backward():
            loss.backward()
        split.step_done()
    return torch.cat([each.grad.flatten() for each in model.parameters()])


split = StepTimer(torch.device("cpu"))
same = torch.equal(trained(None), trained(split))
seconds = split.whole()
say(same=same, communication=seconds.communication, compute=seconds.compute)
"""
)


def test_a_timed_hook_changes_no_bit_of_ddps_gradients_and_sees_the_exchange(lab: Lab) -> None:
    """Three ranks: to divide by three, and to multiply by its reciprocal, is not the same."""
    for rank in found(lab, HOOKED, ranks=3):
        assert rank["same"] and rank["communication"] > 0 and rank["compute"] > 0


@pytest.mark.heavy
def test_a_compiled_model_is_counted_uncompiled_and_stays_compiled() -> None:
    model = torch.nn.Linear(8, 8)
    compiled = torch.compile(model, backend="eager")
    batch = torch.randn(4, 8)
    before = compilations()
    compiled(batch)
    after = compilations()
    assert after.since(before).count == 1 and after.since(before).seconds > 0
    with counted() as work:
        compiled(batch)
    assert work.flops == 2 * 4 * 8 * 8
    compiled(batch)
    assert compilations() == after


OF_A_GPU = """
from spottrain.diagnostics import gpu_monitor, monitor

class Sampler(gpu_monitor.GPUMonitor):
    def __init__(self, device, on_sample):
        read = lambda: gpu_monitor.GPUSample(utilisation=0.73, memory=0.25)
        super().__init__(device, every=0.01, read=read, on_sample=on_sample)

monitor.GPUMonitor = Sampler
"""


def test_how_busy_and_how_full_the_gpu_is_comes_to_the_metrics(lab: Lab) -> None:
    shown = "\nprint(trainer.session.board.metrics(), trainer.session.board.progress().to_json())\n"
    script = OF_A_GPU + SCRIPT + shown
    run = lab.run(script=script, env={"PAUSE": "0.02"})  # over before there is a look
    run.done()
    assert re.search(r"spottrain_gpu_utilisation 0\.7[23]", run.log), run.log
    assert "spottrain_gpu_memory 0.25" in run.log
