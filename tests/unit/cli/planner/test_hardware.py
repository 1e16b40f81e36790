"""Which instances are chosen, and that nothing unknown is taken for free, large enough or fast."""

from __future__ import annotations

from dataclasses import replace

import pytest
from spottrain.core.gpu_catalogue import GPUS
from spottrain_cli.planner import communication
from spottrain_cli.planner.hardware import Option, Workload, best_of_each, options, within
from spottrain_cli.planner.instances import SOURCES, Instance, Price, instances
from spottrain_cli.planner.transformer import MODELS

from tests.support.sentences import Told

GPT2 = Workload(model=MODELS["gpt2"], tokens=1e9, global_batch=512, mfu={"": 0.4})


def instance(name: str, gpu: str | None = "A100-80GB", gpus: int = 8, usd: float | None = 10.0) -> Instance:
    price = None if usd is None else Price(usd_per_hour=usd, where="here", date="today", source="a test")
    return Instance(
        cloud="aws", name=name, gpu=gpu, gpus=gpus, vcpus=96, memory=1e12, network=50e9,
        cpu_flops=0 if gpu else 1e13, on_demand=price, spot=None,
    )  # fmt: skip


def one_node(work: Workload, *kinds: Instance) -> list[Option]:
    return options(work, kinds, nodes=[1], spot=False, goodput=1.0)


def test_the_cheapest_comes_first_and_an_unknown_price_last() -> None:
    kinds = [instance("dear", usd=30.0), instance("unknown", usd=None), instance("cheap", usd=10.0)]
    found = one_node(GPT2, *kinds)
    assert [each.instance.name for each in found] == ["cheap", "dear", "unknown"]
    assert [each.dollars is None for each in found] == [False, False, True]
    assert list(within(found, budget=1e9))[-1].instance.name == "dear", "unknown is within no budget"
    assert not [each for each in options(GPT2, kinds, nodes=[1], spot=True, goodput=1.0) if each.dollars]


def test_hours_and_dollars_are_those_of_the_flops() -> None:
    only = options(GPT2, [instance("one", gpus=1)], nodes=[1], spot=False, goodput=0.8)[0]
    model = GPT2.model
    flops = model.flops_per_token * GPT2.steps * GPT2.global_batch * model.sequence
    assert only.efficiency == 1 and only.mode == "plain" and only.precision == "bf16"
    assert only.hours == pytest.approx(flops / (312e12 * 0.4) / 3600 / 0.8)
    assert only.dollars == pytest.approx(only.hours * 10)
    assert only.micro_batch * only.accumulation == GPT2.global_batch


def test_a_deadline_asks_for_more_nodes_and_best_of_each_names_a_type_once() -> None:
    found = options(GPT2, [instance("one", gpus=1)], nodes=[1, 2, 4, 8], spot=False, goodput=1.0)
    slow = max(each.hours for each in found)
    fast = list(within(found, deadline_hours=slow / 3))
    assert {each.nodes for each in fast} == {4, 8} and len(best_of_each(fast)) == 1
    assert not list(within(found, deadline_hours=slow / 100))


def test_a_model_that_does_not_fit_is_recomputed_then_sharded_then_left_out() -> None:
    large = replace(GPT2, model=MODELS["llama-2-7b"], global_batch=64)
    modes = {
        (gpu, gpus): [each.mode for each in one_node(large, instance("x", gpu, gpus))]
        for gpu, gpus in (("H200", 1), ("A100-80GB", 1), ("A100-80GB", 8), ("T4", 8))
    }
    assert modes == {
        ("H200", 1): ["checkpointed"],
        ("A100-80GB", 1): [],
        ("A100-80GB", 8): ["fsdp"],
        ("T4", 8): [],
    }


def test_a_gpu_without_bf16_computes_in_fp16_and_a_cpu_in_fp32() -> None:
    kinds = [instance("old", "V100-16GB", 1), instance("cpu", None, 0)]
    found = {each.instance.name: each for each in one_node(GPT2, *kinds)}
    assert found["old"].precision == "fp16" and found["cpu"].precision == "fp32"
    assert found["cpu"].hours > 10 * found["old"].hours


def test_a_batch_that_the_gpus_do_not_divide_and_a_network_that_nobody_knows_are_left_out() -> None:
    odd = replace(GPT2, global_batch=12)
    assert not one_node(odd, instance("eight"))
    unknown = replace(instance("two"), network=None)
    assert [each.nodes for each in options(GPT2, [unknown], nodes=[1, 2], spot=False, goodput=1)] == [1]


def test_no_mfu_is_assumed(told: Told) -> None:
    work = replace(GPT2, mfu={"H100": 0.4})
    told(lambda: one_node(work, instance("x")))
    told(lambda: options(GPT2, [instance("x")], nodes=[1], spot=False, goodput=0))


def test_the_catalogue_knows_every_gpu_of_every_instance_and_the_source_of_every_price() -> None:
    kinds = instances()
    assert len({(each.cloud, each.name) for each in kinds}) == len(kinds) > 70
    assert {each.cloud for each in kinds} == {"aws", "gcp", "azure"}
    for each in kinds:
        assert (each.gpu in GPUS and each.gpus > 0) or (each.gpu is None and each.cpu_flops > 1e12), each.name
        for price in (each.on_demand, each.spot):
            assert price is None or (price.usd_per_hour > 0 and price.date and price.source and price.where)
        if each.on_demand and each.spot:
            assert each.spot.usd_per_hour <= each.on_demand.usd_per_hour, each.name
    assert {each.gpu for each in kinds} >= {"A100-40GB", "A100-80GB", "H100", "H200", "B200", "L4", "A10G"}
    assert {each.gpu for each in kinds} >= {"L40S", "V100-16GB", "T4", "MI300X", None}
    assert all(date and place for date, place in SOURCES.values())


def test_what_fsdp_sends_grows_with_the_micro_batches() -> None:
    topology = communication.Topology(nodes=2, gpus_per_node=8, link=300e9, network=50e9)
    once = communication.all_reduce_seconds(4 * 7e9, topology)
    for count in (1, 4):
        seconds, hidden = communication.step_exchange(7e9, topology, mode="fsdp", accumulation=count)
        assert seconds == pytest.approx((count + 0.5) * once) and hidden == 0.9
