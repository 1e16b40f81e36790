"""What the planner answers to the questions of the article "Training Cost Optimization"."""

from __future__ import annotations

import math

import pytest
from spottrain.core.gpu_catalogue import GPUS
from spottrain_cli.planner import communication, compute_optimal, memory
from spottrain_cli.planner.breakdown import Bill, Lever, Part, breakdown
from spottrain_cli.planner.communication import Topology, ring_seconds
from spottrain_cli.planner.compute_optimal import Allocation
from spottrain_cli.planner.instances import instances
from spottrain_cli.planner.transformer import MODELS


def test_an_allocation_keeps_the_compute_that_it_is_for() -> None:
    """The article's needs 2.65 times as much, and has a third of 20 tokens per parameter."""
    theirs = Allocation(parameters=0.2536 * 1e21**0.4995, tokens=1.7424 * 1e21**0.5005)
    assert (theirs.flops / 1e21, theirs.tokens_per_parameter) == pytest.approx((2.65, 7.21), abs=0.01)
    for ours in (compute_optimal.rule_of_thumb(1e21), compute_optimal.least_loss(1e21)):
        assert ours.flops == pytest.approx(1e21)
        assert ours.parameters == pytest.approx(2.85e9, rel=0.03)
        assert 19 < ours.tokens_per_parameter < 23


def test_the_refit_agrees_with_its_paper_and_with_chinchilla_itself() -> None:
    small, large = compute_optimal.least_loss(1e19), compute_optimal.least_loss(5.76e23)
    assert (round(small.parameters / 1e9, 2), round(small.tokens_per_parameter)) == (0.26, 24)
    assert (round(large.parameters / 1e9), round(large.tokens_per_parameter)) == (72, 18)
    for flops in (1e18, 1e21, 1e24):
        best = compute_optimal.least_loss(flops)
        for factor in (0.8, 1.25):  # a minimum along 6 N D = C
            other = Allocation(parameters=best.parameters * factor, tokens=best.tokens / factor)
            assert best.loss < other.loss


def test_of_unequal_compute_the_optimum_is_larger_and_not_smaller() -> None:
    theirs, proposed = Allocation(parameters=7e9, tokens=500e9), Allocation(parameters=3e9, tokens=1e12)
    optimal = compute_optimal.rule_of_thumb(theirs.flops)
    assert (round(optimal.parameters / 1e9, 1), round(optimal.tokens / 1e9)) == (13.2, 265)
    assert optimal.loss < theirs.loss < proposed.loss


@pytest.mark.parametrize(
    ("rate", "gpus", "gbps", "printed", "put_right"),
    [(850, 8, 600, 23.7, 71.3), (250, 4, 64, 11.6, 51.2)],
    ids=["NVLink 8 x A100", "PCIe 4 x T4"],
)
def test_an_all_reduce_by_gigabits_and_by_gigabytes(
    rate: float, gpus: int, gbps: float, printed: float, put_right: float
) -> None:
    for bandwidth, percent in ((gbps * 1e9 / 8, printed), (gbps * 1e9, put_right)):
        exchange = ring_seconds(4 * 1.3e9, gpus, bandwidth)
        assert 100 * communication.efficiency(32 / rate, exchange, hidden_share=0) == pytest.approx(
            percent, abs=0.05
        )


def test_ddp_sends_beside_the_backward_pass_and_checkpointing_sends_no_less() -> None:
    link = GPUS["A100-40GB"].link
    assert link == 300e9, "600 GB/s is the sum of both directions"
    topology = Topology(nodes=1, gpus_per_node=8, link=link, network=math.inf)
    fp32, compute = communication.all_reduce_seconds(4 * 1.3e9, topology), 32 / 850
    exchange, hidden = communication.step_exchange(1.3e9, topology, mode="plain", accumulation=1)
    assert exchange == fp32
    found = [communication.efficiency(compute, fp32, hidden_share=share) for share in (0, hidden)]
    assert found == pytest.approx([0.55, 0.82], abs=0.01)
    assert communication.efficiency(compute, fp32 / 2, hidden_share=hidden) == 1, "bf16 is hidden whole"
    said = communication.advice(efficiency=0.55, topology=topology, gradient_bytes=4, accumulation=1)
    assert "bf16" in said[0] and "accumulate" in said[1]
    assert not any("checkpointing" in each for each in said)


def test_levers_act_on_what_the_ones_before_them_have_left() -> None:
    p4d = next(each for each in instances() if each.name == "p4d.24xlarge")
    assert p4d.devices == 8 and p4d.gpu == "A100-40GB", "its price is that of eight"
    levers = [
        Lever(name="spot", part=Part.PRICE, factor=13_512 / 37_748),
        Lever(name="bf16", part=Part.HOURS, factor=48 / 72),
        Lever(name="larger batch", part=Part.HOURS, factor=40 / 48),
        Lever(name="early stopping", part=Part.RUNS, factor=(20 + 4 * 0.6) / 24),
    ]
    before = Bill(price=37_748 / 72, hours=72, runs=24)
    bills = breakdown(before, levers)
    assert [round(bill.run) for bill in bills] == [13_512, 9_008, 7_507, 7_507]
    assert (round(before.total), round(bills[-1].total)) == (905_952, 168_149)


def test_the_memory_of_bert_in_fp32_with_materialized_scores() -> None:
    """The article's ~24 GB -> ~5 GB, 12 layers, 512 tokens, 32 samples; half of it with bf16 and fused."""

    def activations(precision: str, mode: str, attention: str) -> float:
        need = memory.estimate(MODELS["bert-base"], precision=precision, mode=mode, attention=attention)
        return 32 * (need.per_sample + need.recomputed) / 1e9

    assert activations("fp32", "plain", "math") == pytest.approx(24, rel=0.1)
    assert activations("fp32", "checkpointed", "math") == pytest.approx(5, rel=0.4)
    assert activations("bf16", "plain", "fused") < 12
    assert activations("bf16", "checkpointed", "fused") < 7
