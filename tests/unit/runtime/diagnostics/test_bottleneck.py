"""From measured facts to the one thing to change. Tables, where only a GPU could show them in a training."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from spottrain.diagnostics.bottleneck import (
    STALL,
    InUse,
    Measurements,
    Name,
    Verdict,
    advice,
    diagnose,
)
from spottrain.diagnostics.flops import Roofline
from spottrain.diagnostics.step_timer import Shares

from tests.support.sentences import Told

V100 = InUse(cuda=True, bf16=False)
FULL = (0.97,) * 8


def facts(*, use: InUse | None = None, **more: Any) -> Measurements:
    """Seconds of ten steps; `compute` fills them up to ten."""
    phases = ("data", "h2d", "communication", "checkpoint", "other")
    parts = {name: more.pop(name, 0.0) for name in phases}
    shares = Shares(10, **parts, compute=10 - sum(parts.values()))
    return Measurements(shares=shares, use=use or InUse(), **more)


def roof(arithmetic: float = 0.0, memory: float = 0.0, launch: float = 0.0) -> Roofline:
    return Roofline(arithmetic=arithmetic, memory=memory, launch=launch)


def ranks(*rows: tuple[float, float, float]) -> tuple[Shares, ...]:
    """Of each rank's step: seconds without communication, those of them for data, and communication."""
    return tuple(Shares(1, data=data, compute=own - data, communication=wait) for own, data, wait in rows)


def judged(known: Measurements) -> Verdict:
    verdict = diagnose(known)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    ("known", "name"),
    [
        (facts(data=4), Name.DATA),
        (facts(h2d=4), Name.DATA),
        (facts(data=1, h2d=1), Name.DATA),
        (facts(communication=4), Name.COMMUNICATION),
        (facts(checkpoint=4), Name.CHECKPOINT),
        (facts(compile_seconds=4.0, compilations=1), Name.RECOMPILING),
        (facts(compile_seconds=0.1, compilations=5, roofline=roof(1)), Name.RECOMPILING),
        (facts(roofline=roof(arithmetic=3, memory=2, launch=1)), Name.COMPUTE),
        (facts(roofline=roof(arithmetic=2, memory=3, launch=1)), Name.MEMORY),
        (facts(roofline=roof(arithmetic=1, memory=2, launch=3)), Name.LAUNCH),
        (facts(communication=4, ranks=ranks((1.0, 0, 0), (0.5, 0, 0.5))), Name.STRAGGLER),
        (facts(roofline=roof(1), ranks=ranks((1.0, 0, 0), (0.9, 0, 0.1))), Name.COMPUTE),
    ],
)
def test_facts_have_a_name(known: Measurements, name: Name) -> None:
    assert judged(known).name is name


def test_the_greatest_stall_is_told_and_of_equal_ones_data_come_first() -> None:
    assert judged(facts(data=2, communication=3)).name is Name.COMMUNICATION
    assert judged(facts(data=3, checkpoint=3, communication=3)).name is Name.DATA


def test_work_is_judged_only_where_no_stall_is_worth_it() -> None:
    known = roof(launch=1)
    assert judged(facts(data=10 * STALL, roofline=known)).name is Name.DATA
    assert judged(facts(data=10 * STALL - 0.1, roofline=known)).name is Name.LAUNCH


@pytest.mark.parametrize(
    "known",
    [
        Measurements(shares=Shares()),
        facts(),
        facts(busy=FULL),
        facts(mfu=0.5),
    ],
)
def test_with_nothing_to_judge_by_nothing_is_said(known: Measurements) -> None:
    assert diagnose(known) is None


COMPILED = InUse(compile=True)


def test_of_a_compiled_model_launches_and_bytes_that_the_compiler_removes_bind_nothing() -> None:
    uncompiled = roof(launch=0.9, arithmetic=0.6)
    assert judged(facts(use=COMPILED, roofline=uncompiled)).name is Name.COMPUTE
    assert judged(facts(roofline=uncompiled)).name is Name.LAUNCH


def test_where_arithmetic_explains_little_of_a_compiled_step_it_is_not_blamed() -> None:
    assert diagnose(facts(use=COMPILED, roofline=roof(launch=0.9, arithmetic=0.3))) is None


def test_a_window_of_less_than_a_second_says_nothing() -> None:
    short = Shares(10, data=0.9)
    assert diagnose(Measurements(shares=short)) is None
    assert judged(Measurements(shares=Shares(10, data=1.0))).name is Name.DATA


# --- stragglers -------------------------------------------------------------------------------------
def test_ranks_that_wait_for_the_network_are_no_stragglers() -> None:
    known = facts(communication=6, ranks=ranks((0.5, 0, 0.6), (0.4, 0, 0.6)))
    assert judged(known).name is Name.COMMUNICATION


def test_the_straggler_is_named_with_what_it_costs() -> None:
    known = facts(ranks=ranks((0.4, 0, 0.6), (0.5, 0, 0.5), (1.0, 0, 0.0), (0.5, 0, 0.5)))
    verdict = judged(known)
    assert verdict.sentence.startswith("Rank 2 takes 1 s")
    assert "node of rank 2" in verdict.fix


# --- fixes ------------------------------------------------------------------------------------------
STRAGGLES = {"ranks": ranks((0.5, 0.1, 0.5), (1.0, 0.6, 0.0))}
FIXES: list[tuple[InUse, dict[str, Any]]] = [
    (InUse(workers=0), {"data": 6}),
    (InUse(workers=4), {"data": 5}),
    (InUse(workers=2, prefetch=2), {"data": 5}),
    (InUse(workers=2, prefetch=8), {"data": 5}),
    (InUse(workers=2, cores=3), {"data": 6}),
    (InUse(workers=2, cores=2, prefetch=2), {"data": 5}),
    (InUse(workers=8, cores=2, prefetch=2), {"data": 5}),
    (InUse(workers=2, own_loader=True), {"data": 5}),
    (InUse(workers=2, cuda=True, pin_memory=False), {"data": 5}),
    (InUse(workers=2, cores=2, cuda=True, pin_memory=False), {"data": 5}),
    (InUse(workers=2, pin_memory=False), {"data": 5}),  # no GPU: there is nothing to pin for
    (InUse(workers=2, cuda=True), {"data": 5}),  # not known
    (InUse(workers=2, cuda=True, pin_memory=True), {"data": 5}),
    (InUse(workers=2, compile=True), {"data": 5}),
    (InUse(workers=2, cores=2, compile=True), {"data": 5}),
    (InUse(workers=2), STRAGGLES),
    (InUse(workers=2, cores=2), STRAGGLES),
    (InUse(), {"h2d": 5}),
    (InUse(pin_memory=True), {"h2d": 5}),
    (InUse(), {"communication": 5}),
    (InUse(sharded=True), {"communication": 5}),
    (InUse(), {"checkpoint": 5}),
    (InUse(interval_auto=True), {"checkpoint": 5}),
    (InUse(compile=True), {"compile_seconds": 5.0}),
    (InUse(drop_last=True), {"compile_seconds": 5.0}),
    (InUse(), {"roofline": roof(memory=1)}),
    (InUse(bf16=False), {"roofline": roof(memory=1)}),
    (V100, {"roofline": roof(memory=1)}),
    (InUse(precision="fp16", bf16=False, cuda=True), {"roofline": roof(memory=1)}),
    (InUse(cuda=True), {"roofline": roof(launch=1)}),
    (InUse(), {"roofline": roof(launch=1)}),
    (InUse(whole_share=True), {"roofline": roof(launch=1)}),
    (InUse(), {"roofline": roof(arithmetic=1)}),
    (V100, {"roofline": roof(arithmetic=1)}),
    (InUse(precision="bf16"), {"roofline": roof(arithmetic=1)}),
    (InUse(), {"roofline": roof(arithmetic=0.3, memory=0.1), "mfu": 0.28}),
    (COMPILED, {"roofline": roof(launch=0.9, arithmetic=0.6)}),
]


def said(use: InUse, known: dict[str, Any]) -> str:
    """What is not as usual, and what is said of it."""
    unusual = [
        f"{each.name}={value}" for each in fields(use) if (value := getattr(use, each.name)) != each.default
    ]
    return f"{', '.join([*unusual, *known])}\n  {judged(facts(use=use, **known)).text}"


def test_a_verdict_names_the_settings_to_change_and_none_that_is_made_already(told: Told) -> None:
    told("\n".join(said(*each) for each in FIXES))


# --- the first words --------------------------------------------------------------------------------
LOW: dict[str, Measurements] = {
    "data": facts(data=4),
    "copies": facts(h2d=4),
    "communication": facts(communication=4),
    "below the target": facts(data=2.5),
    "the GPU's own word holds": facts(data=4, busy=FULL),
    "half busy": facts(busy=(0.5,) * 4),
    "half busy with few data": facts(data=0.15, h2d=0.05, busy=(0.45,) * 4),
    "half busy with data": facts(data=3, busy=(0.45,) * 4),
}


@pytest.mark.parametrize("name", LOW)
def test_low_utilisation_is_said_first_with_whose_it_is(name: str, told: Told) -> None:
    told(advice(LOW[name]))
