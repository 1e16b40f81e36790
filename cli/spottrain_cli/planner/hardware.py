"""The cheapest instances on which a training ends in time.

For each instance type and number of nodes: does the model fit, and in which mode; how long does a step take,
with the exchange of gradients; what do all steps cost. What is never assumed silently: the MFU and the price
are inputs, and an instance without a price is listed as unknown, not as free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from spottrain.core.gpu_catalogue import GPUS
from spottrain.errors import ConfigurationError

from spottrain_cli.planner import communication, memory
from spottrain_cli.planner.instances import Instance, Price
from spottrain_cli.planner.transformer import Transformer

RECOMPUTATION: Final = 4 / 3
"""A checkpointed step's FLOPs beside a plain one's: the forward pass, a third of them, runs twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is to be trained.

    tokens: of the whole training. global_batch: samples of one optimizer step. mfu: model FLOP/s over peak
    FLOP/s of one GPU without communication, by key of GPUS, "cpu", or "" for all others.
    """

    model: Transformer
    tokens: float
    global_batch: int
    mfu: Mapping[str, float]
    optimizer: str = "adamw"
    startup_hours: float = 0.0
    """Paid before the first step: boot of the nodes, image, compilation."""

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / (self.global_batch * self.model.sequence))


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to run a workload."""

    instance: Instance
    nodes: int
    precision: str
    mode: str
    micro_batch: int
    accumulation: int
    step_seconds: float
    efficiency: float
    """Throughput beside that of as many GPUs without communication, 0 to 1."""
    hours: float
    """Paid hours of each node: the start-up, all steps, and what goodput loses."""
    price: Price | None
    """Of one node for one hour."""

    @property
    def dollars(self) -> float | None:
        return None if self.price is None else self.hours * self.nodes * self.price.usd_per_hour


def options(
    work: Workload, instances: Iterable[Instance], *, nodes: Iterable[int], spot: bool, goodput: float
) -> list[Option]:
    """Returns every way that fits into memory: cheapest first, unknown prices last.

    Args:
        work: the training.
        instances: instance types to try.
        nodes: numbers of nodes to try of each.
        spot: whether to pay the spot price.
        goodput: useful share of the paid time, 0 to 1.
    """
    if not 0 < goodput <= 1:
        raise ConfigurationError(f"goodput {goodput} must be above 0 and at most 1")
    counts = list(nodes)
    found = [
        option
        for instance in instances
        for count in counts
        if (option := _option(work, instance, count, spot=spot, goodput=goodput)) is not None
    ]
    return sorted(found, key=lambda each: (each.dollars is None, each.dollars or 0.0, each.hours))


def within(
    found: Iterable[Option], *, deadline_hours: float | None = None, budget: float | None = None
) -> Iterator[Option]:
    """Yields the options that end in time, and whose known price is within the budget."""
    for option in found:
        late = deadline_hours is not None and option.hours > deadline_hours
        dear = budget is not None and (option.dollars is None or option.dollars > budget)
        if not (late or dear):
            yield option


def best_of_each(found: Iterable[Option]) -> list[Option]:
    """Returns the first option of each instance type, in the given order."""
    first: dict[str, Option] = {}
    for option in found:
        first.setdefault(f"{option.instance.cloud} {option.instance.name}", option)
    return list(first.values())


def _option(work: Workload, instance: Instance, nodes: int, *, spot: bool, goodput: float) -> Option | None:
    """Returns how the workload runs there; None if it does not fit, or its batch is too small to divide."""
    peak, precision, gpu_bytes, link = _device(instance)
    mfu = work.mfu.get(instance.gpu or "cpu", work.mfu.get(""))
    if mfu is None:
        kind = instance.gpu or "cpu"
        raise ConfigurationError(f"the MFU on {kind} is not given: --mfu 0.4 for all, --mfu {kind}=0.4")
    ranks = nodes * instance.devices
    if work.global_batch % ranks or (nodes > 1 and instance.network is None):
        return None
    share = work.global_batch // ranks
    fitting = _first_that_fits(work, precision, ranks, share, gpu_bytes)
    if fitting is None:
        return None
    mode, micro = fitting
    topology = communication.Topology(
        nodes=nodes, gpus_per_node=instance.devices, link=link, network=instance.network or math.inf
    )
    flops = work.model.flops_per_token * work.model.sequence * share
    compute = flops / (peak * mfu) * (RECOMPUTATION if mode.endswith("checkpointed") else 1)
    accumulation = share // micro
    exchange, hidden = communication.step_exchange(
        work.model.parameters, topology, mode=mode, accumulation=accumulation
    )
    efficiency = communication.efficiency(compute, exchange, hidden_share=hidden)
    return Option(
        instance=instance,
        nodes=nodes,
        precision=precision,
        mode=mode,
        micro_batch=micro,
        accumulation=accumulation,
        step_seconds=compute / efficiency,
        efficiency=efficiency,
        hours=work.startup_hours + work.steps * compute / efficiency / 3600 / goodput,
        price=instance.spot if spot else instance.on_demand,
    )


def _divisors(number: int, *, at_most: int) -> Iterator[int]:
    """Yields the divisors below `number` and up to `at_most`, greatest first."""
    return (each for each in range(min(at_most, number - 1), 0, -1) if number % each == 0)


def _device(instance: Instance) -> tuple[float, str, float, float]:
    """Returns peak FLOP/s, precision, bytes and link bytes/s of one device: a GPU, or all of a node's CPU."""
    if instance.gpu is None:
        return instance.cpu_flops, "fp32", instance.memory, math.inf  # it is alone on its node
    gpu = GPUS[instance.gpu]
    return gpu.flops[gpu.precision], gpu.precision, gpu.memory, gpu.link


def _first_that_fits(
    work: Workload, precision: str, ranks: int, share: int, gpu_bytes: float
) -> tuple[str, int] | None:
    """Returns the fastest mode and its largest micro-batch that divides the share of one rank."""
    for mode in memory.modes(ranks):
        whole, parts = (
            memory.estimate(
                work.model,
                precision=precision,
                optimizer=work.optimizer,
                mode=mode,
                ranks=ranks,
                accumulates=accumulates,
            ).largest_micro_batch(gpu_bytes)
            for accumulates in (False, True)
        )
        micro = share if whole >= share else next(_divisors(share, at_most=parts), 0)
        if micro:
            return mode, micro
    return None
