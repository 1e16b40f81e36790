"""`spottrain plan QUESTION`: arguments and output of the calculators in `spottrain_cli.planner`.

Each question prints a table and below it the assumptions behind the figures; `-o json` prints both for a
program. Exit code 0: answered; 1: a sentence says why not; 2: invalid arguments.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from spottrain.cli.output import Answer, table
from spottrain.core.gpu_catalogue import GPU, GPUS
from spottrain.errors import ConfigurationError, RunError
from spottrain.lifecycle.notice_budget import FULL_SHARE

from spottrain_cli.planner import breakdown, checkpoint, communication, compute_optimal, hardware, memory
from spottrain_cli.planner.compute_optimal import Allocation
from spottrain_cli.planner.instances import Instance, instances
from spottrain_cli.planner.transformer import MODELS, Transformer

ABOUT: Final = "What a training needs and costs, before it runs. Needs no cluster and no torch."
SCALES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
SECONDS: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
SHAPE: Final = ("layers", "hidden", "heads", "vocabulary", "sequence", "feed_forward", "kv_heads")


def main(argv: list[str]) -> int:
    given = _parser().parse_args(argv)
    try:
        answer: Answer = given.answer(given)
    except RunError as error:
        print(f"spottrain: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer.facts, indent=1) if given.output == "json" else "\n".join(answer.lines))
    return 0


# --- values ---------------------------------------------------------------------------------------------
def amount(text: str) -> float:
    """Parses 7B, 1.3e9, 500k or $50K. Raises ArgumentTypeError."""
    match = re.fullmatch(r"\$?([0-9.]+(?:e[+-]?[0-9]+)?)([kmbgt]?)", text.strip().lower())
    try:
        value = float(match[1]) * SCALES[match[2]] if match else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, such as 7B, 1e21 or 500k")
    return value


def whole(text: str) -> int:
    value = amount(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def share(text: str) -> float:
    """Parses a share above 0 and at most 1."""
    value = amount(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1, such as 0.4")
    return value


def seconds(text: str) -> float:
    """Parses 90s, 10m, 72h or 3d."""
    match = re.fullmatch(r"([0-9.]+)(s|min|m|h|d)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time, such as 90s, 10m, 72h or 3d")
    return amount(match[1]) * SECONDS[match[2]]


def byte_rate(text: str) -> float:
    """Parses bytes or bits per second: 500MB/s, 1.2GB/s, 25Gbit/s."""
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt])(b/s|bit/s)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate, such as 500MB/s or 25Gbit/s")
    return amount(match[1]) * SCALES[match[2]] / (8 if match[3] == "bit/s" else 1)


def lever(text: str) -> breakdown.Lever:
    """Parses NAME:hours=48/72, or NAME:hours=0.667 without the name if it is left out."""
    match = re.fullmatch(r"(?:(.+):)?(price|hours|runs)=([0-9.]+)(?:/([0-9.]+))?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a lever, such as bf16:hours=48/72, spot:price=0.36 or runs=20/24"
        )
    part = breakdown.Part(match[2])
    if match[1] and not match[1].isprintable():
        raise argparse.ArgumentTypeError(f"the name in {text!r} has a character that cannot be printed")
    return breakdown.Lever(
        name=match[1] or part.value, part=part, factor=amount(match[3]) / amount(match[4] or "1")
    )


def mfu(text: str) -> tuple[str, float]:
    """Parses 0.4, or H100=0.4 for one kind of GPU."""
    name, equals, value = text.rpartition("=")
    if equals and name not in (*GPUS, "cpu"):
        raise argparse.ArgumentTypeError(f"{name!r} is not known: use {', '.join(GPUS)} or cpu")
    return name, share(value)


def plain(value: float) -> str:
    """Writes a number with three digits and its scale: 7.83 B."""
    for limit, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e4, " k")):
        if value >= limit:
            return f"{value / limit if unit != ' k' else value / 1e3:.3g}{unit}"
    return f"{value:.4g}"


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e8 else f"{value / 1e6:.1f} MB"


def dollars(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"${value:,.0f}" if value >= 100 else f"${value:,.2f}" if value >= 0.01 else f"${value:.2g}"


def hours(value: float) -> str:
    if value < 1:
        return f"{60 * value:.2g} min"
    return f"{value:,.1f} h" if value < 100 else f"{value:,.0f} h"


# --- questions ------------------------------------------------------------------------------------------
def compute(given: argparse.Namespace) -> Answer:
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
        plain(row.parameters),
        plain(row.tokens),
        f"{row.tokens_per_parameter:.0f}",
        f"{row.loss:.3f}",
    ]


def _flops(given: argparse.Namespace, asked: Allocation | None) -> tuple[float, str]:
    if asked is not None:
        return asked.flops, ""
    if given.flops:
        return given.flops, ""
    if not (given.budget and given.gpu and given.mfu and given.price):
        raise ConfigurationError(
            "the budget is not given: --flops 1e21, or --params 7B --tokens 500B, or money by "
            "--budget 50k --gpu A100-80GB --price 2.2 --mfu 0.4 (dollars per GPU-hour)"
        )
    gpu, rate = _gpu(given.gpu), _single_mfu(given)
    peak = gpu.flops[gpu.precision]
    gpu_hours = given.budget / given.price
    of_peak = f"{rate:.0%} of {peak / 1e12:g} TFLOP/s"
    text = f": {plain(gpu_hours)} hours of {given.gpu} at ${given.price:g}, {of_peak}"
    return gpu_hours * 3600 * peak * rate, text


def time(given: argparse.Namespace) -> Answer:
    """Hours and money of a training on a number of GPUs."""
    gpu, rate = _gpu(given.gpu), _single_mfu(given)
    flops, model = _training_flops(given)
    peak = gpu.flops[gpu.precision]
    paid = flops / (given.gpus * peak * rate) / 3600 / given.goodput
    price, origin = _gpu_price(given)
    cost = None if price is None else paid * given.gpus * price
    rows = [
        ["FLOPs", f"{flops:.3g}"],
        ["GPU-hours", plain(paid * given.gpus)],
        ["hours", hours(paid)],
        ["cost", dollars(cost)],
    ]
    notes = [
        model,
        f"MFU {rate:.0%} of {peak / 1e12:g} TFLOP/s ({gpu.precision}, dense; {gpu.source}).",
        "The MFU is your input: spottrain logs the one it measures.",
        f"Goodput {given.goodput:.0%} of the paid time: what interruptions, start-up and saves leave.",
        origin,
    ]
    return _answer({"flops": flops, "hours": paid, "dollars": cost}, _pairs(rows), notes)


def memory_of(given: argparse.Namespace) -> Answer:
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
        f"{plain(model.parameters)} parameters, {given.gpus} x {given.gpu} with {gigabytes(gpu.memory)}",
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


def network(given: argparse.Namespace) -> Answer:
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
        gradient_bytes=given.gradient_bytes,
    )
    alone = communication.efficiency(given.step_seconds, exchange, hidden_share=0)
    beside = communication.efficiency(given.step_seconds, exchange, hidden_share=hidden)
    rows = [
        ["all-reduce of", gigabytes(given.gradient_bytes * parameters)],
        ["seconds", f"{exchange:.4f}"],
        ["efficiency, nothing overlapped", f"{alone:.1%}"],
        ["efficiency, overlapped", f"{beside:.1%}"],
    ]
    ideal = None if given.samples_per_second is None else given.samples_per_second * given.gpus
    if ideal is not None:
        rows.append(["samples/s, ideal", plain(ideal)])
        rows.append(["samples/s, overlapped", plain(ideal * beside)])
    found = communication.advice(
        efficiency=beside,
        topology=topology,
        gradient_bytes=given.gradient_bytes,
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


def checkpoint_of(given: argparse.Namespace) -> Answer:
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


def learning_rate(given: argparse.Namespace) -> Answer:
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


def choose(given: argparse.Namespace) -> Answer:
    """The cheapest instances that meet a deadline or a budget, with the runners-up."""
    model = replace(_model(given), sequence=given.sequence) if given.sequence else _model(given)
    work = hardware.Workload(
        model=model,
        tokens=given.tokens,
        global_batch=given.batch,
        mfu=dict(given.mfu),
        optimizer=given.optimizer,
        startup_hours=given.startup / 3600,
    )
    wanted = [each for each in instances() if not given.cloud or each.cloud.lower() == given.cloud]
    counts = [2**power for power in range(int(math.log2(given.max_nodes)) + 1)]
    every = hardware.options(work, wanted, nodes=counts, spot=given.spot, goodput=given.goodput)
    limit = None if given.deadline is None else given.deadline / 3600
    found = hardware.best_of_each(hardware.within(every, deadline_hours=limit, budget=given.budget))
    if not found:
        raise ConfigurationError(_nothing_found(every, limit, given.budget))
    head = ["instance", "cloud", "nodes", "devices", "mode", "micro x steps", "scaling", "hours", "cost"]
    lines = [f"{plain(model.parameters)} parameters, {plain(work.tokens)} tokens, {work.steps} steps", ""]
    lines += table([head, *(_option(each) for each in found[: given.top])])
    kind = "spot" if given.spot else "on-demand"
    notes = [
        f"Prices are {kind}, of the region and date in the catalogue (-o json); unknown is not free.",
        f"Start-up {hours(given.startup / 3600)}, then goodput {given.goodput:.0%} of the paid time. "
        "Waiting for capacity is not counted.",
        f"{work.optimizer}; scaling by the model of `spottrain plan network`; every MFU is your input.",
    ]
    return _answer({"options": [_option_facts(each) for each in found]}, lines, notes)


def levers(given: argparse.Namespace) -> Answer:
    """What levers on price, hours and runs bring one after the other."""
    first = breakdown.Bill(price=given.price * given.gpus, hours=given.hours / 3600, runs=given.runs)
    bills = breakdown.breakdown(first, given.lever)
    if not all(0 < bill.total < math.inf for bill in (first, *bills)):
        raise ConfigurationError(
            "the bill is too large or too small to compute: look for a slip in --price, --gpus, --hours, "
            "--runs and the factors"
        )
    last = bills[-1] if bills else first
    rows = [
        ["lever", "factor", "a run", "1 run" if given.runs == 1 else f"{plain(given.runs)} runs", "saved"]
    ]
    rows.append(["before", "", dollars(first.run), dollars(first.total), ""])
    for each, before, after in zip(given.lever, [first, *bills], bills, strict=False):
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
        "levers": [asdict(each) | _bill_facts(bill) for each, bill in zip(given.lever, bills, strict=True)],
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


def _single_mfu(given: argparse.Namespace) -> float:
    rates: dict[str, float] = dict(given.mfu)
    found = rates.get(given.gpu, rates.get(""))
    if found is None:
        raise ConfigurationError(f"the MFU on {given.gpu} is not given: --mfu 0.4")
    return found


def _parameters(given: argparse.Namespace) -> float:
    return given.params or _model(given).parameters


def _training_flops(given: argparse.Namespace) -> tuple[float, str]:
    if given.params:
        return (
            Allocation(parameters=given.params, tokens=given.tokens).flops,
            "6 N D FLOPs, without the products of attention (give --model for them).",
        )
    model = _model(given)
    return (
        model.flops_per_token * given.tokens,
        f"{plain(model.parameters)} parameters; FLOPs with the products of attention.",
    )


def _model(given: argparse.Namespace) -> Transformer:
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


def _gpu_price(given: argparse.Namespace) -> tuple[float | None, str]:
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


# --- arguments ------------------------------------------------------------------------------------------
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spottrain plan", description=ABOUT)
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")

    def question(
        name: str, answer: Callable[[argparse.Namespace], Answer], *flags: str
    ) -> argparse.ArgumentParser:
        about = (answer.__doc__ or "").strip()
        added = questions.add_parser(name, help=about[0].lower() + about[1:].rstrip("."), description=about)
        for flag in flags:
            added.add_argument(f"--{flag}", **FLAGS[flag])
        added.add_argument("-o", "--output", choices=("text", "json"), default="text")
        added.set_defaults(answer=answer)
        return added

    question("compute", compute, "flops", "params", "tokens", "budget", "gpu", "price", "mfu")
    added = question(
        "time", time, *MODEL, "tokens", "gpu", "gpus", "mfu", "price", "instance", "spot", "goodput"
    )
    _require(added, "tokens", "gpu", "mfu")
    added = question("memory", memory_of, *MODEL[1:], "gpu", "gpus", "precision", "optimizer", "attention")
    _require(added, "gpu")
    added = question(
        "network", network, *MODEL, "gpu", "gpus", "nodes", "step-seconds", "samples-per-second",
        "accumulation", "gradient-bytes", "link", "network",
    )  # fmt: skip
    _require(added, "gpu", "gpus", "step-seconds")
    added = question("checkpoint", checkpoint_of, *MODEL, "optimizer", "nodes", "bandwidth", "step-seconds")
    _require(added, "bandwidth", "step-seconds")
    added = question(
        "learning-rate", learning_rate, "lr", "base-batch", "batch", "rule", "steps", "warmup-steps",
        "warmup-epochs", "steps-per-epoch",
    )  # fmt: skip
    _require(added, "lr", "base-batch", "batch", "steps")
    added = question(
        "hardware", choose, *MODEL[1:], "tokens", "batch", "mfu", "optimizer", "deadline", "budget", "spot",
        "goodput", "startup", "cloud", "max-nodes", "top",
    )  # fmt: skip
    _require(added, "tokens", "batch", "mfu")
    _require(question("levers", levers, "price", "gpus", "hours", "runs", "lever"), "price", "hours")
    return parser


def _require(parser: argparse.ArgumentParser, *flags: str) -> None:
    for action in parser._actions:
        if any(f"--{flag}" in action.option_strings for flag in flags):
            action.required = True


MODEL: Final = (
    "params", "model", "layers", "hidden", "heads", "vocabulary", "sequence", "feed-forward", "kv-heads",
    "gated", "untied",
)  # fmt: skip
FLAGS: Final[dict[str, dict[str, Any]]] = {
    "flops": {"type": amount, "metavar": "C", "help": "compute budget, such as 1e21"},
    "params": {"type": amount, "metavar": "N", "help": "parameters, such as 7B"},
    "tokens": {"type": amount, "metavar": "D", "help": "tokens of the whole training, such as 500B"},
    "budget": {"type": amount, "metavar": "DOLLARS", "help": "money, such as 50k"},
    "gpu": {"metavar": "NAME", "help": f"one of {', '.join(GPUS)}"},
    "gpus": {"type": whole, "default": 1, "metavar": "N", "help": "GPUs in all (default 1)"},
    "price": {"type": amount, "metavar": "DOLLARS", "help": "dollars per GPU-hour"},
    "mfu": {
        "type": mfu,
        "action": "append",
        "default": [],
        "metavar": "[GPU=]SHARE",
        "help": "model FLOP/s over peak FLOP/s of one GPU, such as 0.4, or H100=0.4; may be repeated",
    },
    "instance": {"metavar": "TYPE", "help": "instance type whose price counts, such as p4d.24xlarge"},
    "spot": {"action": "store_true", "help": "the spot price instead of the on-demand price"},
    "goodput": {
        "type": share,
        "default": 1.0,
        "metavar": "SHARE",
        "help": "useful share of the paid time (default 1: no interruption)",
    },
    "model": {"metavar": "NAME", "help": f"a known shape: {', '.join(MODELS)}"},
    "layers": {"type": whole, "metavar": "N", "help": "transformer layers"},
    "hidden": {"type": whole, "metavar": "N", "help": "width"},
    "heads": {"type": whole, "metavar": "N", "help": "attention heads"},
    "vocabulary": {"type": whole, "metavar": "N", "help": "tokens known"},
    "sequence": {"type": whole, "metavar": "N", "help": "tokens of a sample"},
    "feed-forward": {"type": whole, "metavar": "N", "help": "width of the MLP (default: 4 x hidden)"},
    "kv-heads": {"type": whole, "metavar": "N", "help": "heads of keys and values (default: heads)"},
    "gated": {"action": "store_true", "help": "a gated MLP without biases (SwiGLU), as Llama has"},
    "untied": {"action": "store_true", "help": "the output layer is not the embedding"},
    "precision": {
        "choices": tuple(memory.ELEMENT),
        "help": "default: bf16, or fp16 where the GPU has no bf16",
    },
    "optimizer": {"choices": tuple(memory.OPTIMIZERS), "default": "adamw", "help": "default: adamw"},
    "attention": {
        "choices": ("fused", "math"),
        "default": "fused",
        "help": "fused: scaled_dot_product_attention (default); math keeps the s x s scores",
    },
    "nodes": {"type": whole, "default": 1, "metavar": "N", "help": "nodes (default 1)"},
    "step-seconds": {
        "type": seconds,
        "metavar": "TIME",
        "help": "compute of one optimizer step, such as 0.5s",
    },
    "samples-per-second": {
        "type": amount,
        "metavar": "N",
        "help": "throughput of one GPU alone: also answers that of all",
    },
    "accumulation": {
        "type": whole,
        "default": 1,
        "metavar": "N",
        "help": "micro-batches per step (default 1)",
    },
    "gradient-bytes": {
        "type": int,
        "choices": (4, 2),
        "default": 4,
        "help": "per parameter: 4 (default), or 2 with gradientCompression bf16",
    },
    "link": {
        "type": byte_rate,
        "metavar": "RATE",
        "help": "GPU to GPU, one direction (default: the catalogue's)",
    },
    "network": {
        "type": byte_rate,
        "metavar": "RATE",
        "help": "node to node, one direction, such as 100Gbit/s",
    },
    "bandwidth": {"type": byte_rate, "metavar": "RATE", "help": "one node to the store, such as 1GB/s"},
    "lr": {"type": amount, "metavar": "RATE", "help": "the rate tuned for the base batch"},
    "base-batch": {"type": whole, "metavar": "N", "help": "samples per step for which it was tuned"},
    "batch": {"type": whole, "metavar": "N", "help": "samples of one optimizer step over all GPUs"},
    "rule": {
        "choices": ("linear", "sqrt"),
        "default": "sqrt",
        "help": "linear for SGD, sqrt for Adam (default)",
    },
    "steps": {"type": whole, "metavar": "N", "help": "optimizer steps of the training"},
    "warmup-steps": {"type": whole, "metavar": "N", "help": "length of the warm-up"},
    "warmup-epochs": {"type": amount, "metavar": "N", "help": "the same in epochs"},
    "steps-per-epoch": {"type": whole, "metavar": "N", "help": "needed for --warmup-epochs"},
    "deadline": {"type": seconds, "metavar": "TIME", "help": "paid time at most, such as 72h"},
    "startup": {
        "type": seconds,
        "default": 300.0,
        "metavar": "TIME",
        "help": "paid before the first step: boot, image, compilation (default 5m)",
    },
    "cloud": {"choices": ("aws", "gcp", "azure"), "help": "default: all"},
    "max-nodes": {"type": whole, "default": 16, "metavar": "N", "help": "default 16"},
    "hours": {"type": seconds, "metavar": "TIME", "help": "paid time of a run, such as 72h"},
    "runs": {
        "type": amount,
        "default": 1.0,
        "metavar": "N",
        "help": "runs, such as those of a year (default 1); one that is stopped at 60 %% of its hours is 0.6",
    },
    "lever": {
        "type": lever,
        "action": "append",
        "default": [],
        "metavar": "[NAME:]PART=FACTOR",
        "help": "after / before of price, hours or runs: bf16:hours=48/72, spot:price=0.36; may be repeated",
    },
    "top": {"type": whole, "default": 10, "metavar": "N", "help": "rows to print (default 10)"},
}
