"""Finds the bottleneck from measurements, and a setting, not made yet, that removes it. Pure functions.

The order follows "Always fix the slowest part of the pipeline first: data → memory → compute". First comes
what leaves the device without work: data, a straggler, communication, checkpoints, compilations. If none of
them takes STALL of the time, a roofline model decides: memory bandwidth, launches or compute.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from spottrain.diagnostics.flops import Roofline
from spottrain.diagnostics.step_timer import Shares

LOW: Final = 0.70
"""Utilisation below which the loader may be the problem rather than the arithmetic."""
WISH: Final = 0.80
"""Target utilisation."""
STALL: Final = 0.15
"""Least share of the time of a stall that gets its own verdict."""
LATE: Final = 0.15
"""A rank is a straggler if it is slower by at least this share of the other ranks' step."""
RECOMPILED: Final = 3
"""Compilations in a window after the first steps that show that shapes keep changing."""
CHECKPOINT_GOAL: Final = 0.01
"""Share of the time that saves may take."""
MIN_SECONDS: Final = 1.0
"""Least seconds of a window. In a shorter one, a time slice of another process looks like a stall."""
AHEAD: Final = 4
"""Useful micro-batches to prefetch per worker; more only use memory."""
EXPLAINED: Final = 0.5
"""Least share of a compiled step that arithmetic must take for a verdict on the work itself: its roofline is
of the uncompiled model, and the compiler removes bytes and launches."""


class Name(StrEnum):
    DATA = "data-bound"
    MEMORY = "memory-bandwidth-bound"
    COMPUTE = "compute-bound"
    LAUNCH = "launch-bound"
    COMMUNICATION = "communication-bound"
    CHECKPOINT = "checkpoint-bound"
    RECOMPILING = "recompiling"
    STRAGGLER = "straggler"


@dataclass(frozen=True, kw_only=True, slots=True)
class InUse:
    """Current settings of a run, so that advice leaves them out. None: unknown."""

    workers: int | None = None
    """Actual loader processes of this rank, such as those that `auto` found."""
    prefetch: int | None = None
    """Micro-batches that each worker prefetches."""
    pin_memory: bool | None = None
    own_loader: bool = False
    """Whether the loader is the script's own, so `training.data` does not apply."""
    precision: str = "fp32"
    compile: bool = False
    sharded: bool = False
    """Whether the model uses FSDP2, which has no communication hooks."""
    whole_share: bool = False
    """Whether a micro-batch is the rank's whole share of the global batch, so it cannot grow alone."""
    drop_last: bool = False
    interval_auto: bool = False
    """Whether the checkpoint interval follows the cost of a save."""
    cuda: bool = False
    """Whether the device is a GPU."""
    bf16: bool = True
    """Whether the device supports bf16."""
    cores: int | None = None
    """CPU cores of the container that this rank may use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """Measurements of one rank in a window of steps, and step times of all ranks."""

    shares: Shares
    roofline: Roofline | None = None
    """Roofline of one optimizer step."""
    compilations: int = 0
    """Compilations in the window, which begins after the first steps."""
    compile_seconds: float = 0.0
    """Seconds of compilation in the window."""
    ranks: tuple[Shares, ...] = ()
    """`shares` of all ranks."""
    busy: tuple[float, ...] = ()
    """Samples of GPU utilisation, from 0 to 1."""
    mfu: float | None = None
    use: InUse = field(default_factory=InUse)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A bottleneck and its fix."""

    name: Name
    sentence: str
    """What was measured."""
    fix: str

    @property
    def text(self) -> str:
        """The whole verdict, for a log line."""
        return f"{self.name}: {self.sentence} {self.fix}"


def diagnose(facts: Measurements) -> Verdict | None:
    """Returns the bottleneck that the measurements show.

    None if the window is shorter than MIN_SECONDS, or without a stall and a roofline.
    """
    if facts.shares.total < MIN_SECONDS:
        return None
    return _straggler(facts) or _stalled(facts) or _bound(facts)


def advice(facts: Measurements) -> str:
    """Returns a sentence on utilisation; "" if it is at least WISH, or unknown."""
    busy = statistics.fmean(facts.busy) if facts.busy else facts.shares.share("compute")
    if not facts.shares.steps:
        return ""
    return utilised(busy, facts.shares.share("data") + facts.shares.share("h2d"))


def utilised(busy: float, waits: float) -> str:
    """Returns the same from two shares of the time: utilisation `busy`, and data wait `waits` (0 to 1)."""
    if busy >= WISH:
        return ""
    if busy >= LOW:
        return f"utilisation is {busy:.0%} (target {WISH:.0%})"
    if waits >= 0.5 * (1 - busy):
        return f"utilisation is {busy:.0%}, below {LOW:.0%}: speed up data loading first, not the computation"
    why = f"but data loading is not the cause: waiting for data takes {waits:.0%} of the time"
    return f"utilisation is {busy:.0%}, below {LOW:.0%}, {why}"


# --- the device has no work -------------------------------------------------------------------------
def _straggler(facts: Measurements) -> Verdict | None:
    if len(facts.ranks) < 2:
        return None
    slowest = max(range(len(facts.ranks)), key=lambda number: facts.ranks[number].own_seconds)
    rank = facts.ranks[slowest]
    rest = [each for number, each in enumerate(facts.ranks) if number != slowest]
    # Without the slowest, which would be half of a median of two.
    others = statistics.median(each.own_seconds for each in rest)
    waits = statistics.median(each.mean("communication") for each in rest)
    late = rank.own_seconds - others
    if late < LATE * (others + waits) or late < 0.5 * waits:
        return None  # not late enough, or the others wait for something else
    for_data = rank.mean("data") - statistics.median(each.mean("data") for each in rest)
    if for_data > 0.5 * late:
        more = (
            "make dataset[i] cheaper"
            if _no_core_left(facts.use)
            else f"raise {_name(facts.use, 'numWorkers')}"
        )
        fix = f"It waits for its data: {more}, or check the storage of rank {slowest}."
    else:
        fix = (
            f"Check the node of rank {slowest}: its clock (heat, power), other load on it, its share "
            "of the samples; if the node is slow, delete its pod so that another node takes over."
        )
    return Verdict(
        name=Name.STRAGGLER,
        sentence=(
            f"Rank {slowest} takes {rank.own_seconds:.3g} s for a step without communication, the others "
            f"{others:.3g} s, and they wait for it."
        ),
        fix=fix,
    )


def _stalled(facts: Measurements) -> Verdict | None:
    """Returns a verdict on the greatest stall of at least STALL; the first in this order of equal ones."""
    share = facts.shares.share
    total = facts.shares.total
    compiling = min(1.0, facts.compile_seconds / total) if total > 0 else 0.0
    stalls = [
        (share("data") + share("h2d"), _data),
        (share("communication"), _communication),
        (share("checkpoint"), _checkpoint),
        (compiling, _recompiling),
    ]
    size, verdict_on = max(stalls, key=lambda each: each[0])
    if size >= STALL:
        return verdict_on(facts, size)
    return _recompiling(facts, compiling) if facts.compilations >= RECOMPILED else None


def _data(facts: Measurements, size: float) -> Verdict:
    data, copy = facts.shares.share("data"), facts.shares.share("h2d")
    if copy <= data:
        sentence = f"The device waits for data {data:.0%} of the time."
        return Verdict(name=Name.DATA, sentence=sentence, fix=_more_workers(facts.use, data))
    if facts.use.pin_memory:
        fix = "Copy less: keep samples in their small type (uint8, token ids) and convert them on the device."
    else:
        pin = _name(facts.use, "pinMemory")
        fix = f"Set {pin} to true: the copy is then faster, and the host does not wait for it."
    sentence = f"The copy to the device takes {copy:.0%} of the time, the loader {data:.0%}."
    return Verdict(name=Name.DATA, sentence=sentence, fix=fix)


def _more_workers(use: InUse, data: float) -> str:
    """Advice if the device waits for data for a share `data` of the time."""
    if _no_core_left(use):
        return (
            f"No CPU core is free for another worker: {use.workers} worker(s) use all {use.cores} "
            "core(s). Give the container more CPU for each GPU, make dataset[i] cheaper (its "
            f"transforms), or store the samples decoded, or cached.{_pinned(use)}"
        )
    # With enough workers a batch is ready when the rest of the step is done.
    now = max(1, use.workers or 0)
    needed = max(now + 1, math.ceil(now * data / max(1 - data, 0.01)) + (1 if use.workers else 0))
    workers = min(needed, max(use.cores or needed, now))
    known = "not known" if use.workers is None else use.workers
    held = f"; {needed} would be needed, but there are {use.cores} cores" if workers < needed else ""
    ahead = ""
    if use.prefetch is None or use.prefetch < AHEAD:
        has = " if it is lower" if use.prefetch is None else f" (now {use.prefetch})"
        ahead = f" and {_name(use, 'prefetchFactor')} to {AHEAD}{has}"
    return (
        f"Set {_name(use, 'numWorkers')} to {workers} (now {known}){ahead}; or make dataset[i] cheaper{held}."
        + _pinned(use)
    )


def _no_core_left(use: InUse) -> bool:
    return use.workers is not None and use.cores is not None and use.workers >= max(1, use.cores)


def _pinned(use: InUse) -> str:
    """Empty if pin_memory is unknown, true, or useless because there is no GPU."""
    return f" Set {_name(use, 'pinMemory')} to true." if use.cuda and use.pin_memory is False else ""


def _name(use: InUse, setting: str) -> str:
    if not use.own_loader:
        return f"training.data.{setting}"
    theirs = {"numWorkers": "num_workers", "prefetchFactor": "prefetch_factor", "pinMemory": "pin_memory"}
    return f"{theirs[setting]} of the script's loader"


def _communication(facts: Measurements, size: float) -> Verdict:
    in_bf16 = (
        "FSDP2's MixedPrecisionPolicy(reduce_dtype=...)"
        if facts.use.sharded
        else "torch's bf16_compress_hook on a DistributedDataParallel of your own"
    )
    return Verdict(
        name=Name.COMMUNICATION,
        sentence=(
            f"Ranks wait for the exchange of gradients {size:.0%} of the time, with nothing left to compute."
        ),
        fix=(
            "Exchange gradients less often: raise globalBatchSize and keep microBatchSize. Or reduce them in "
            f"bf16: {in_bf16}."
        ),
    )


def _checkpoint(facts: Measurements, size: float) -> Verdict:
    times = size / max(1 - size, 0.01) * (1 - CHECKPOINT_GOAL) / CHECKPOINT_GOAL
    auto = (
        ""
        if facts.use.interval_auto
        else ", or set it to auto, which weighs this cost against that of an interruption"
    )
    return Verdict(
        name=Name.CHECKPOINT,
        sentence=f"Saves block training {size:.0%} of the time.",
        fix=f"Make checkpoint.interval {math.ceil(times)} times as long{auto}.",
    )


def _recompiling(facts: Measurements, size: float) -> Verdict:
    drop = "" if facts.use.drop_last else ", drop_last=True"
    off = "; else set training.compile to false" if facts.use.compile else ""
    return Verdict(
        name=Name.RECOMPILING,
        sentence=f"torch.compile compiled {facts.compilations} more time(s) in {facts.shares.steps} steps, "
        f"{size:.0%} of the time: shapes, or Python numbers, keep changing.",
        fix=f"Give batches one shape (pad to a fixed length{drop}), or let Dynamo take sizes as variables "
        f"(no dynamic=False){off}.",
    )


# --- the work itself is the limit -------------------------------------------------------------------
def _bound(facts: Measurements) -> Verdict | None:
    roof = facts.roofline
    if roof is None or roof.total <= 0:
        return None
    if facts.use.compile:
        computing = facts.shares.mean("compute")
        part = min(1.0, roof.arithmetic / computing) if computing > 0 else 0.0
        return _compute(facts, part) if part >= EXPLAINED else None
    parts = [(roof.memory, _memory), (roof.launch, _launch), (roof.arithmetic, _compute)]
    size, verdict_on = max(parts, key=lambda each: each[0])
    return verdict_on(facts, size / roof.total)


def _memory(facts: Measurements, part: float) -> Verdict:
    fix = "Set compile to true: it joins elementwise operations, so that values stay in registers."
    if (name := _half(facts.use)) is not None:
        fix = (
            f"Set precision to {name}, which moves half of the bytes; and compile to true, which joins "
            "elementwise operations."
        )
    sentence = f"The device is busy, but {part:.0%} of its work is moving bytes{_mfu(facts)}."
    return Verdict(name=Name.MEMORY, sentence=sentence, fix=fix)


def _launch(facts: Measurements, part: float) -> Verdict:
    graphs = " and compileMode to reduce-overhead (CUDA graphs)" if facts.use.cuda else ""
    return Verdict(
        name=Name.LAUNCH,
        sentence=(
            f"{part:.0%} of the work is operations so small that dispatching them takes longer than "
            f"running them{_mfu(facts)}."
        ),
        fix=f"Set compile to true{graphs}; or raise {_batch(facts.use)}, so that each operation does more.",
    )


def _compute(facts: Measurements, part: float) -> Verdict:
    if (name := _half(facts.use)) is None:
        fix = f"This is the goal. A larger {_batch(facts.use)} may use the device even better."
    else:
        fix = f"This is the goal. Even faster: precision {name}, for matrix products in half the time."
    sentence = f"The device is computing: {part:.0%} of its work is arithmetic{_mfu(facts)}."
    return Verdict(name=Name.COMPUTE, sentence=sentence, fix=fix)


def _half(use: InUse) -> str | None:
    """Returns the 16-bit format for a run in fp32, with a remark on loss scaling; None if there is none.

    bf16 if the device supports it; else fp16 with loss scaling on a GPU (V100, T4).
    """
    if use.precision != "fp32" or not (use.bf16 or use.cuda):
        return None
    remark = "this GPU has no bf16; Trainer scales the loss by itself, techniques.Amp does in a custom loop"
    return "bf16" if use.bf16 else f"fp16 ({remark})"


def _batch(use: InUse) -> str:
    """A micro-batch can only grow within the global batch."""
    return "globalBatchSize and microBatchSize" if use.whole_share else "microBatchSize"


def _mfu(facts: Measurements) -> str:
    return "" if facts.mfu is None else f" (MFU {facts.mfu:.0%})"
