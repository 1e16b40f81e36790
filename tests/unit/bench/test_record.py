"""How a benchmark's output becomes a record, and records become RESULTS.md."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from bench import record

MACHINE = {"cores": 2, "memory_gib": 24, "cpu": "some processor", "torch": "2.15.0", "load": 0.5}


def stored(name: str, figures: dict[str, Any], **more: Any) -> dict[str, Any]:
    where = {"commit": "abc1234", "date": "2026-11-22T10:00Z", "machine": MACHINE}
    about = {"benchmark": name, "command": f"make bench-{name}", "note": ""}
    return {**about, **where, "figures": figures, **more}


def test_the_last_line_that_is_not_empty_is_the_result() -> None:
    assert record.last_figures('{"first": 1}\npair 1\n{"second": 2}\n\n') == {"second": 2}


@pytest.mark.parametrize("output", ["", "done\n", '{"a": 1}\nTraceback\n', "[1, 2]\n", '{"a": 1'])
def test_an_output_without_a_result_is_refused(output: str) -> None:
    with pytest.raises(ValueError, match="not a JSON object"):
        record.last_figures(output)


def test_a_line_in_the_middle_of_a_benchmark_is_not_taken_for_its_result() -> None:
    with pytest.raises(ValueError, match="did the benchmark end early"):
        record.check_whole("diagnosis", {"fixture": "DataBound", "right": True})
    record.check_whole("diagnosis", {"overhead_percent": 1.0})
    record.check_whole("restart", {"warm_over_cold_compile": {"median": 0.1}})
    record.check_whole("a benchmark without goals", {"anything": 1})


@pytest.mark.parametrize(
    ("taken", "name"),
    [
        ([], "2026-11-22-abc1234.json"),
        (["2026-11-21-abc1234.json"], "2026-11-22-abc1234.json"),
        (["2026-11-22-abc1234.json"], "2026-11-22-abc1234-2.json"),
        (["2026-11-22-abc1234.json", "2026-11-22-abc1234-2.json"], "2026-11-22-abc1234-3.json"),
    ],
)
def test_no_record_overwrites_another(taken: list[str], name: str) -> None:
    assert record.file_name("2026-11-22T10:00Z", "abc1234", taken) == name


def test_a_run_gives_its_output_and_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    script = "print('pair 1'); print('{\"missed\": 1}'); raise SystemExit(1)"
    output, code = record.run([sys.executable, "-c", script])
    assert (record.last_figures(output), code) == ({"missed": 1}, 1)
    assert capfd.readouterr().out == output


def test_the_newest_record_is_shown_with_command_date_commit_and_machine() -> None:
    older = stored("loop", {"overhead_percent": 7.0}, date="2026-11-22T09:59Z")
    newer = stored("loop", {"overhead_percent": 0.5}, note="Quiet.")
    for records in ([older, newer], [newer, older]):
        page = record.page({"loop": records})
        assert "| overhead_percent | 0.5 (<= 1) |" in page
        assert "7" not in page.partition("## ")[2].replace("2.15", "")
        assert "`make bench-loop`, 2026-11-22, commit abc1234; 2 cores, 24 GiB, some processor" in page
        assert "torch 2.15.0, load 0.5. Quiet." in page


def test_known_benchmarks_come_first_and_new_ones_need_no_entry() -> None:
    page = record.page({name: [stored(name, {"value": 1})] for name in ("a_new_one", "loop", "checkpoint")})
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles == ["## What a save costs", "## The training loop beside a bare one", "## A new one"]


@pytest.mark.parametrize(
    ("value", "goal", "said"),
    [
        (1.25, "<= 1.25", "1.25 (<= 1.25)"),
        (1.26, "<= 1.25", "**1.26, missed (<= 1.25)**"),
        (0.8, ">= 0.85", "**0.8, missed (>= 0.85)**"),
        (0, "= 0", "0 (= 0)"),
        (3, "= 0", "**3, missed (= 0)**"),
        (None, "= 0", ""),
        (3, None, "3"),
    ],
)
def test_a_missed_goal_is_bold(value: Any, goal: str | None, said: str) -> None:
    assert record.cell(value, goal) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (34070.2, "34070"),
        (100.0, "100"),
        (9.0, "9"),
        (0.08612, "0.0861"),
        (-3.04, "-3.04"),
        (0.0, "0"),
        (8943271, "8943271"),
        (True, "yes"),
        (None, ""),
        ([0.25, 1.5], "0.25, 1.5"),
        ({"unit": 1.50, "api": 2}, "unit 1.5, api 2"),
        ("a|b", "a\\|b"),
    ],
)
def test_figures_read_without_exponents_or_tails(value: Any, said: str) -> None:
    assert record.text(value) == said


def test_both_sides_of_a_ratio_are_rows_of_one_table_and_deeper_levels_have_their_own() -> None:
    figures = {
        "pairs": 5,
        "ours_s": {"median": 2.0, "least": 1.0},
        "theirs_s": {"median": 4.0, "greatest": 5.0},
        "ends": {"done": 3},
        "kinds": {"small": 1, "done": 2},
        "cold": {"model": {"median": 1.0}},
    }
    assert record.tables(figures, {"cold.model.median": "<= 0.5"}) == [
        "| figure | median | least | greatest |\n| --- | --- | --- | --- |\n"
        "| ours_s | 2 | 1 |  |\n| theirs_s | 4 |  | 5 |",
        "| figure | value |\n| --- | --- |\n| pairs | 5 |\n| ends | done 3 |\n| kinds | small 1, done 2 |",
        "| cold | median |\n| --- | --- |\n| model | **1, missed (<= 0.5)** |",
    ]


def test_the_page_is_what_the_records_say() -> None:
    assert record.PAGE.read_text() == record.page(record.stored()), "run: python bench/record.py"


def test_each_record_lies_in_the_folder_of_its_benchmark() -> None:
    for path in record.RESULTS.rglob("*.json"):
        assert path.parent != record.RESULTS, f"{path.name} belongs into a folder of its benchmark"
    fields = {"command", "commit", "date", "machine", "note", "figures"}
    for name, records in record.stored().items():
        assert {each["benchmark"] for each in records} == {name}
        assert all(fields <= set(each) for each in records)


def test_a_command_is_recorded_without_this_checkouts_environment() -> None:
    assert record.shown_command([".venv/bin/python", "bench/loop.py", "--pairs", "2"]) == (
        "python bench/loop.py --pairs 2"
    )
    assert record.split(["loop", "--note", "a", "--", "python", "--", "x"]) == (
        ["loop", "--note", "a"],
        ["python", "--", "x"],
    )
    assert record.split([]) == ([], [])
