"""Finds the bottleneck from measurements, and the setting that removes it. Pure functions.

The order follows "Always fix the slowest part of the pipeline first: data → memory → compute". First comes
what leaves the device without work: data, a straggler, communication, checkpoints, compilations. If none of
them takes STALL of the time, a roofline model decides: memory bandwidth, launches or compute.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from spottrain.diagnostics import recommendations
from spottrain.diagnostics.flops import Roofline
from spottrain.diagnostics.recommendations import InUse as InUse
from spottrain.diagnostics.step_timer import Rank, Shares

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
FULL: Final = 0.9
"""Utilisation above which a GPU counts as full."""
MEMORY_BUSY, MEMORY_QUIET = 0.8, 0.5
"""A full GPU is memory-bound if its memory is in use for at least the first share, compute-bound up to the
second; between them there is no verdict."""
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
class Measurements:
    """Measurements of one rank in a window of steps, and step times of all ranks."""

    shares: Shares
    roofline: Roofline | None = None
    """Roofline of one optimizer step."""
    compilations: int = 0
    """Compilations in the window, which begins after the first steps."""
    compile_seconds: float = 0.0
    """Seconds of compilation in the window."""
    ranks: tuple[Rank, ...] = ()
    busy: tuple[float, ...] = ()
    """Samples of GPU utilisation, from 0 to 1."""
    bandwidth: tuple[float, ...] = ()
    """Samples of the share of the time in which GPU memory was read or written, from 0 to 1."""
    mfu: float | None = None
    use: InUse = field(default_factory=InUse)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A bottleneck and its fix.

    Attributes:
        name: the kind of bottleneck.
        sentence: what was measured.
        fix: what to change.
    """

    name: Name
    sentence: str
    fix: str

    @property
    def text(self) -> str:
        """The whole verdict, for a log line."""
        return f"{self.name}: {self.sentence} {self.fix}"


def diagnose(facts: Measurements) -> Verdict | None:
    """Returns the bottleneck that the measurements show.

    Args:
        facts: measurements of one window.

    Returns:
        None if the window is shorter than MIN_SECONDS, or without a stall, a roofline and GPU samples.
    """
    if facts.shares.seconds.total < MIN_SECONDS:
        return None
    return _straggler(facts) or _stalled(facts) or _bound(facts) or _by_samples(facts)


def advice(facts: Measurements) -> str:
    """Returns a sentence on utilisation; "" if it is at least WISH, or unknown."""
    busy = statistics.fmean(facts.busy) if facts.busy else facts.shares.utilisation
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
    slowest = max(range(len(facts.ranks)), key=lambda number: facts.ranks[number].own)
    rank = facts.ranks[slowest]
    rest = [each for number, each in enumerate(facts.ranks) if number != slowest]
    # Without the slowest, which would be half of a median of two.
    others = statistics.median(each.own for each in rest)
    waits = statistics.median(each.communication for each in rest)
    late = rank.own - others
    if late < LATE * (others + waits) or late < 0.5 * waits:
        return None  # not late enough, or the others wait for something else
    for_data = rank.data - statistics.median(each.data for each in rest)
    if for_data > 0.5 * late:
        fix = recommendations.of_slow_rank(facts.use, slowest)
    else:
        fix = (
            f"Check the node of rank {slowest}: its clock (heat, power), other load on it, its share "
            "of the samples; if the node is slow, delete its pod so that another node takes over."
        )
    return Verdict(
        name=Name.STRAGGLER,
        sentence=(
            f"Rank {slowest} takes {rank.own:.3g} s for a step without communication, the others "
            f"{others:.3g} s, and they wait for it."
        ),
        fix=fix,
    )


def _stalled(facts: Measurements) -> Verdict | None:
    """Returns a verdict on the greatest stall of at least STALL; the first in this order of equal ones."""
    share = facts.shares.share
    total = facts.shares.seconds.total
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
    if copy > data:
        sentence = f"The copy to the device takes {copy:.0%} of the time, the loader {data:.0%}."
        return Verdict(name=Name.DATA, sentence=sentence, fix=recommendations.of_copy(facts.use))
    sentence = f"The device waits for data {data:.0%} of the time."
    return Verdict(name=Name.DATA, sentence=sentence, fix=recommendations.of_loader(facts.use, data))


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
        computing = facts.shares.seconds.compute / max(1, facts.shares.steps)
        part = min(1.0, roof.arithmetic / computing) if computing > 0 else 0.0
        return _compute(facts, part) if part >= EXPLAINED else None
    parts = [(roof.memory, _memory), (roof.launch, _launch), (roof.arithmetic, _compute)]
    size, verdict_on = max(parts, key=lambda each: each[0])
    return verdict_on(facts, size / roof.total)


def _memory(facts: Measurements, part: float) -> Verdict:
    return Verdict(
        name=Name.MEMORY,
        sentence=f"The device is busy, but {part:.0%} of its work is moving bytes{_mfu(facts)}.",
        fix=recommendations.of_bytes(facts.use),
    )


def _launch(facts: Measurements, part: float) -> Verdict:
    return Verdict(
        name=Name.LAUNCH,
        sentence=(
            f"{part:.0%} of the work is operations so small that dispatching them takes longer than "
            f"running them{_mfu(facts)}."
        ),
        fix=recommendations.of_launches(facts.use),
    )


def _compute(facts: Measurements, part: float) -> Verdict:
    return Verdict(
        name=Name.COMPUTE,
        sentence=f"The device is computing: {part:.0%} of its work is arithmetic{_mfu(facts)}.",
        fix=recommendations.of_arithmetic(facts.use),
    )


def _mfu(facts: Measurements) -> str:
    return "" if facts.mfu is None else f" (MFU {facts.mfu:.0%})"


def _by_samples(facts: Measurements) -> Verdict | None:
    """Verdict without a roofline: a full GPU is limited by memory, or, if that is idle, by arithmetic."""
    if not (facts.busy and facts.bandwidth) or statistics.fmean(facts.busy) < FULL:
        return None
    moving = statistics.fmean(facts.bandwidth)
    if MEMORY_QUIET < moving < MEMORY_BUSY:
        return None
    found = (_memory if moving >= MEMORY_BUSY else _compute)(facts, 1.0)
    return replace(
        found, sentence=f"The GPU is never idle, and its memory is in use {moving:.0%} of the time."
    )
