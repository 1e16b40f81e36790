"""What `spottrain plan` answers: a table, and below it the assumptions behind the figures.

Each question is a function of what was given. It raises ConfigurationError where that is not enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, Final

from spottrain.cli.output import Answer
from spottrain.core.gpu_catalogue import GPU, GPUS
from spottrain.errors import ConfigurationError
from spottrain.lifecycle.notice_budget import FULL_SHARE

from spottrain_cli.figures import table
from spottrain_cli.planner import breakdown, checkpoint, communication, compute_optimal, hardware, memory
from spottrain_cli.planner.compute_optimal import Allocation
from spottrain_cli.planner.instances import Instance, instances
from spottrain_cli.planner.transformer import MODELS, Transformer
from spottrain_cli.planner.values import dollars, gigabytes, hours, short

SHAPE: Final = ("layers", "hidden", "heads", "vocabulary", "sequence", "feed_forward", "kv_heads")
TYPICAL_MFU: Final = {
    "bf16": (0.4, "Llama 3 405B reached 38 to 43% on up to 16,384 H100 (Dubey et al. 2024, table 4)"),
    "fp16": (0.21, "GPT-3 175B reached 21% on V100 (Chowdhery et al. 2022, table 3)"),
}
"""By the format in which a GPU trains, and its source."""


def compute(given: SimpleNamespace) -> Answer:
    """How many parameters and tokens a budget is best spent on."""
    asked = None
    if given.params and given.tokens:
        asked = Allocation(parameters=given.params, tokens=given.tokens)
    flops, origin = _flops(given, asked)
    rows = {
        "20 tokens per parameter": compute_optimal.rule_of_thumb(flops),
        "least loss (refit of 2024)": compute_optimal.least_loss(flops),
    } | ({"as given": asked} if asked else {})
    lines = [f"{flops:.3g} FLOPs{origin}", ""]
    lines += table(
        [["", "parameters", "tokens", "tokens/parameter", "loss"]]
        + [_allocation(*row) for row in rows.items()]
    )
    notes = [
        "C = 6 N D, without the products of attention.",
        "The loss is of Hoffmann et al.'s data: compare rows, not with your own.",
        "Optimal for the training alone: a model that serves much should be smaller, with more tokens.",
    ]
    facts = {
        "flops": flops,
        "allocations": {name: asdict(row) | {"loss": row.loss} for name, row in rows.items()},
    }
    return _answer(facts, lines, notes)


def _allocation(name: str, row: Allocation) -> list[str]:
    return [
        name,
        short(row.parameters),
        short(row.tokens),
        f"{row.tokens_per_parameter:.0f}",
        f"{row.loss:.3f}",
    ]


def _flops(given: SimpleNamespace, asked: Allocation | None) -> tuple[float, str]:
    if asked is not None:
        return asked.flops, ""
    if given.flops:
        return given.flops, ""
    if not (given.budget and given.gpu and given.price):
        raise ConfigurationError(
            "the budget is not given: --flops 1e21, or --params 7B --tokens 500B, or money by "
            "--budget 50k --gpu A100-80GB --price 2.2 (dollars per GPU-hour)"
        )
    gpu, (rate, _) = _gpu(given.gpu), _mfu(given)
    peak = gpu.flops[gpu.precision]
    gpu_hours = given.budget / given.price
    of_peak = f"{rate:.0%} of {peak / 1e12:g} TFLOP/s"
    text = f": {short(gpu_hours)} hours of {given.gpu} at ${given.price:g}, {of_peak}"
    return gpu_hours * 3600 * peak * rate, text


def time(given: SimpleNamespace) -> Answer:
    """Hours and money of a training on a number of GPUs."""
    gpu, (rate, source) = _gpu(given.gpu), _mfu(given)
    flops, model = _training_flops(given)
    peak = gpu.flops[gpu.precision]
    paid = flops / (given.gpus * peak * rate) / 3600 / given.goodput
    price, origin = _gpu_price(given)
    cost = None if price is None else paid * given.gpus * price
    rows = [
        ["FLOPs", f"{flops:.3g}"],
        ["GPU-hours", short(paid * given.gpus)],
        ["hours", hours(paid)],
        ["cost", dollars(cost)],
    ]
    notes = [
        model,
        f"MFU {rate:.0%} of {peak / 1e12:g} TFLOP/s ({gpu.precision}, dense; {gpu.source}).",
        f"{source} spottrain logs the one that it measures.",
        f"Goodput {given.goodput:.0%} of the paid time: what interruptions, start-up and saves leave.",
        origin,
    ]
    return _answer({"flops": flops, "hours": paid, "dollars": cost}, _pairs(rows), notes)


def memory_of(given: SimpleNamespace) -> Answer:
    """What a GPU holds, and the largest micro-batch, by mode."""
    gpu, model = _gpu(given.gpu), _model(given)
    precision = given.precision or gpu.precision
    rows, facts = [], {}
    for mode in memory.modes(given.gpus):
        need = memory.estimate(
            model,
            precision=precision,
            optimizer=given.optimizer,
            mode=mode,
            ranks=given.gpus,
            attention=given.attention,
        )
        most = need.largest_micro_batch(gpu.memory)
        sample = need.per_sample + need.recomputed
        rows.append([mode, gigabytes(need.fixed), gigabytes(sample), str(most or "does not fit")])
        facts[mode] = asdict(need) | {"fixed": need.fixed, "largest_micro_batch": most}
    lines = [
        f"{short(model.parameters)} parameters, {given.gpus} x {given.gpu} with {gigabytes(gpu.memory)}",
        "",
    ]
    lines += table([["mode", "weights, gradients, optimizer", "per sample", "largest micro-batch"], *rows])
    notes = [
        f"{precision} by autocast over fp32 weights, {given.optimizer}, samples of {model.sequence} tokens, "
        f"{given.attention} attention, one micro-batch per step.",
        f"{memory.USABLE:.0%} of the memory are usable, of which {gigabytes(memory.RESERVE)} go to CUDA and "
        "NCCL (assumptions).",
        "An estimate: microBatchSize: auto finds the size on the device.",
    ]
    return _answer({"parameters": model.parameters, "modes": facts}, lines, notes)


def network(given: SimpleNamespace) -> Answer:
    """Seconds of the gradient exchange, the scaling efficiency, and the throughput."""
    gpu = _gpu(given.gpu)
    if given.gpus % given.nodes:
        raise ConfigurationError(f"{given.gpus} GPUs cannot be divided among {given.nodes} nodes")
    topology = communication.Topology(
        nodes=given.nodes,
        gpus_per_node=given.gpus // given.nodes,
        link=given.link or gpu.link,
        network=given.network or math.inf,
    )
    if given.nodes > 1 and not given.network:
        raise ConfigurationError("the network between the nodes is not given: --network 100Gbit/s")
    parameters = _parameters(given)
    exchange, hidden = communication.step_exchange(
        parameters,
        topology,
        mode="plain",
        accumulation=given.accumulation,
        gradient_bytes=int(given.gradient_bytes),
    )
    alone = communication.efficiency(given.step_seconds, exchange, hidden_share=0)
    beside = communication.efficiency(given.step_seconds, exchange, hidden_share=hidden)
    rows = [
        ["all-reduce of", gigabytes(int(given.gradient_bytes) * parameters)],
        ["seconds", f"{exchange:.4f}"],
        ["efficiency, nothing overlapped", f"{alone:.1%}"],
        ["efficiency, overlapped", f"{beside:.1%}"],
    ]
    ideal = None if given.samples_per_second is None else given.samples_per_second * given.gpus
    if ideal is not None:
        rows.append(["samples/s, ideal", short(ideal)])
        rows.append(["samples/s, overlapped", short(ideal * beside)])
    found = communication.advice(
        efficiency=beside,
        topology=topology,
        gradient_bytes=int(given.gradient_bytes),
        accumulation=given.accumulation,
    )
    notes = [
        f"{gigabytes(topology.link)}/s per GPU and direction within a node"
        + (f", {gigabytes(topology.network)}/s per node between nodes." if given.nodes > 1 else "."),
        f"Overlapped: {communication.OVERLAP:.0%} of the last micro-batch's backward pass (an assumption).",
    ]
    if ideal is not None:
        notes.append(f"Ideal: {given.gpus} times the samples/s of one GPU, which are your input.")
    facts = {
        "seconds": exchange,
        "efficiency": beside,
        "efficiency_without_overlap": alone,
        "samples_per_second_ideal": ideal,
        "samples_per_second": None if ideal is None else ideal * beside,
        "advice": found,
    }
    return _answer(facts, _pairs(rows), [*notes, *(f"To communicate less: {each}." for each in found)])


def checkpoint_of(given: SimpleNamespace) -> Answer:
    """Size of a checkpoint, and whether it is saved within each cloud's notice."""
    size = checkpoint.size(_parameters(given), memory.OPTIMIZERS[given.optimizer])
    rows, facts, seconds_needed = [], {}, 0.0
    for name, notice in checkpoint.NOTICES.items():
        budget = checkpoint.save(size, given.nodes, given.bandwidth, given.step_seconds, notice)
        seconds_needed = budget.seconds  # the same for all
        rows.append([name, f"{notice.seconds:g} s", "fits" if budget.fits else "does not fit"])
        facts[name] = {"seconds": notice.seconds, "fits": budget.fits}
    lines = [f"{gigabytes(size)}, durable {seconds_needed:.1f} s after the notice", ""]
    lines += table([["cloud", "notice", f"within {FULL_SHARE:.0%} of it"], *rows])
    notes = [
        f"fp32 weights and {given.optimizer}'s state. Nodes that upload: {given.nodes}, each "
        f"{gigabytes(given.bandwidth)}/s.",
        "Where it does not fit, a reclaim loses the steps since the last periodic save: shorten "
        "checkpoint.interval, or shard the model (FSDP), so that every node uploads a part.",
    ]
    return _answer({"bytes": size, "seconds": seconds_needed, "notices": facts}, lines, notes)


def learning_rate(given: SimpleNamespace) -> Answer:
    """The learning rate for another batch size, and the warm-up."""
    from spottrain.techniques import lr_scaling

    found = lr_scaling.scaled_rate(
        given.lr, global_batch_size=given.batch, base_batch_size=given.base_batch, rule=given.rule
    )
    warmup = lr_scaling.warmup_steps(
        steps=given.warmup_steps,
        epochs=given.warmup_epochs,
        total_steps=given.steps,
        steps_per_epoch=given.steps_per_epoch,
    )
    rows = [["learning rate", f"{found:.4g}"], ["warm-up", f"{warmup} of {given.steps} steps"]]
    limit, source = lr_scaling.TESTED[given.rule]
    notes = [f"The {given.rule} rule was tested up to a global batch of {limit} ({source})."]
    if given.batch > limit:
        notes.append(f"{given.batch} is larger: tune the rate at this size, or use a smaller batch.")
    return _answer({"learning_rate": found, "warmup_steps": warmup}, _pairs(rows), notes)


def choose(given: SimpleNamespace) -> Answer:
    """The cheapest instances that meet a deadline or a budget, with the runners-up."""
    model = replace(_model(given), sequence=given.sequence) if given.sequence else _model(given)
    work = hardware.Workload(
        model=model,
        tokens=given.tokens,
        global_batch=given.batch,
        mfu=dict(given.mfu or []) or {name: TYPICAL_MFU[gpu.precision][0] for name, gpu in GPUS.items()},
        optimizer=given.optimizer,
        startup_hours=given.startup / 3600,
    )
    wanted = [each for each in instances() if not given.cloud or each.cloud.lower() == given.cloud]
    wanted = [each for each in wanted if given.mfu or each.gpu]  # no typical MFU of a CPU is known
    counts = [2**power for power in range(int(math.log2(given.max_nodes)) + 1)]
    every = hardware.options(work, wanted, nodes=counts, spot=given.spot, goodput=given.goodput)
    limit = None if given.deadline is None else given.deadline / 3600
    found = hardware.best_of_each(hardware.within(every, deadline_hours=limit, budget=given.budget))
    if not found:
        raise ConfigurationError(_nothing_found(every, limit, given.budget))
    head = ["instance", "cloud", "nodes", "devices", "mode", "micro x steps", "scaling", "hours", "cost"]
    lines = [f"{short(model.parameters)} parameters, {short(work.tokens)} tokens, {work.steps} steps", ""]
    lines += table([head, *(_option(each) for each in found[: given.top])])
    kind = "spot" if given.spot else "on-demand"
    notes = [
        f"Prices are {kind}, of the region and date in the catalogue (-o json); unknown is not free.",
        f"Start-up {hours(given.startup / 3600)}, then goodput {given.goodput:.0%} of the paid time. "
        "Waiting for capacity is not counted.",
        f"{work.optimizer}; scaling by the model of `spottrain plan network`; {_mfu_words(given)}",
    ]
    return _answer({"options": [_option_facts(each) for each in found]}, lines, notes)


def levers(given: SimpleNamespace) -> Answer:
    """What levers on price, hours and runs bring one after the other."""
    first = breakdown.Bill(price=given.price * given.gpus, hours=given.hours / 3600, runs=given.runs)
    bills = breakdown.breakdown(first, given.lever or [])
    if not all(0 < bill.total < math.inf for bill in (first, *bills)):
        raise ConfigurationError(
            "the bill is too large or too small to compute: look for a slip in --price, --gpus, --hours, "
            "--runs and the factors"
        )
    last = bills[-1] if bills else first
    rows = [
        ["lever", "factor", "a run", "1 run" if given.runs == 1 else f"{short(given.runs)} runs", "saved"]
    ]
    rows.append(["before", "", dollars(first.run), dollars(first.total), ""])
    for each, before, after in zip(given.lever or [], [first, *bills], bills, strict=False):
        saved = before.total - after.total
        text = dollars(saved) if saved >= 0 else f"-{dollars(-saved)}"
        factor = f"{each.part} x {each.factor:.3g}"
        rows.append([each.name, factor, dollars(after.run), dollars(after.total), text])
    share_saved = 1 - last.total / first.total
    change = f"{abs(share_saved):.1%} " + ("saved" if round(share_saved, 3) >= 0 else "dearer than before")
    notes = [
        f"{change}. Each lever acts on what those before it left; a factor is after / before.",
        "The factors are your input. Two levers on the hours may overlap: measure them together. "
        'The page "Levers on cost" of spottrain\'s documentation has measured ones.',
    ]
    facts = {
        "before": _bill_facts(first),
        "levers": [
            asdict(each) | _bill_facts(bill) for each, bill in zip(given.lever or [], bills, strict=True)
        ],
        "saved_share": share_saved,
    }
    return _answer(facts, table(rows), notes)


def _bill_facts(bill: breakdown.Bill) -> dict[str, Any]:
    return asdict(bill) | {"run_dollars": bill.run, "dollars": bill.total}


def _nothing_found(every: Sequence[hardware.Option], limit: float | None, budget: float | None) -> str:
    if not every:
        return (
            "the model fits on none of the instances: allow more nodes (--max-nodes), or give a --batch that "
            "more GPUs divide"
        )
    fastest, cheapest = min(every, key=lambda each: each.hours), every[0]
    of_fastest, of_cheapest = (f"{each.nodes} x {each.instance.name}" for each in (fastest, cheapest))
    wanted = [] if limit is None else [f"within {hours(limit)}"]
    wanted += [] if budget is None else [f"for {dollars(budget)}"]
    return (
        f"no instance type does it {' and '.join(wanted)}: the fastest takes {hours(fastest.hours)} "
        f"({of_fastest}), the cheapest costs {dollars(cheapest.dollars)} ({of_cheapest})"
    )


def _option(each: hardware.Option) -> list[str]:
    devices = f"{each.nodes * each.instance.devices} {each.instance.gpu or 'CPU'}"
    batch = f"{each.micro_batch} x {each.accumulation}"
    return [
        each.instance.name, each.instance.cloud, str(each.nodes), devices, f"{each.mode}, {each.precision}",
        batch, f"{each.efficiency:.0%}", hours(each.hours), dollars(each.dollars),
    ]  # fmt: skip


def _option_facts(each: hardware.Option) -> dict[str, Any]:
    return asdict(each) | {"dollars": each.dollars}


# --- what several questions need ------------------------------------------------------------------------
def _answer(facts: dict[str, Any], lines: list[str], notes: Sequence[str]) -> Answer:
    return Answer(facts=facts | {"assumptions": list(notes)}, lines=[*lines, "", *notes])


def _pairs(rows: Sequence[Sequence[str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _gpu(name: str) -> GPU:
    if name not in GPUS:
        raise ConfigurationError(f"GPU {name!r} is not in the catalogue: use {', '.join(GPUS)}")
    return GPUS[name]


def _mfu(given: SimpleNamespace) -> tuple[float, str]:
    """Returns the model FLOP/s over the peak's, and where the figure is from."""
    rates: dict[str, float] = dict(given.mfu or [])
    found = rates.get(given.gpu, rates.get(""))
    if found is not None:
        return found, "The MFU is your input;"
    if rates:
        raise ConfigurationError(f"the MFU on {given.gpu} is not given: --mfu 0.4")
    usual, source = TYPICAL_MFU[_gpu(given.gpu).precision]
    return usual, f"The MFU is a typical one: {source}; give --mfu for yours."


def _mfu_words(given: SimpleNamespace) -> str:
    if given.mfu:
        return "every MFU is your input."
    figures = "; ".join(
        f"{share:.0%} in {precision}: {source}" for precision, (share, source) in TYPICAL_MFU.items()
    )
    return f"the MFU is a typical one ({figures}); give --mfu for yours."


def _parameters(given: SimpleNamespace) -> float:
    return given.params or _model(given).parameters


def _training_flops(given: SimpleNamespace) -> tuple[float, str]:
    if given.params:
        return (
            Allocation(parameters=given.params, tokens=given.tokens).flops,
            "6 N D FLOPs, without the products of attention (give --model for them).",
        )
    model = _model(given)
    return (
        model.flops_per_token * given.tokens,
        f"{short(model.parameters)} parameters; FLOPs with the products of attention.",
    )


def _model(given: SimpleNamespace) -> Transformer:
    """Returns the model's shape: a known one, with the fields that are given replaced, or all given."""
    named = {name: value for name in SHAPE if (value := getattr(given, name)) is not None}
    if given.model:
        if given.model not in MODELS:
            raise ConfigurationError(
                f"model {given.model!r} is not known: use {', '.join(MODELS)}, or give its shape"
            )
        return replace(MODELS[given.model], **named)
    missing = [name for name in SHAPE[:5] if name not in named]
    if missing:
        flags = ", ".join(f"--{name}" for name in missing)
        raise ConfigurationError(
            f"the shape is not known: give --model ({', '.join(MODELS)}), or {flags} as well"
        )
    return Transformer(**named, gated=given.gated, tied=not given.untied, biases=not given.gated)


def _gpu_price(given: SimpleNamespace) -> tuple[float | None, str]:
    """Returns dollars per GPU-hour, and where they are from."""
    if given.price is not None:
        return given.price, f"${given.price:g} per GPU-hour is your input."
    if given.instance is None:
        return None, "The price is unknown: give --price (dollars per GPU-hour), or --instance."
    instance = _instance(given.instance)
    if instance.gpu != given.gpu:
        raise ConfigurationError(f"{instance.name} has {instance.gpu or 'no GPU'}, not {given.gpu}")
    price = instance.spot if given.spot else instance.on_demand
    if price is None:
        kind = "spot" if given.spot else "on-demand"
        return None, f"The catalogue has no {kind} price of {instance.name}: give --price."
    per_gpu = price.usd_per_hour / instance.devices
    where = f"{instance.name}, {price.where}, {price.date} ({price.source})"
    return per_gpu, f"${price.usd_per_hour:g} an hour for {instance.devices} GPUs: {where}."


def _instance(name: str) -> Instance:
    found = next((each for each in instances() if each.name == name), None)
    if found is None:
        raise ConfigurationError(f"instance type {name!r} is not in the catalogue: give --gpu and --price")
    return found
