"""docs/levers.md: each lever on cost, before and after, from the records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from bench import techniques
from bench.goodput import RECALL
from bench.gpu.__main__ import CASES
from bench.levers import PAGE, PRICE, TECHNIQUES, Lever, Sources, Technique, figure, of_dollars, page
from bench.levers import price_row as row_of_price
from bench.levers import technique_row as row_of_technique
from bench.record import stored

MACHINE = {"cores": 2, "memory_gib": 24, "cpu": "some processor", "torch": "2.15.0", "load": 0.5}
LEVER = Lever(
    name="a",
    measure="dollars",
    benchmark="policy",
    before=("x", "*", "b"),
    after=("x", "*", "a"),
    money=of_dollars,
)
BF16 = Technique(name="bf16", cpu="bf16", gpu=("precision", "fp32", "bf16"))


def record(figures: Mapping[str, Any], *, name: str = "policy", date: str = "2026-11-22T10:00Z") -> Any:
    about = {"benchmark": name, "command": f"make bench-{name}", "commit": "abc1234", "note": ""}
    return about | {"date": date, "machine": MACHINE, "figures": figures}


def of_steps(
    seconds: float, *, most: float | None = None, mib: int = 80, plain_most: float = 0.1
) -> dict[str, Any]:
    plain = {"seconds": 0.1, "seconds_least_most": [0.1, plain_most], "mib": 100, "base": "plain"}
    spread = [seconds, most or seconds]
    bf16 = {"seconds": seconds, "seconds_least_most": spread, "mib": mib, "base": "plain"}
    return {"techniques": {"plain": plain, "bf16": bf16}}


def test_the_page_is_in_step_with_the_records() -> None:
    assert PAGE.read_text() == page(stored()), "write it again: python -m bench.levers"


def test_every_row_of_the_price_table_has_a_measured_ratio() -> None:
    records = stored()
    for lever in PRICE:
        row = row_of_price(lever, records, Sources())
        assert "unmeasured" not in row, f"{lever.name}: no record has its figures any more"
        assert row[4] == "unresolved" or float(row[4].split()[0]) > 0


def test_the_dollars_of_cheapest_are_those_of_requests_as_the_operator_makes_them() -> None:
    """Where availability is known for free, the row says that it is a bound."""
    for lever in PRICE:
        if lever.benchmark == "policy":
            assert lever.name.startswith("bound: availability known for free") == (
                lever.after[0] != "stopped_sight"
            )
    assert PRICE[0].after == ("stopped_sight", "*", "ours") and PRICE[0].before[-1] == "on_demand"


def test_a_figure_over_all_configurations_is_their_mean_and_none_where_one_lacks_it() -> None:
    figures = {"x": {"one": {"a": 1}, "two": {"a": 4.0}}}
    assert figure(figures, ("x", "*", "a")) == 2.5
    assert figure({"x": {"one": {"a": 1}, "two": {}}}, ("x", "*", "a")) is None
    assert figure(figures, ("x", "one", "a", "deeper")) is None and figure(figures, ("y",)) is None
    assert figure({"x": {}}, ("x", "*", "a")) is None


def test_a_row_has_before_after_ratio_money_and_the_record_that_it_is_from() -> None:
    sources = Sources()
    row = row_of_price(LEVER, {"policy": [record({"x": {"one": {"b": 200.0, "a": 50.0}}})]}, sources)
    assert row == ["a", "dollars", "200", "50", "0.250 (0.250 to 0.250)", "$200.00 -> $50.00", "1"]
    assert sources.lines == [
        "1. `make bench-policy`, 2026-11-22, commit abc1234; 2 cores, some processor, load 0.5."
    ]


def test_the_newest_record_that_has_all_figures_counts() -> None:
    old = record({"x": {"one": {"b": 2, "a": 1}}}, date="2026-11-20T10:00Z")
    new = record({"x": {"one": {"b": 4, "a": 1}}}, date="2026-11-21T10:00Z")
    other = record({"x": {"one": {"b": 8}}}, date="2026-11-22T10:00Z")
    for records in ([old, new, other], [other, new, old]):
        row = row_of_price(LEVER, {"policy": records}, Sources())
        assert row[2:4] == ["4", "1"] and row[4].startswith("0.250 ")


def test_a_mean_over_configurations_has_the_ratios_of_the_best_and_of_the_worst_one_beside_it() -> None:
    before, after = {"one": {"b": 100.0}, "two": {"b": 100.0}}, {"one": {"a": 80.0}, "two": {"a": 104.0}}
    lever = replace(LEVER, before=("free", "*", "b"), after=("asked", "*", "a"))
    row = row_of_price(lever, {"policy": [record({"free": before, "asked": after})]}, Sources())
    assert row[4:6] == ["0.920 (0.800 to 1.040)", "$100.00 -> $92.00"]


@pytest.mark.parametrize(
    ("most", "ratio", "money"),
    [(0.85, "0.800", "$1.00 -> $0.80"), (0.95, "unresolved", "")],
    ids=["apart", "overlapping"],
)
def test_medians_have_their_rounds_beside_them_and_no_dollars_where_these_overlap(
    most: float, ratio: str, money: str
) -> None:
    lever = replace(LEVER, before=("b", "median"), after=("a", "median"))
    figures = {
        "b": {"median": 1.0, "least": 0.9, "greatest": 1.1},
        "a": {"median": 0.8, "min": 0.5, "max": most},
    }
    row = row_of_price(lever, {"policy": [record(figures)]}, Sources())
    assert row[2:4] == ["1 (0.9 to 1.1)", f"0.8 (0.5 to {most})"]
    assert row[4:6] == [ratio, money]


@pytest.mark.parametrize(
    ("interval", "ratio"), [([0.3, 1.3], "1.004"), ([-0.2, 1.3], "unresolved")], ids=["above 0", "about 0"]
)
def test_added_time_has_its_interval_and_no_ratio_where_it_may_be_none(
    interval: list[float], ratio: str
) -> None:
    lever = replace(LEVER, before=(), after=(), more_percent=("more",), more_interval=("ends",))
    row = row_of_price(lever, {"policy": [record({"more": 0.4, "ends": interval})]}, Sources())
    assert row[3] == f"100.4 ({100 + interval[0]:.4g} to 101.3)" and row[4] == ratio


def test_a_background_save_is_also_shown_with_what_the_training_loses_beside_it() -> None:
    saves = [each for each in PRICE if each.benchmark == "checkpoint"]
    assert [each.after[0] for each in saves] == ["stall_s", "work_lost_s_per_save"]


def test_the_row_of_notices_says_how_many_interruptions_have_one() -> None:
    (row,) = [
        each for each in PRICE if each.after[-1:] == ("goodput_with_notices",) and "notice" in each.name
    ]
    assert f"{RECALL:.0%} of them with notice" in row.name


@pytest.mark.parametrize("records", [{}, {"policy": []}, {"policy": [record({"x": {"one": {"b": 8}}})]}])
def test_what_no_record_has_is_unmeasured_and_has_no_ratio_and_no_dollars(records: Any) -> None:
    assert row_of_price(LEVER, records, Sources())[2:] == ["unmeasured", "", "", "", ""]


def test_a_technique_costs_as_much_more_as_its_step_takes_longer() -> None:
    row = row_of_technique(BF16, {"techniques": [record(of_steps(0.2), name="techniques")]}, Sources())
    assert row[1:3] == ["0.1 (0.1 to 0.1) -> 0.2 (0.2 to 0.2)", "2.00"] and row[4:6] == ["100 -> 80", "0.80"]
    before, after = (float(each.lstrip("$")) for each in row[3].split(" -> "))
    assert after == pytest.approx(2 * before) and before > 0


@pytest.mark.parametrize(
    ("figures", "times"),
    [
        (of_steps(0.2, most=0.31), "0.1 (0.1 to 0.1) -> 0.2 (0.2 to 0.31)"),
        (of_steps(0.11, most=0.12, plain_most=0.115), "0.1 (0.1 to 0.115) -> 0.11 (0.11 to 0.12)"),
        (of_steps(0.1), "0.1 (0.1 to 0.1) -> 0.1 (0.1 to 0.1)"),
    ],
    ids=["one side's differ", "both sides' overlap", "equal"],
)
def test_a_time_that_the_rounds_disagree_on_has_no_ratio_and_no_dollars_but_memory_has(
    figures: Any, times: str
) -> None:
    row = row_of_technique(BF16, {"techniques": [record(figures, name="techniques")]}, Sources())
    assert row[1:4] == [times, "unresolved", ""] and row[4:6] == ["100 -> 80", "0.80"]


def test_a_trial_of_the_gpu_benchmark_on_a_cpu_is_no_figure_of_a_gpu() -> None:
    speeds = {"precision": {"fp32": {"tokens_per_second": 100.0}, "bf16": {"tokens_per_second": 250.0}}}
    records = {"gpu": [record({"device": "cpu", **speeds}, name="gpu")]}
    assert row_of_technique(BF16, records, Sources())[-1] == "unmeasured (needs a GPU)"
    records["gpu"].append(record({"device": "some GPU", **speeds}, name="gpu"))
    sources = Sources()
    said = row_of_technique(BF16, records, sources)[-1]
    assert said == "100 -> 250 tokens/s, time 0.40 (record 1)" and "some GPU" in sources.lines[0]


def test_every_technique_of_the_benchmark_has_a_row_and_every_row_a_case() -> None:
    baselines = {techniques.PLAIN, techniques.TWO, techniques.SLOW}
    cases = {"techniques": techniques.TECHNIQUES, "data_wait": techniques.DATA}
    for benchmark, known in cases.items():
        rows = {each.cpu for each in TECHNIQUES if each.cpu and each.benchmark == benchmark}
        assert rows == set(known) - baselines
    for each in TECHNIQUES:
        if each.gpu is not None:
            group, before, after = each.gpu
            assert {before, after} <= set(CASES[group])
