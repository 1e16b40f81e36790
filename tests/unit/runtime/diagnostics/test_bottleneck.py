"""From measured facts to the one thing to change. Tables, where only a GPU could show them in a training."""

from __future__ import annotations

import re
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
    swing,
)
from spottrain.diagnostics.flops import Roofline
from spottrain.diagnostics.recommendations import too_many_workers
from spottrain.diagnostics.step_timer import Rank, Seconds, Shares

SWINGING = (0.0, 1.0) * 8
V100 = InUse(cuda=True, bf16=False)
FULL = (0.97,) * 8


def facts(*, use: InUse | None = None, **more: Any) -> Measurements:
    """Seconds of ten steps; `compute` fills them up to ten."""
    phases = ("data", "h2d", "communication", "checkpoint", "other")
    parts = {name: more.pop(name, 0.0) for name in phases}
    seconds = Seconds(**parts, compute=10 - sum(parts.values()))
    return Measurements(shares=Shares(steps=10, seconds=seconds), use=use or InUse(), **more)


def roof(arithmetic: float = 0.0, memory: float = 0.0, launch: float = 0.0) -> Roofline:
    return Roofline(arithmetic=arithmetic, memory=memory, launch=launch)


def ranks(*rows: tuple[float, float, float]) -> tuple[Rank, ...]:
    return tuple(Rank(own=own, data=data, communication=wait) for own, data, wait in rows)


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
        (facts(busy=SWINGING), Name.DATA),  # a loop that marks no phases
        (facts(busy=FULL, bandwidth=(0.9,) * 8), Name.MEMORY),  # a GPU whose peaks nobody has told us
        (facts(busy=FULL, bandwidth=(0.3,) * 8), Name.COMPUTE),
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


def test_a_swing_of_a_gpu_whose_loop_marks_its_data_is_not_the_loaders() -> None:
    assert judged(facts(data=0.1, busy=SWINGING, roofline=roof(launch=1))).name is Name.LAUNCH


@pytest.mark.parametrize(
    "known",
    [
        Measurements(shares=Shares()),
        facts(),
        facts(busy=FULL),
        facts(mfu=0.5),
        facts(busy=FULL, bandwidth=(0.65,) * 8),
        facts(busy=(0.5,) * 8, bandwidth=(0.9,) * 8),
    ],
)
def test_with_nothing_to_judge_by_nothing_is_said(known: Measurements) -> None:
    assert diagnose(known) is None


COMPILED = InUse(compile=True)


def test_of_a_compiled_model_launches_and_bytes_that_the_compiler_removes_bind_nothing() -> None:
    uncompiled = roof(launch=0.9, arithmetic=0.1)
    known = facts(use=COMPILED, roofline=uncompiled, products=roof(arithmetic=0.6))
    assert judged(known).name is Name.COMPUTE
    assert "the machine's limits explain 60% of the time" in judged(known).text
    assert judged(facts(roofline=uncompiled, products=roof(arithmetic=0.6))).name is Name.LAUNCH


def test_where_products_explain_little_of_a_compiled_step_they_are_not_blamed() -> None:
    known = facts(use=COMPILED, roofline=roof(launch=0.9), products=roof(arithmetic=0.3))
    assert diagnose(known) is None


def test_a_guess_by_samples_alone_promises_nothing() -> None:
    verdict = judged(facts(busy=FULL, bandwidth=(0.9,) * 8))
    assert verdict.gain == 0 and "its memory is in use 90% of the time" in verdict.text


def test_a_window_of_less_than_a_second_says_nothing() -> None:
    short = Shares(steps=10, seconds=Seconds(data=0.9))
    assert diagnose(Measurements(shares=short)) is None
    assert judged(Measurements(shares=Shares(steps=10, seconds=Seconds(data=1.0)))).name is Name.DATA


# --- stragglers -------------------------------------------------------------------------------------
def test_ranks_that_wait_for_the_network_are_no_stragglers() -> None:
    known = facts(communication=6, ranks=ranks((0.5, 0, 0.6), (0.4, 0, 0.6)))
    assert judged(known).name is Name.COMMUNICATION


def test_the_straggler_is_named_with_what_it_costs() -> None:
    known = facts(ranks=ranks((0.4, 0, 0.6), (0.5, 0, 0.5), (1.0, 0, 0.0), (0.5, 0, 0.5)))
    verdict = judged(known)
    assert verdict.sentence.startswith("Rank 2 takes 1 s")
    assert verdict.gain == pytest.approx(1.0) and "node of rank 2" in verdict.fix


def test_a_straggler_that_waits_for_its_data_is_told_so() -> None:
    verdict = judged(facts(ranks=ranks((0.5, 0.1, 0.5), (1.0, 0.6, 0.0))))
    assert "training.data.numWorkers" in verdict.fix and "node of rank" not in verdict.fix


# --- fixes ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("use", "known", "words"),
    [
        (
            InUse(workers=0),
            {"data": 6},
            "training.data.numWorkers to 2 (now 0), and training.data.prefetchFactor to 4 if it is lower;",
        ),
        (InUse(workers=4), {"data": 5}, "training.data.numWorkers to 5 (now 4)"),
        (
            InUse(workers=2, prefetch=2),
            {"data": 5},
            "(now 2), and training.data.prefetchFactor to 4 (now 2);",
        ),
        (InUse(workers=2, prefetch=8), {"data": 5}, "Set training.data.numWorkers to 3 (now 2); or make"),
        (InUse(workers=2, cores=3), {"data": 6}, "4 would be needed, but there are 3 cores"),
        (InUse(workers=2, cuda=True, pin_memory=False), {"data": 5}, ", and training.data.pinMemory to true"),
        (InUse(workers=2, own_loader=True), {"data": 5}, "Set num_workers of the script's loader to 3"),
        (InUse(), {"h2d": 5}, "training.data.pinMemory to true"),
        (InUse(pin_memory=True), {"h2d": 5}, "Copy less"),
        (InUse(), {"communication": 5}, "training.gradientCompression to bf16"),
        (
            InUse(gradient_compression="bf16"),
            {"communication": 5},
            "compressed already: exchange gradients less often",
        ),
        (InUse(), {"checkpoint": 5}, "checkpoint.interval 99 times as long"),
        (InUse(compile=True), {"compile_seconds": 5.0}, "training.compile to false"),
        (InUse(), {"roofline": roof(memory=1)}, "precision to bf16"),
        (InUse(bf16=False), {"roofline": roof(memory=1)}, "Set compile to true"),
        (
            V100,
            {"roofline": roof(memory=1)},
            "precision to fp16 (this GPU has no bf16; Trainer scales the loss",
        ),
        (V100, {"roofline": roof(arithmetic=1)}, "Even faster: precision fp16 (this GPU has no bf16;"),
        (InUse(precision="fp16", bf16=False, cuda=True), {"roofline": roof(memory=1)}, "Set compile to true"),
        (InUse(precision="bf16", compile=True), {"products": roof(memory=1)}, "Lower microBatchSize"),
        (InUse(cuda=True), {"roofline": roof(launch=1)}, "compileMode to reduce-overhead"),
        (InUse(), {"roofline": roof(launch=1)}, "Set compile to true; or raise microBatchSize"),
        (InUse(whole_share=True), {"roofline": roof(launch=1)}, "raise globalBatchSize and microBatch"),
        (InUse(sharded=True), {"communication": 5}, "MixedPrecisionPolicy(reduce_dtype=...)"),
        (InUse(interval_auto=True), {"checkpoint": 5}, "99 times as long."),
        (InUse(drop_last=True), {"compile_seconds": 5.0}, "(pad to a fixed length), or"),
        (InUse(compile=True, compile_mode="reduce-overhead"), {"products": roof(launch=1)}, "graph breaks"),
        (InUse(), {"roofline": roof(arithmetic=1)}, "precision bf16"),
        (InUse(precision="bf16"), {"roofline": roof(arithmetic=1)}, "larger microBatchSize"),
    ],
)
def test_a_fix_names_the_setting_and_not_one_that_is_made_already(
    use: InUse, known: dict[str, Any], words: str
) -> None:
    assert words in judged(facts(use=use, **known)).fix


@pytest.mark.parametrize("workers", [2, 8])
def test_with_no_core_left_no_more_workers_are_advised(workers: int) -> None:
    verdict = judged(facts(data=5, use=InUse(workers=workers, cores=2, prefetch=2)))
    assert verdict.fix.startswith(f"No CPU core is free for another worker: {workers} worker(s) use all 2")
    assert "more CPU for each GPU" in verdict.fix and "cheaper" in verdict.fix and "decoded" in verdict.fix
    assert "Set " not in verdict.fix and "prefetchFactor" not in verdict.fix
    assert verdict.gain == pytest.approx(1.0), "all of the wait, not the 0 % that no change brings"


def test_copies_from_memory_that_is_not_pinned_are_named_where_no_core_is_left_too() -> None:
    use = InUse(workers=2, cores=2, cuda=True, pin_memory=False)
    assert "Set training.data.pinMemory to true." in judged(facts(data=5, use=use)).fix
    assert "Set training.data.pinMemory to true." in judged(facts(busy=SWINGING, use=use)).fix


@pytest.mark.parametrize(
    "use",
    [
        InUse(workers=2, pin_memory=False),  # no GPU: there is nothing to pin for
        InUse(workers=2, cuda=True),  # not known
        InUse(workers=2, cuda=True, pin_memory=True),
    ],
)
def test_pinned_memory_is_named_only_where_it_is_known_to_be_absent_on_a_gpu(use: InUse) -> None:
    assert "pinMemory" not in judged(facts(data=5, use=use)).fix


@pytest.mark.parametrize(
    ("use", "fix"),
    [
        (
            InUse(),
            "Set training.data.numWorkers higher and training.data.pinMemory to true, and measure again.",
        ),
        (
            InUse(workers=2, pin_memory=True),
            "Set training.data.numWorkers higher (now 2), and measure again.",
        ),
        (InUse(workers=2, cores=2), "No CPU core is free for another worker"),
    ],
)
def test_a_gpu_that_swings_is_mended_by_what_is_not_set_already(use: InUse, fix: str) -> None:
    assert judged(facts(busy=SWINGING, use=use)).fix.startswith(fix)


@pytest.mark.parametrize("known", [{"data": 5}, {"busy": SWINGING}])
@pytest.mark.parametrize("cores", [None, 2])
def test_compiling_while_data_bound_is_told_to_buy_nothing(known: dict[str, Any], cores: int | None) -> None:
    words = "50% of each step is spent waiting for data, which torch.compile does not shorten"
    assert words in judged(facts(use=InUse(workers=2, cores=cores, compile=True), **known)).fix
    assert words not in judged(facts(use=InUse(workers=2, cores=cores), **known)).fix


def test_a_rank_that_is_late_for_its_data_is_not_told_to_use_cores_that_are_not_there() -> None:
    known = facts(ranks=ranks((0.5, 0.1, 0.5), (1.0, 0.6, 0.0)), use=InUse(workers=2, cores=2))
    assert "make dataset[i] cheaper" in judged(known).fix and "workers" not in judged(known).fix


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (
            InUse(workers=8, cores=2),
            r"8 loader workers share 2 core\(s\), .* training.data.numWorkers to 2 at most",
        ),
        (InUse(workers=8, cores=2, own_loader=True), "num_workers of the script's loader to 2 at most$"),
        (InUse(workers=2, cores=2), None),
        (InUse(workers=8), None),
        (InUse(cores=2), None),
    ],
)
def test_more_workers_than_cores_do_harm(use: InUse, words: str | None) -> None:
    found = too_many_workers(use)
    assert found is None if words is None else re.search(words, str(found))


@pytest.mark.parametrize(
    ("known", "gain"),
    [
        (facts(data=5, use=InUse(workers=0)), 1.0),  # hidden behind the other half
        (facts(data=8, use=InUse(workers=0, cores=2)), 1.5),  # 0.8 over two workers is still 0.4
        (facts(communication=5), 1 / 0.75 - 1),
        (facts(checkpoint=5), 0.98),
        (facts(compile_seconds=5.0, compilations=9), 1.0),
        (facts(roofline=roof(memory=1)), 1.0),
        (facts(roofline=roof(memory=1, launch=0.25)), 1 / 0.6 - 1),
        (facts(roofline=roof(arithmetic=1), use=InUse(precision="bf16")), 0.0),
        (facts(roofline=roof(arithmetic=1)), 1.0),
    ],
)
def test_a_gain_is_reckoned_from_what_was_measured(known: Measurements, gain: float) -> None:
    verdict = judged(known)
    assert verdict.gain == pytest.approx(gain) and verdict.basis


def test_the_text_says_all_of_it() -> None:
    verdict = judged(facts(data=5))
    assert verdict.text.startswith("data-bound: The device waits for data 50% of the time. Set ")
    assert verdict.text.endswith(f"Gain: at most 100% ({verdict.basis}).")


def test_a_bound_says_how_near_the_work_comes_to_it() -> None:
    verdict = judged(facts(roofline=roof(arithmetic=0.3, memory=0.1), mfu=0.28))
    assert (
        "75% of its work is arithmetic (MFU 28%, the machine's limits explain 40% of the time)"
        in verdict.text
    )


# --- the first words --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("known", "words"),
    [
        (facts(data=4), "below 70%: speed up data loading first, not the computation"),
        (facts(h2d=4), "speed up data loading"),
        (facts(communication=4), "below 70%, but data loading is not the cause: waiting for data takes 0%"),
        (facts(data=2.5), "utilisation is 75% (target 80%)"),
        (facts(data=4, busy=FULL), ""),  # the GPU's own word holds
        (facts(busy=(0.5,) * 4), "below 70%, but data loading is not the cause: waiting for data takes 0%"),
        (facts(data=0.15, h2d=0.05, busy=(0.45,) * 4), "45%, below 70%, but data loading is not the cause"),
        (facts(data=3, busy=(0.45,) * 4), "45%, below 70%: speed up data loading"),
    ],
)
def test_low_utilisation_is_said_first_with_whose_it_is(known: Measurements, words: str) -> None:
    assert words in advice(known) and bool(words) == bool(advice(known))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(SWINGING, 1.0), (FULL, 0.0), ((0.5,) * 8, 0.0), ((0.0, 1.0, 0.0), 0.0), ((), 0.0)],
)
def test_a_swing_is_between_idle_and_full(samples: tuple[float, ...], expected: float) -> None:
    assert swing(samples) == pytest.approx(expected)
