"""The numbers of the article "Training Cost Optimization", each with what is wrong with it, beside ours.

The article's own formulas are written here once more, in as few lines as show them. A test fails if either
side changes: the article's number, or our answer to the same question.
"""

from __future__ import annotations

import math

import pytest
from spottrain.core.gpu_catalogue import GPUS
from spottrain.planner import communication, compute_optimal, memory
from spottrain.planner.breakdown import Bill, Lever, Part, breakdown
from spottrain.planner.communication import Topology, ring_seconds
from spottrain.planner.compute_optimal import Allocation
from spottrain.planner.instances import instances
from spottrain.planner.transformer import MODELS

A100_FLOPS = 312e12 * 0.30
"""The article's: peak in bf16 x 30 %."""


def test_its_allocation_needs_more_than_twice_the_compute_that_it_is_for() -> None:
    flops = 1e21
    parameters, tokens = 0.2536 * flops**0.4995, 1.7424 * flops**0.5005
    assert (round(parameters / 1e9, 2), round(tokens / 1e9, 1)) == (7.83, 56.4)
    theirs = Allocation(parameters=parameters, tokens=tokens)
    assert theirs.flops / flops == pytest.approx(2.65, abs=0.005), "the budget is not kept: 6 N D is 2.65 C"
    assert theirs.tokens_per_parameter == pytest.approx(7.21, abs=0.01), (
        "and a third of 20 tokens per parameter"
    )
    for ours in (compute_optimal.rule_of_thumb(flops), compute_optimal.least_loss(flops)):
        assert ours.flops == pytest.approx(flops)
        assert ours.parameters == pytest.approx(2.85e9, rel=0.03)
        assert 19 < ours.tokens_per_parameter < 23


def test_the_refit_agrees_with_its_paper_and_with_chinchilla_itself() -> None:
    """Values of ../shared/research/economics.md section 6, computed apart."""
    small, large = compute_optimal.least_loss(1e19), compute_optimal.least_loss(5.76e23)
    assert (round(small.parameters / 1e9, 2), round(small.tokens_per_parameter)) == (0.26, 24)
    assert (round(large.parameters / 1e9), round(large.tokens_per_parameter)) == (72, 18)
    for flops in (1e18, 1e21, 1e24):
        best = compute_optimal.least_loss(flops)
        for factor in (0.8, 1.25):  # a minimum along 6 N D = C
            other = Allocation(parameters=best.parameters * factor, tokens=best.tokens / factor)
            assert best.loss < other.loss


def test_its_cost_is_eight_times_too_high() -> None:
    """It multiplies hours of one A100 by the price of an instance that has eight."""
    price, flops = 9.83, 1e21
    hours = flops / A100_FLOPS / 3600
    theirs, right = hours * price, hours / 8 * price
    assert right == pytest.approx(3650, rel=0.002) and theirs == pytest.approx(8 * right)
    assert right < 50_000 / 13, "its docstring says that 1e21 FLOPs cost about $50K"
    budget_flops = 50_000 / price * 3600 * 8 * A100_FLOPS
    assert budget_flops / A100_FLOPS / 3600 * price == pytest.approx(400_000), "what its $50K example prints"
    p4d = next(each for each in instances() if each.name == "p4d.24xlarge")
    assert p4d.devices == 8 and p4d.gpu == "A100-40GB"


@pytest.mark.parametrize(
    ("rate", "gpus", "gbps", "printed", "put_right"),
    [(850, 8, 600, 23.7, 71.3), (250, 4, 64, 11.6, 51.2)],
    ids=["NVLink 8 x A100", "PCIe 4 x T4"],
)
def test_its_all_reduce_takes_gigabytes_for_gigabits(
    rate: float, gpus: int, gbps: float, printed: float, put_right: float
) -> None:
    gradients, compute = 4 * 1.3e9, 32 / rate
    for bandwidth, percent in ((gbps * 1e9 / 8, printed), (gbps * 1e9, put_right)):
        exchange = ring_seconds(gradients, gpus, bandwidth)
        efficiency = communication.efficiency(compute, exchange, hidden_share=0)
        assert 100 * efficiency == pytest.approx(percent, abs=0.05)


def test_what_it_leaves_out_of_the_all_reduce_and_what_its_advice_does_not_cut() -> None:
    """600 GB/s is the sum of both directions; and DDP sends beside the backward pass."""
    link = GPUS["A100-40GB"].link
    assert link == 300e9
    topology = Topology(nodes=1, gpus_per_node=8, link=link, network=math.inf)
    fp32, compute = communication.all_reduce_seconds(4 * 1.3e9, topology), 32 / 850
    assert communication.efficiency(compute, fp32, hidden_share=0) == pytest.approx(0.55, abs=0.01)
    exchange, hidden = communication.step_exchange(1.3e9, topology, mode="plain", accumulation=1)
    assert exchange == fp32
    assert communication.efficiency(compute, fp32, hidden_share=hidden) == pytest.approx(0.82, abs=0.01)
    assert communication.efficiency(compute, fp32 / 2, hidden_share=hidden) == 1, "bf16 is hidden whole"
    said = communication.advice(efficiency=0.55, topology=topology, gradient_bytes=4, accumulation=1)
    assert "bf16" in said[0] and "accumulate" in said[1]
    assert not any("checkpointing" in each for each in said), "it recomputes activations, and sends as much"


def test_its_breakdown_does_not_add_up() -> None:
    on_demand, spot, claimed = 37_748, 13_512, 18_200
    assert round(100 * (1 - claimed / on_demand)) == 52, "the text"
    assert round(100 * (1 - 21_800 / 75_496)) == 71, "the table"
    assert claimed * 2 == 36_400, "two runs a month, and not 21,800"
    assert round(spot * 48 / 72 * 40 / 48) == 7_507, "its own three levers give less than half of 18,200"
    assert 24 / 12 == 2, "24 runs are a year's at two a month, and the table counts them in a month"
    per_hour = on_demand / 72
    p4d = next(each for each in instances() if each.name == "p4d.24xlarge")
    assert p4d.on_demand is not None
    assert round(per_hour / 32.7726) == 16, "p4d instances at the price of its time, 128 A100s and not 8"
    assert per_hour / p4d.on_demand.usd_per_hour > 16


def test_its_breakdown_put_right_saves_more_than_it_claims() -> None:
    before = Bill(price=37_748 / 72, hours=72, runs=24)
    levers = [
        Lever(name="spot", part=Part.PRICE, factor=13_512 / 37_748),
        Lever(name="bf16", part=Part.HOURS, factor=48 / 72),
        Lever(name="larger batch", part=Part.HOURS, factor=40 / 48),
        Lever(name="early stopping", part=Part.RUNS, factor=(20 + 4 * 0.6) / 24),
    ]
    bills = breakdown(before, levers)
    assert [round(bill.run) for bill in bills] == [13_512, 9_008, 7_507, 7_507]
    assert round(before.total) == 905_952, "a year of two runs a month, as it says"
    assert round(bills[-1].total) == 168_149, "and not 436,800"
    assert 1 - bills[-1].total / before.total == pytest.approx(0.814, abs=0.001)


def test_its_answer_on_chinchilla_compares_unequal_compute() -> None:
    theirs, proposed = Allocation(parameters=7e9, tokens=500e9), Allocation(parameters=3e9, tokens=1e12)
    assert proposed.flops / theirs.flops == pytest.approx(0.857, abs=0.001), "not the same compute"
    assert proposed.loss > theirs.loss, "and not better: the 7 B model has 71 tokens per parameter already"
    optimal = compute_optimal.rule_of_thumb(theirs.flops)
    assert (round(optimal.parameters / 1e9, 1), round(optimal.tokens / 1e9)) == (13.2, 265)
    assert optimal.loss < theirs.loss, "the optimum is larger, not smaller"


def test_its_memory_of_bert_is_fp32_with_materialized_scores() -> None:
    """~24 GB -> ~5 GB, 12 layers, 512 tokens, 32 samples. Which assumptions give it?"""
    bert, batch = MODELS["bert-base"], 32

    def activations(precision: str, mode: str, attention: str) -> float:
        need = memory.estimate(bert, precision=precision, mode=mode, attention=attention)
        return batch * (need.per_sample + need.recomputed) / 1e9

    assert activations("fp32", "plain", "math") == pytest.approx(24, rel=0.1), "its first number"
    assert activations("fp32", "checkpointed", "math") == pytest.approx(5, rel=0.4), "its second"
    assert activations("bf16", "plain", "fused") < 12, (
        "half of it was never there with bf16 and fused attention"
    )
    assert activations("bf16", "checkpointed", "fused") < 7
