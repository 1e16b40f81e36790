"""Writes docs/levers.md: each lever on cost, before and after, from the records of bench/results/.

    python -m bench.levers

A row takes its figures from the newest record that has all of them. What no record has is "unmeasured".
`bench/record.py` runs this after each record, and tests/unit/bench checks that the page is in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from spottrain.planner.instances import Instance, instances

from bench.goodput import RECALL
from bench.record import ROOT, stored, table

PAGE: Final = ROOT / "docs" / "levers.md"
Record = Mapping[str, Any]
Records = Mapping[str, Sequence[Record]]
Where = tuple[str, ...]
"""Keys of a figure, from the top down; "*" is the mean over all keys of that level."""

ON_DEMAND, SPOT = 3.06, 0.9731
"""Dollars per hour: one V100, as in the policy benchmark."""
JOB_HOURS: Final = 48.0
EVENTS: Final = 100
RUN_HOURS: Final = 100.0
CPU_TYPE: Final = "c7i.8xlarge"
UNRESOLVED: Final = 1.5
"""Where the slowest round took this much longer than the fastest, a time of a step says nothing."""
ENDS: Final = (("least", "greatest"), ("min", "max"))
"""What benchmarks call the ends of the rounds beside their median."""
Span = tuple[float, float]
"""Least and greatest of the rounds of a figure, or the interval that it is in."""
NO_GPU: Final = "unmeasured (needs a GPU)"
NO_CASE: Final = "unmeasured (needs a GPU, and a case in bench/gpu)"


def of_dollars(value: float) -> float:
    return value


def of_goodput(value: float) -> float:
    """Dollars of JOB_HOURS of saved work on spot, where that share of the paid time is saved work."""
    return JOB_HOURS * SPOT / value


def of_seconds(value: float) -> float:
    """Dollars of EVENTS such times on spot."""
    return EVENTS * value * SPOT / 3600


def of_run(percent: float) -> float:
    """Dollars of JOB_HOURS on spot, of which that many percent are paid."""
    return JOB_HOURS * SPOT * percent / 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """A lever on the price of an hour, or on paid time without work."""

    name: str
    measure: str
    benchmark: str
    before: Where = ()
    after: Where = ()
    more_percent: Where = ()
    """In place of `before` and `after`: what the lever adds to the time, in percent."""
    more_interval: Where = ()
    """The two ends of the interval that `more_percent` is in."""
    money: Callable[[float], float]

    def figures(self, records: Records) -> tuple[Record, float, float] | None:
        """Returns the newest record, and the figures before and after."""
        if self.more_percent:
            found = newest(records, self.benchmark, self.more_percent)
            return None if found is None else (found[0], 100.0, 100.0 + found[1][0])
        found = newest(records, self.benchmark, self.before, self.after)
        return None if found is None else (found[0], found[1][0], found[1][1])

    def spans(self, record: Record) -> tuple[Span | None, Span | None]:
        """Returns what the figures before and after vary over, as far as the record says it."""
        if self.more_percent:
            ends = at(record["figures"], self.more_interval) if self.more_interval else None
            return None, None if ends is None else (100.0 + ends[0], 100.0 + ends[1])
        return span(record["figures"], self.before), span(record["figures"], self.after)

    def ratios(self, record: Record) -> list[float]:
        """Returns cost after / before for each key of a "*", where both figures have one."""
        if "*" not in self.before or "*" not in self.after:
            return []
        one, other = (each_of(record["figures"], where) for where in (self.before, self.after))
        return [self.money(other[key]) / self.money(one[key]) for key in one if key in other]


CONFIGURATIONS: Final = ("configurations", "*")
GOODPUT: Final = ("settings", "save 30 s, restart 180 s")
STOPPED: Final = ("stopped_sight", "*")
"""As the operator asks for spot: the job stands still meanwhile."""
FREE: Final = "bound: availability known for free: "


def _to_cheapest(name: str, rule: str, where: Where, ours: Where | None = None) -> Lever:
    """`where`: the group of figures of the rule that is replaced, and of ours if that has no other."""
    return Lever(
        name=name,
        measure="dollars of the job",
        benchmark="policy",
        before=(*where, rule),
        after=(*(ours or where), "ours"),
        money=of_dollars,
    )


PRICE: Final = (
    _to_cheapest("on-demand -> spot by `Cheapest`", "on_demand", CONFIGURATIONS, STOPPED),
    _to_cheapest("Uniform Progress (NSDI'24) -> `Cheapest`", "uniform_progress", STOPPED),
    _to_cheapest(f"{FREE}spot until it gets late (greedy) -> `Cheapest`", "greedy", CONFIGURATIONS),
    _to_cheapest(f"{FREE}spot, else on-demand -> `Cheapest`", "spot_else_on_demand", CONFIGURATIONS),
    _to_cheapest(f"{FREE}Uniform Progress -> `Cheapest`", "uniform_progress", CONFIGURATIONS),
    Lever(
        name=f"interruptions without notice -> {RECALL:.0%} of them with notice and a last save",
        measure="saved work / paid time",
        benchmark="goodput",
        before=(*GOODPUT, "goodput"),
        after=(*GOODPUT, "goodput_with_notices"),
        money=of_goodput,
    ),
    Lever(
        name="best fixed save interval (known by hindsight) -> `interval: auto`",
        measure="saved work / paid time",
        benchmark="goodput",
        before=(*GOODPUT, "goodput_best_fixed"),
        after=(*GOODPUT, "goodput"),
        money=of_goodput,
    ),
    Lever(
        name="compile again at each start -> stored compile cache",
        measure="saved work / paid time",
        benchmark="goodput",
        before=("settings", "measured: 1 GiB, cold compile cache", "goodput_with_notices"),
        after=("settings", "measured: 1 GiB, warm compile cache", "goodput_with_notices"),
        money=of_goodput,
    ),
    Lever(
        name="the same, one restart",
        measure="seconds to the first step",
        benchmark="restart",
        before=("cold", "to_first_step", "median"),
        after=("warm", "to_first_step", "median"),
        money=of_seconds,
    ),
    Lever(
        name="`torch.save` in the loop -> save in the background",
        measure="seconds that a save of 1 GiB blocks",
        benchmark="checkpoint",
        before=("torch_save_s", "median"),
        after=("stall_s", "median"),
        money=of_seconds,
    ),
    Lever(
        name="the same, with what the training loses to the upload beside it",
        measure="seconds of training that a save of 1 GiB costs",
        benchmark="checkpoint",
        before=("torch_save_s", "median"),
        after=("work_lost_s_per_save", "median"),
        money=of_seconds,
    ),
    Lever(
        name="hand-written loop -> `Trainer`",
        measure="percent of the loop's time",
        benchmark="loop",
        more_percent=("overhead_percent",),
        more_interval=("interval_95",),
        money=of_run,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """A lever on the time and memory of a step."""

    name: str
    cpu: str = ""
    """Key in the figures of the benchmark; "": it does nothing on a CPU."""
    benchmark: str = "techniques"
    gpu: tuple[str, str, str] | None = None
    """Group, case before and case after in the figures of the benchmark `gpu`."""


TECHNIQUES: Final = (
    Technique(name="`precision: bf16`", cpu="bf16", gpu=("precision", "fp32", "bf16")),
    Technique(name="`precision: fp16`", cpu="fp16", gpu=("precision", "fp32", "fp16")),
    Technique(name="`precision: tf32`", gpu=("precision", "fp32", "tf32")),
    Technique(name="accumulation over 4 micro-batches", cpu="accumulation 4"),
    Technique(name="`microBatchSize: auto`", cpu="microBatchSize auto", gpu=("batch", "given", "auto")),
    Technique(name="activation checkpointing, every 3rd", cpu="activation checkpointing, every 3rd"),
    Technique(
        name="activation checkpointing, every 2nd",
        cpu="activation checkpointing, every 2nd",
        gpu=("activations", "none", "every 2nd"),
    ),
    Technique(
        name="activation checkpointing, all",
        cpu="activation checkpointing, all",
        gpu=("activations", "none", "all"),
    ),
    Technique(name="`compile: true`", cpu="compile", gpu=("compile", "off", "default")),
    Technique(name="`compileMode: reduce-overhead`", gpu=("compile", "off", "reduce-overhead")),
    Technique(name="`compileMode: max-autotune`", gpu=("compile", "off", "max-autotune")),
    Technique(name="`optimizer: adamw` (fused)", cpu="fused AdamW"),
    Technique(name="`optimizer: sgd`", cpu="sgd"),
    Technique(name="`optimizer: adafactor`", cpu="adafactor"),
    Technique(name="`emaDecay`", cpu="average of the weights"),
    Technique(name="`clipGradNorm`", cpu="clipping"),
    Technique(name="`data.numWorkers: 2`", cpu="2 loader workers"),
    Technique(
        name="the same, samples that wait 40 ms each",
        cpu="samples of 40 ms, 2 workers",
        benchmark="data_wait",
    ),
    Technique(
        name="`data.numWorkers: auto`, samples that wait 40 ms each",
        cpu="samples of 40 ms, numWorkers auto",
        benchmark="data_wait",
    ),
    Technique(name="`data.pinMemory`"),
    Technique(name="`gradientCompression: bf16`, 2 ranks", cpu="2 ranks, gradients in bf16"),
    Technique(name="all that go together", cpu="all that go together"),
)


# --- figures ------------------------------------------------------------------------------------------
def figure(figures: Mapping[str, Any], where: Where) -> float | None:
    """Returns the figure at that place; None if it is not there."""
    if not where:
        return float(figures) if isinstance(figures, int | float) else None
    if not isinstance(figures, Mapping):
        return None
    key, rest = where[0], where[1:]
    if key != "*":
        return figure(figures[key], rest) if key in figures else None
    found = [figure(each, rest) for each in figures.values()]
    known = [each for each in found if each is not None]
    return mean(known) if known and len(known) == len(found) else None


def at(figures: Any, where: Where) -> Any:
    """Returns what is at that place; None if nothing is there."""
    for key in where:
        figures = figures.get(key) if isinstance(figures, Mapping) else None
    return figures


def each_of(figures: Mapping[str, Any], where: Where) -> dict[str, float]:
    """Returns the figure of each key that the "*" of the place stands for."""
    star = where.index("*")
    groups = at(figures, where[:star]) or {}
    found = {key: figure(group, where[star + 1 :]) for key, group in groups.items()}
    return {key: value for key, value in found.items() if value is not None}


def span(figures: Mapping[str, Any], where: Where) -> Span | None:
    """Returns least and greatest beside a median; None where there are none."""
    beside = at(figures, where[:-1]) if where[-1:] == ("median",) else {}
    found = [(beside[least], beside[most]) for least, most in ENDS if least in beside and most in beside]
    return (float(found[0][0]), float(found[0][1])) if found else None


def overlap(one: Span, other: Span) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def newest(records: Records, benchmark: str, *places: Where) -> tuple[Record, list[float]] | None:
    """Returns the newest record that has a figure at each place, and these figures."""
    for record in sorted(records.get(benchmark, ()), key=lambda each: str(each["date"]), reverse=True):
        found = [figure(record["figures"], place) for place in places]
        known = [each for each in found if each is not None]
        if len(known) == len(places):
            return record, known
    return None


class Sources:
    """The records that the page names, each with its number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, ...], int] = {}
        self._lines: list[str] = []

    def number(self, record: Record) -> str:
        identity = tuple(str(record[name]) for name in ("benchmark", "date", "commit"))
        if identity not in self._numbers:
            self._numbers[identity] = len(self._numbers) + 1
            self._lines.append(f"{len(self._numbers)}. {_origin(record)}")
        return str(self._numbers[identity])

    @property
    def lines(self) -> list[str]:
        return list(self._lines)


def _origin(record: Record) -> str:
    on = record["machine"]
    device = record["figures"].get("device", "cpu")
    where = f"{on['cores']} cores, {on['cpu']}" + ("" if device == "cpu" else f", {device}")
    return (
        f"`{record['command']}`, {record['date'][:10]}, commit {record['commit']}; {where}, "
        f"load {on['load']}. {record['note']}"
    ).rstrip()


# --- rows ---------------------------------------------------------------------------------------------
def price_row(lever: Lever, records: Records, sources: Sources) -> list[str]:
    found = lever.figures(records)
    if found is None:
        return [lever.name, lever.measure, "unmeasured", "", "", "", ""]
    record, before, after = found
    spans = lever.spans(record)
    shown = [_with_span(value, ends) for value, ends in zip((before, after), spans, strict=True)]
    ratio, money = "unresolved", ""
    if not overlap(spans[0] or (before, before), spans[1] or (after, after)):
        paid = [lever.money(each) for each in (before, after)]
        ratio, money = f"{paid[1] / paid[0]:.3f}", f"{dollars(paid[0])} -> {dollars(paid[1])}"
        if each := lever.ratios(record):
            ratio += f" ({min(each):.3f} to {max(each):.3f})"
    return [lever.name, lever.measure, *shown, ratio, money, sources.number(record)]


def _with_span(value: float, ends: Span | None) -> str:
    return f"{value:.4g}" + (f" ({ends[0]:.4g} to {ends[1]:.4g})" if ends else "")


def technique_row(technique: Technique, records: Records, sources: Sources) -> list[str]:
    cpu = list(_on_cpu(technique, records, sources))
    return [technique.name, *cpu, _on_gpu(technique, records, sources)]


def _on_cpu(technique: Technique, records: Records, sources: Sources) -> Iterator[str]:
    """Yields seconds, their ratio, money, MiB, their ratio, source."""
    place = ("techniques", technique.cpu)
    figures = ((*place, "seconds"), (*place, "mib"))
    found = newest(records, technique.benchmark, *figures) if technique.cpu else None
    if found is None:
        yield from ("none on a CPU" if not technique.cpu else "unmeasured", "", "", "", "", "")
        return
    record = found[0]
    rows = record["figures"]["techniques"]
    after = rows[technique.cpu]
    before = rows[after["base"]]
    ratio = after["seconds"] / before["seconds"]
    times = " -> ".join(_with_span(row["seconds"], row["seconds_least_most"]) for row in (before, after))
    if resolved(before, after):
        run = RUN_HOURS * cpu_price()
        yield from (times, f"{ratio:.2f}", f"{dollars(run)} -> {dollars(run * ratio)}")
    else:
        yield from (times, "unresolved", "")
    yield f"{before['mib']} -> {after['mib']}"
    yield f"{after['mib'] / before['mib']:.2f}"
    yield sources.number(record)


def resolved(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether the rounds of each agree, and no round of one took as long as one of the other."""
    one, other = before["seconds_least_most"], after["seconds_least_most"]
    return all(most < UNRESOLVED * least for least, most in (one, other)) and not overlap(one, other)


def _on_gpu(technique: Technique, records: Records, sources: Sources) -> str:
    if technique.gpu is None:
        return NO_CASE
    group, before, after = technique.gpu
    measured = {
        "gpu": [each for each in records.get("gpu", ()) if each["figures"].get("device", "cpu") != "cpu"]
    }
    speed = "tokens_per_second"
    found = newest(measured, "gpu", (group, before, speed), (group, after, speed))
    if found is None:
        return NO_GPU
    record, (slow, fast) = found
    return f"{slow:.0f} -> {fast:.0f} tokens/s, time {slow / fast:.2f} (record {sources.number(record)})"


def dollars(value: float) -> str:
    return f"${value:,.2f}" if value >= 0.01 else f"${value:.2g}"


def cpu_type() -> Instance:
    return next(each for each in instances() if each.name == CPU_TYPE)


def cpu_price() -> float:
    price = cpu_type().on_demand
    assert price is not None, f"the catalogue has no price of {CPU_TYPE}"
    return price.usd_per_hour


# --- the page -----------------------------------------------------------------------------------------
def page(records: Records) -> str:
    sources = Sources()
    price = cpu_type().on_demand
    assert price is not None
    where = f"${price.usd_per_hour} an hour, {CPU_TYPE} on-demand, {price.where}, {price.date}"
    head = ["lever", "what was measured", "before", "after", "cost after / before", "dollars", "record"]
    step = ["seconds of a step on a CPU", "ratio", "dollars", "MiB on a CPU", "ratio", "record"]
    return "\n\n".join(
        [
            HEAD,
            "## The price of an hour, and hours without work",
            PRICE_TEXT,
            table(head, [price_row(lever, records, sources) for lever in PRICE]),
            "## The time and memory of a step",
            TECHNIQUE_TEXT.format(hours=RUN_HOURS, price=where, unresolved=UNRESOLVED - 1),
            table(
                ["lever", *step, "on a GPU"], [technique_row(each, records, sources) for each in TECHNIQUES]
            ),
            "## What depends on the run",
            RUN_TEXT,
            "## Records",
            "\n".join(sources.lines) + "\n",
        ]
    )


HEAD: Final = """\
# Levers on cost, before and after

Written by `python -m bench.levers` from the records in `bench/results/`; do not edit it. A command of this
repository measured each figure, and its record says when and where. A ratio below 1 is cheaper. Dollars stand
only beside a measured ratio. Do not multiply ratios of different rows: nobody measured them together."""
PRICE_TEXT: Final = f"""\
- *dollars of the job*: a simulation of the rule of `capacity.type: Cheapest` on recorded spot availability.
  {JOB_HOURS:.0f} h of work on one V100, the mean of the benchmark's deadlines, overheads and windows; in
  brackets the ratios of single deadlines, overheads and groups of windows. Spot is asked for as the
  operator does: the job stands still meanwhile, and a node takes two minutes to boot (those of on-demand
  alone take none).
  Rows that begin with *bound* know for free where spot is available, which no operator does.
- *saved work / paid time*: a simulation on recorded spot runs, in dollars of {JOB_HOURS:.0f} h of saved work.
  A save takes 30 s and a restart 180 s; in the row of the compile cache both are as measured here.
- *seconds*: measured on this project's CPUs, in dollars of {EVENTS} such times. In brackets least and
  greatest; where they overlap there is no ratio. `torch.save` writes to a local disk and uploads nothing.
  The save in the background uploads; uploader and store ran on the same 2 cores as the training, which has
  one thread.
- *percent*: measured on this project's CPUs, with its 95 % interval, in dollars of {JOB_HOURS:.0f} h.

All dollars at ${ON_DEMAND} an hour on-demand and ${SPOT} on spot."""
TECHNIQUE_TEXT: Final = """\
The GPT of `examples/` on one thread of a CPU. Dollars: {hours:.0f} h without the lever at {price},
and what they become by the ratio. In brackets are the fastest and the slowest round. A ratio is *unresolved*
where the rounds of one side differ by {unresolved:.0%} or more, or those of both sides overlap.
A CPU's ratios say nothing about a GPU; `make bench-gpu` on one fills the last column."""
RUN_TEXT: Final = """\
Early stopping, the size of the model, the instance type and the number of GPUs have no ratio of their own: it
differs from run to run. `spottrain cost JOB` prints the paid hours after the best evaluation, the most that
early stopping could have saved. `spottrain plan` computes the others: [planning.md](planning.md)."""


def write(path: Path = PAGE) -> None:
    path.write_text(page(stored()))


if __name__ == "__main__":
    write()
