"""`spottrain cost`: the report on a job, the sums of a namespace, and what it says of missing figures."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from spottrain.cli import cost, kubectl
from spottrain.cli.cost_report import dollars, node_hours, percents, report
from spottrain.cli.cost_status import BUCKETS, jobs
from spottrain.cli.kubectl import Access
from spottrain.errors import RunError

from tests.support.costs import COST, ENDED, GOODPUT, attempt, document

NOW = datetime(2026, 11, 23, 15, tzinfo=UTC)
Json = dict[str, Any]


def a_list(*items: Json) -> Json:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def lines_of(status: Json | None, **more: Any) -> list[str]:
    return report(jobs(document(status, **more), "it")[0], now=NOW).lines


def without(table: Json, *names: str) -> Json:
    return {name: value for name, value in table.items() if name not in names}


def line(lines: list[str], start: str) -> str:
    return next(each for each in lines if each.startswith(start))


# --- a job ----------------------------------------------------------------------------------------------
def test_the_report_says_what_was_spent_on_what() -> None:
    lines = lines_of(ENDED)
    assert lines[0] == "gpt in namespace ml: Succeeded, 2 attempts, 1 interruption"
    assert lines_of(ENDED | {"failures": 2})[0].endswith("1 interruption, 2 failures")
    assert line(lines, "Spent").split()[:2] == ["Spent", "$12.70"]
    parts = {name: line(lines, f"  {name}").split()[1] for name in ("use", "boot", "idle", "refunded")}
    assert parts == {"use": "$12.00", "boot": "$1.60", "idle": "$0.10", "refunded": "-$1.00"}
    assert line(lines, "Whole nodes").split()[2] == "$13.70"
    assert "Prices: known for all node-hours, up to 2026-11-23 14:15Z." in lines
    assert lines[-1] == "Not counted: storage, requests, traffic between zones."


def test_each_attempt_has_a_line_with_its_end_its_cost_and_the_steps_that_it_lost() -> None:
    lines = lines_of(ENDED)
    first, second = (re.split(r"  +", line(lines, number)) for number in ("1 ", "2 "))
    assert first[:4] == ["1", "2 x p4d.24xlarge", "us-east-1b", "Spot"]
    assert first[4:] == ["11-23 10:00Z", "55 min", "NodeLost", "$6.10", "12"], "since all nodes were there"
    assert second[-3:] == ["Done", "$6.10", "0"]
    assert not any("no longer in the status" in each for each in lines)


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        ({"lastStep": 50, "durableStep": None}, "50"),
        ({"lastStep": 850, "durableStep": None, "startStep": 800}, "50"),
        ({"lastStep": None}, "-"),
        ({"lastStep": 790, "durableStep": 800}, "0"),
        ({"ended": None, "cause": ""}, "-"),
    ],
    ids=["never saved", "saved before it", "no steps known", "a report behind its save", "it runs"],
)
def test_steps_are_lost_back_to_the_last_checkpoint(steps: Json, lost: str) -> None:
    lines = lines_of(ENDED | {"attempts": [attempt(1, **steps)]})
    assert line(lines, "1 ").split()[-1] == lost


def test_of_more_than_twenty_attempts_it_says_which_are_gone_and_that_the_sums_have_them() -> None:
    kept = [attempt(number) for number in range(6, 26)]
    lines = lines_of(ENDED | {"attempt": 25, "attempts": kept})
    assert line(lines, "Attempts 1 to 5 are no longer in the status").endswith("the sums above have all.")
    assert sum(each.endswith(" 12") for each in lines) == 20
    assert line(lines_of(ENDED | {"attempts": kept[-19:]}), "Attempts 1 to 6")
    assert line(lines_of(ENDED | {"attempts": [attempt(2)]}), "Attempt 1 is no longer")


def test_where_the_time_went_adds_up_to_a_hundred_percent() -> None:
    lines = lines_of(ENDED)
    begin = lines.index(line(lines, "WHERE THE TIME WENT"))
    rows = [each.split()[-2:] for each in lines[begin + 1 : begin + 10]]
    assert rows[0] == ["1.84", "86.2"] and rows[-1] == ["2.13", "100.0"]
    assert sum(Decimal(share) for _, share in rows[:-1]) == 100
    assert not any("do not add up" in each for each in lines)


def test_the_parts_of_less_than_an_hour_are_minutes() -> None:
    parts = dict.fromkeys(BUCKETS, "0") | {"productive": "90", "startup": "30", "wanted": "120"}
    lines = lines_of(ENDED | {"goodput": GOODPUT | parts})
    assert line(lines, "WHERE THE TIME WENT").split()[-2:] == ["MINUTES", "PERCENT"]
    assert line(lines, "productive").split() == ["productive", "1.50", "75.0"]


@pytest.mark.parametrize(
    "seconds",
    [[1, 1, 1], [1] * 7, [0, 0, 1], [999999, 1], [0.05] * 8, [12345.678, 0.001, 7, 0, 3, 81, 9, 1e6]],
    ids=str,
)
def test_rounded_shares_add_up_and_none_is_off_by_more_than_its_last_digit(seconds: list[float]) -> None:
    parts = [Decimal(str(each)) for each in seconds]
    shares = percents(parts)
    assert sum(shares) == 100
    for part, share in zip(parts, shares, strict=True):
        assert abs(share - 100 * part / sum(parts)) < Decimal("0.1")


def test_no_time_at_all_has_no_shares() -> None:
    assert percents([Decimal(0), Decimal(0)]) == [0, 0]


def test_parts_that_miss_the_wanted_time_are_not_passed_off_as_all_of_it() -> None:
    lines = lines_of(ENDED | {"goodput": GOODPUT | {"wanted": "7700.000"}})
    assert line(lines, "These parts do not add up to the wanted time of 2.14 h")


def test_the_three_goodputs_are_named_by_what_they_are_a_part_of() -> None:
    found = [each for each in lines_of(ENDED) if each.startswith("Goodput")]
    assert [re.findall(r"[0-9.]+ %", each)[0] for each in found] == ["86.9 %", "91.9 %", "93.8 %"]
    assert "paid node-time" in found[0] and "all nodes were there" in found[1] and "wanted" in found[2]


def test_the_saving_has_its_formula_s_numbers_beside_it() -> None:
    said = line(lines_of(ENDED), "Saving against on-demand")
    assert "62.0 % = 1 - $12.70 / $33.40" in said
    assert round(100 * (1 - Decimal("12.70") / Decimal("33.40")), 1) == 62
    assert "  ($33.40: its productive time and its waits for data at on-demand prices)" in lines_of(ENDED)
    assert "36" not in said, "nothing is said of re-done work, which on-demand would not have paid"


def test_a_job_that_was_dearer_than_on_demand_says_so() -> None:
    cost = COST | {"onDemandIdeal": "10.000000", "saving": "-27.0%"}
    said = line(lines_of(ENDED | {"cost": cost}), "Saving")
    assert "-27.0 %, dearer than on-demand, = 1 - $12.70 / $10.00" in said


@pytest.mark.parametrize(
    ("phase", "said"),
    [("Succeeded", ""), ("Failed", ", without a result"), ("Running", ", so far"), ("Suspended", ", so far")],
)
def test_a_saving_says_whether_there_is_a_result_for_it(phase: str, said: str) -> None:
    lines = lines_of(ENDED | {"phase": phase})
    assert line(lines, "Saving").startswith(f"Saving against on-demand{said}: 62.0 %")
    assert any("no checkpoint has yet" in each for each in lines) == (said == ", so far")


def test_what_was_paid_after_the_best_evaluation() -> None:
    said = line(lines_of(ENDED), "Paid after the best")
    assert said == "Paid after the best evaluation (step 4000): 0.25 node-hours of 2.12 node-hours."
    said = line(lines_of(ENDED | {"cost": without(COST, "bestStep")}), "Paid after the best")
    assert said.endswith("unknown, because no evaluation was reported.")


# --- what is not known ----------------------------------------------------------------------------------
def test_node_hours_without_a_price_make_the_sum_a_lower_bound_and_the_saving_unknown() -> None:
    unknown = {"state": "Unknown", "unknownSeconds": "7560", "saving": "62.0%"}
    lines = lines_of(ENDED | {"cost": COST | unknown})
    assert "at least $12.70" in line(lines, "Spent")
    assert line(lines, "Unknown: 2.10 node-hours without a price")
    assert line(lines, "Saving").endswith("unknown, because 2.10 node-hours have no price.")
    assert not any("Prices: known" in each for each in lines)


def test_parts_of_which_prices_are_missing_are_no_exact_figures_and_not_free() -> None:
    unknown = {"state": "Unknown", "unknownSeconds": "60", "idleSeconds": "0", "idle": "0", "use": "0"}
    lines = lines_of(ENDED | {"cost": COST | unknown})
    parts = {name: line(lines, f"  {name}").split("  ") for name in ("use", "boot", "idle", "refunded")}
    found = {name: [each.strip() for each in words if each][1] for name, words in parts.items()}
    assert found == {
        "use": "unknown",
        "boot": "at least $1.60",
        "idle": "$0.00",
        "refunded": "-$1.00 or more",
    }, "of no node-seconds nothing is unknown"
    assert "at least $13.70" in line(lines, "Whole nodes")


def test_a_part_that_the_operator_does_not_write_is_not_free() -> None:
    lines = lines_of(ENDED | {"cost": without(COST, "boot", "bootSeconds")})
    assert line(lines, "  boot").split()[1] == "unknown"


def test_a_missing_price_is_told_with_what_to_do_and_not_by_a_file_of_the_source() -> None:
    text = "\n".join(lines_of(ENDED | {"cost": COST | {"state": "Unknown"}}))
    assert "Unknown: some node-hours without a price" in text and "because some node-hours have" in text
    assert "Add their prices to the chart's value `prices`." in text and ".md" not in text


def test_the_report_fits_a_terminal_but_for_its_table() -> None:
    unknown = {"state": "Unknown", "unknownSeconds": "60"}
    for cost_of in (COST, COST | unknown):
        lines = lines_of(ENDED | {"cost": cost_of})
        begin = lines.index(line(lines, "NO."))
        assert max(map(len, lines[begin : begin + 3])) < 100
        assert max(map(len, lines[:begin] + lines[begin + 3 :])) <= 80


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (
            {"cost": COST | {"saving": "Unknown", "onDemandUnknownSeconds": "3600"}},
            "1.00 node-hours have no on-demand",
        ),
        ({"cost": COST | {"saving": "Unknown"}, "goodput": None}, "no trainer has reported"),
        (
            {"cost": COST | {"saving": "Unknown"}, "goodput": GOODPUT | {"runtime": "Unknown"}},
            "no trainer has reported",
        ),
        ({"cost": without(COST, "saving")}, "the operator has not computed it"),
        ({"cost": COST | {"onDemandIdeal": "0"}}, "the operator has not computed it"),
    ],
    ids=["on-demand price", "no goodput", "no report", "older operator", "nothing to compare with"],
)
def test_an_unknown_saving_says_what_is_missing(status: Json, why: str) -> None:
    said = line(lines_of(ENDED | status), "Saving against on-demand: unknown, because ")
    assert why in said and "%" not in said


def test_an_attempt_without_prices_is_unknown_and_not_free() -> None:
    attempts = [
        attempt(1, spent="0", unknownSeconds="3900"),
        attempt(2, spent="2.500000", unknownSeconds="10"),
        without(attempt(3), "spent", "unknownSeconds"),
    ]
    lines = lines_of(ENDED | {"attempts": attempts})
    spent = [re.split(r"  +", line(lines, f"{number} "))[-2] for number in (1, 2, 3)]
    assert spent == ["unknown", "at least $2.50", "unknown"]


def test_percentages_that_the_operator_does_not_know_are_unknown() -> None:
    lines = lines_of(ENDED | {"goodput": GOODPUT | {"paid": "Unknown", "runtime": "Unknown"}})
    goodputs = [each.split(maxsplit=2)[2] for each in lines if each.startswith("Goodput")]
    assert goodputs == ["unknown", "unknown", "93.8 % of the wanted time had all nodes"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, "No trainer has reported it yet, or the operator in the cluster is older"),
        ({"spec": {"checkpoint": {"mode": "Self"}}}, "reports nothing (checkpoint.mode Self)"),
    ],
)
def test_without_goodput_it_says_why(more: Json, why: str) -> None:
    lines = lines_of(without(ENDED, "goodput"), **more)
    assert why in line(lines, "Where the time went: unknown.")


def test_a_job_of_an_operator_that_keeps_no_costs_is_not_free() -> None:
    lines = lines_of(without(ENDED, "cost", "goodput"))
    assert "The operator or the CRD in the cluster is older" in line(lines, "Cost: unknown.").replace(
        "the op", "The op"
    )
    assert not any("$0" in each or each.startswith("Saving") for each in lines)


def test_attempts_that_are_not_in_the_status_any_more_may_have_had_nodes() -> None:
    waiting = [{"number": number, "cause": "SchedulingTimeout"} for number in range(6, 26)]
    assert line(lines_of({"phase": "Pending", "attempt": 25, "attempts": waiting}), "Cost: unknown.")


TIMED_OUT: Json = {"number": 1, "cause": "SchedulingTimeout", "ended": "2026-11-23T11:05:00Z"}


@pytest.mark.parametrize(
    "status",
    [
        None,
        {},
        {"phase": "Pending", "attempt": 1, "attempts": [{"number": 1}]},
        {"phase": "Pending", "attempt": 2, "attempts": [TIMED_OUT, {"number": 2}]},
    ],
    ids=["new", "empty", "pending", "no capacity at first"],
)
def test_a_job_that_has_had_no_node_has_spent_nothing_yet(status: Json | None) -> None:
    lines = lines_of(status)
    assert line(lines, "Nothing was spent yet: no node has had pods of the job.")
    assert line(lines, "Where the time went: unknown.")


def test_a_status_of_the_first_ledger_is_read_as_far_as_it_goes() -> None:
    """An operator that had status.cost, and nothing of time, saving or attempts."""
    first = {
        name: COST[name] for name in ("state", "spent", "use", "boot", "idle", "refunded", "unknownSeconds")
    }
    lines = lines_of(without(ENDED, "goodput") | {"cost": first, "attempts": [attempt(1, spent=None)]})
    assert line(lines, "Spent").split()[1] == "$12.70" and not any("Whole nodes" in each for each in lines)
    assert "unknown" in line(lines, "Saving")


# --- unfinished -----------------------------------------------------------------------------------------
def test_an_attempt_that_runs_has_its_duration_so_far_and_no_end() -> None:
    running = without(attempt(1), "ended", "cause")
    lines = lines_of(ENDED | {"phase": "Running", "attempts": [running]})
    assert re.split(r"  +", line(lines, "1 "))[-4:] == ["4 h 50 min", "running", "$6.10", "-"]
    stopping = lines_of(ENDED | {"attempts": [running | {"stopping": "Suspended"}]})
    assert "stopping: Suspended" in line(stopping, "1 ")


def test_an_attempt_that_has_pods_and_not_all_nodes_waits_for_them_and_does_not_run() -> None:
    waiting = without(attempt(1), "ended", "cause", "bound", "lastStep", "durableStep")
    found = report(jobs(document(ENDED | {"phase": "Pending", "attempts": [waiting]}), "it")[0], now=NOW)
    row = re.split(r"  +", line(found.lines, "1 "))
    assert row[4:] == ["11-23 10:00Z", "-", "waiting for nodes", "$6.10", "-"]
    assert found.facts["attempts"][0]["seconds"] is None
    given_up = attempt(1, bound=None, cause="SchedulingTimeout", lastStep=None)
    row = re.split(r"  +", line(lines_of(ENDED | {"attempts": [given_up]}), "1 "))
    assert row[5:7] == ["-", "SchedulingTimeout"]


def test_an_attempt_that_trains_has_its_nodes_though_an_older_operator_does_not_say_since_when() -> None:
    training = without(attempt(1), "ended", "cause", "bound")
    row = re.split(r"  +", line(lines_of(ENDED | {"attempts": [training]}), "1 "))
    assert row[5:7] == ["-", "running"]


def test_a_suspended_job_is_reported_with_what_it_had_spent() -> None:
    lines = lines_of(ENDED | {"phase": "Suspended", "attempts": [attempt(1, cause="Suspended")]})
    assert lines[0].startswith("gpt in namespace ml: Suspended") and "$12.70" in line(lines, "Spent")


@pytest.mark.parametrize("limit", [12, 12.0, "12.00"])
def test_a_job_that_reached_its_limit_says_so(limit: Any) -> None:
    held = [{"type": "Suspended", "status": "True", "reason": "MaxCostReached"}]
    others = [{"type": "Running", "status": "True", "reason": "Other"}]
    status = ENDED | {"phase": "Suspended", "conditions": others + held}
    lines = lines_of(status, spec={"capacity": {"maxCost": limit}})
    assert lines[0].startswith("gpt in namespace ml: Suspended (MaxCostReached), 2 attempts")
    assert line(lines, "Limit").split() == ["Limit", "$12.00", "capacity.maxCost"]
    past = [{"type": "Suspended", "status": "False", "reason": "Resumed"}]
    assert "Resumed" not in lines_of(status | {"conditions": past})[0]


def test_an_attempt_that_waits_for_nodes_has_no_start() -> None:
    lines = lines_of({"phase": "Pending", "attempt": 1, "attempts": [{"number": 1, "capacityType": "Spot"}]})
    assert line(lines, "1 ").split() == ["1", "-", "-", "Spot", "-", "-", "not", "started", "unknown", "-"]


# --- JSON -----------------------------------------------------------------------------------------------
def test_a_program_gets_numbers_and_null_where_a_figure_is_unknown() -> None:
    unknown = {"state": "Unknown", "unknownSeconds": "60", "saving": "62.0%"}
    found = report(jobs(document(ENDED | {"cost": COST | unknown}), "it")[0], now=NOW).facts
    json.dumps(found)
    assert found["cost"]["spent"] == 12.7 and found["cost"]["known"] is False
    assert found["cost"]["saving"] is None and found["cost"]["paidSeconds"] == 7620
    assert found["goodput"]["paid"] == 86.9 and found["goodput"]["productive"] == 6620
    assert found["attempts"][0]["lostSteps"] == 12 and found["attempts"][0]["seconds"] == 3300
    bare = report(jobs(document(None), "it")[0], now=NOW).facts
    assert bare["cost"] is None and bare["goodput"] is None and bare["attempts"] == []


# --- a namespace ----------------------------------------------------------------------------------------
@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., list[str]]:
    """Runs the command over a document, and returns the lines."""

    def run(given: Json, *words: str) -> list[str]:
        file = tmp_path / "jobs.json"
        file.write_text(json.dumps(given))
        assert cost.main(["--file", str(file), *words]) == 0
        out, err = capsys.readouterr()
        assert not err
        return [*out.splitlines()]

    return run


def test_a_namespace_has_a_line_for_each_job_and_a_sum(said: Callable[..., list[str]]) -> None:
    lines = said(a_list(document(ENDED), document(ENDED, name="bert")))
    assert lines[0].split() == ["JOB", "PHASE", "SPENT", "WITHOUT", "A", "PRICE", "SAVING", "PAID", "GOODPUT"]
    assert re.split(r"  +", lines[1]) == ["gpt", "Succeeded", "$12.70", "-", "62.0 %", "86.9 %"]
    assert "2 jobs: $25.40" in lines and "Jobs that were deleted are in no sum." in lines[-1]
    assert not any("team" in each.lower() for each in lines)


def test_unknown_prices_make_the_sum_at_least_that_much(said: Callable[..., list[str]]) -> None:
    unknown = ENDED | {"cost": COST | {"state": "Unknown", "unknownSeconds": "3600"}}
    older = without(ENDED, "cost")
    lines = said(
        a_list(document(ENDED), document(unknown, name="b"), document(older, name="c"), document(name="d"))
    )
    assert re.split(r"  +", lines[2]) == [
        "b",
        "Succeeded",
        "at least $12.70",
        "1.00 node-hours",
        "unknown",
        "86.9 %",
    ]
    assert re.split(r"  +", lines[3])[2] == "unknown" and re.split(r"  +", lines[4]) == ["d", *"-----"]
    assert "4 jobs: at least $25.40, 1.00 node-hours without a price, 1 job without a cost" in lines


def test_a_cost_without_a_sum_is_unknown_in_its_row_and_in_the_sum(said: Callable[..., list[str]]) -> None:
    silent = ENDED | {"cost": without(COST, "spent")}
    lines = said(a_list(document(silent)))
    assert re.split(r"  +", lines[1])[2] == "unknown" and "1 job: unknown, 1 job without a cost" in lines
    both = said(a_list(document(ENDED), document(silent, name="b")))
    assert "2 jobs: at least $12.70, 1 job without a cost" in both
    report_of = said(document(silent))
    assert line(report_of, "Spent").split()[1] == "unknown"
    assert not any("Prices: known" in each for each in report_of)


def test_a_state_of_unknown_is_enough_for_a_lower_bound(said: Callable[..., list[str]]) -> None:
    unknown = ENDED | {"cost": COST | {"state": "Unknown"}}
    assert "1 job: at least $12.70" in said(a_list(document(unknown)))
    assert "at least $12.70" in line(said(document(unknown)), "Spent")


def test_nothing_known_is_unknown_and_not_at_least_nothing(said: Callable[..., list[str]]) -> None:
    nothing = ENDED | {"cost": COST | {"state": "Unknown", "unknownSeconds": "3600", "spent": "0"}}
    assert "1 job: unknown, 1.00 node-hours without a price" in said(a_list(document(nothing)))
    assert line(said(document(nothing)), "Spent").split()[1] == "unknown"


def test_sums_by_team_where_a_job_has_one(said: Callable[..., list[str]]) -> None:
    unknown = ENDED | {"cost": COST | {"state": "Unknown", "unknownSeconds": "3600"}}
    lines = said(
        a_list(
            document(ENDED, team="vision"), document(unknown, name="b", team="audio"),
            document(ENDED, name="c", team="vision"), document(ENDED, name="d"),
        )
    )  # fmt: skip
    assert lines[0].split()[0] == "TEAM" and [each.split()[0] for each in lines[1:5]] == [
        "vision",
        "audio",
        "vision",
        "-",
    ]
    assert [each for each in lines if each.startswith("  team")] == [
        "  team audio, 1 job: at least $12.70, 1.00 node-hours without a price",
        "  team vision, 2 jobs: $25.40",
        "  team (no team), 1 job: $12.70",
    ]


def test_jobs_of_several_namespaces_are_told_apart(said: Callable[..., list[str]]) -> None:
    other = document(ENDED)
    other["metadata"]["namespace"] = "speech"
    lines = said(a_list(document(ENDED), other))
    assert lines[0].startswith("NAMESPACE") and [each.split()[0] for each in lines[1:3]] == ["ml", "speech"]


def test_a_namespace_without_jobs(said: Callable[..., list[str]]) -> None:
    assert "There is no TrainingJob in" in said(a_list())[0]


def test_sums_for_a_program(said: Callable[..., list[str]]) -> None:
    found = json.loads(
        "\n".join(
            said(a_list(document(ENDED, team="vision"), document(without(ENDED, "cost"))), "-o", "json")
        )
    )
    assert found["sum"] == {
        "jobs": 2,
        "spent": 12.7,
        "known": False,
        "unknownSeconds": 0.0,
        "jobsWithoutCost": 1,
    }
    assert [each["team"] for each in found["teams"]] == ["vision", ""] and found["teams"][0]["known"] is True
    assert [each["name"] for each in found["jobs"]] == ["gpt", "gpt"]


# --- from a file ----------------------------------------------------------------------------------------
def test_a_file_with_one_job_is_its_report_and_a_list_is_searched_by_name(
    said: Callable[..., list[str]],
) -> None:
    assert said(document(ENDED))[0].startswith("gpt in namespace ml")
    assert said(a_list(document(ENDED), document(ENDED, name="bert")), "bert")[0].startswith("bert in")


def test_a_namespace_chooses_among_the_jobs_of_a_file(said: Callable[..., list[str]]) -> None:
    other = document(ENDED | {"phase": "Failed"})
    other["metadata"]["namespace"] = "speech"
    both = a_list(document(ENDED), other)
    assert said(both, "gpt", "-n", "speech")[0].startswith("gpt in namespace speech: Failed")
    assert "1 job: $12.70" in said(both, "-n", "ml") and "2 jobs: $25.40" in said(both)
    assert said(both, "-n", "vision")[0].endswith("jobs.json, namespace vision.")
    assert said(document(ENDED), "-n", "ml")[0].startswith("gpt in namespace ml")


def test_messages_do_not_call_standard_input_a_dash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, words in (("[1]", []), (json.dumps(a_list(document())), ["bert"]), ("{", [])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert cost.main(["--file", "-", *words]) == 1
        assert capsys.readouterr().err.startswith("spottrain: the input ")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(a_list()).encode())))
    assert cost.main(["--file", "-"]) == 0
    assert capsys.readouterr().out == "There is no TrainingJob in the input.\n"


def test_a_dash_is_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = io.TextIOWrapper(io.BytesIO(json.dumps(document(ENDED)).encode()))
    monkeypatch.setattr(sys, "stdin", text)
    assert cost.main(["--file", "-"]) == 0 and "$12.70" in capsys.readouterr().out


BAD: list[tuple[Any, list[str], str]] = [
    (
        {"kind": "Job", "apiVersion": "batch/v1"},
        [],
        "has Job where a TrainingJob of spottrain.io is expected",
    ),
    (
        document() | {"apiVersion": "kubeflow.org/v1"},
        [],
        "has TrainingJob where a TrainingJob of spottrain.io",
    ),
    ({}, [], "has an object without kind where a TrainingJob"),
    ([1], [], "has no object where a TrainingJob"),
    (a_list({"kind": "Pod"}), [], "has Pod where a TrainingJob"),
    (a_list(document()), ["bert"], "has no job of the name bert; its jobs: gpt"),
    (a_list(document(), document()), ["gpt"], "has 2 jobs of the name gpt: choose by --namespace (ml)"),
    (a_list(document()), ["gpt", "-n", "x"], "namespace x, has no job of the name gpt; its jobs: none"),
    (document(), ["-n", "x"], "has no job in namespace x"),
    (a_list() | {"items": 5}, [], ": the list.items cannot be read: a list is expected, not 5"),
    ({"kind": ["\x1b[2J"]}, [], "has ['\\x1b[2J'] where a TrainingJob"),
    ({"kind": "a\x1bb"}, [], "has a?b where a TrainingJob"),
    (document({"attempts": 5}), [], "ml/gpt: status.attempts cannot be read: a list is expected, not 5"),
    (document({"attempts": "abc"}), [], "status.attempts cannot be read: a list is expected, not 'abc'"),
    (document({"attempts": ["abc"]}), [], "attempts[0] cannot be read: an object is expected, not 'abc'"),
    (document({"conditions": 5}), [], "ml/gpt: status.conditions cannot be read: a list is expected, not 5"),
    (document({"cost": 5}), [], "ml/gpt: status.cost cannot be read: an object is expected, not 5"),
    (document({"phase": 5}), [], "ml/gpt: status.phase cannot be read: 5"),
    (document({"attempts": [attempt(1, cause=[])]}), [], "status.attempts[0].cause cannot be read: []"),
    (
        document({"goodput": {"time": "0001-01-01T00:00:00+23:00"}}),
        [],
        "ml/gpt: status.goodput.time cannot be read: '0001-01-01T00:00:00+23:00'",
    ),
    (document({"attempts": [{"number": float("inf")}]}), [], "status.attempts[0].number cannot be read: inf"),
    (document({"cost": {"spent": "1e999"}}), [], "ml/gpt: status.cost.spent cannot be read: '1e999'"),
    (document({"cost": {"spent": "1e-999999"}}), [], "status.cost.spent cannot be read: '1e-999999'"),
    (document({"attempt": "\x1b[2J"}), [], "ml/gpt: status.attempt cannot be read: '\\x1b[2J'"),
    (document({"cost": {"spent": "much"}}), [], "ml/gpt: status.cost.spent cannot be read: 'much'"),
    (document({"cost": {"spent": "NaN"}}), [], "ml/gpt: status.cost.spent cannot be read: 'NaN'"),
    (document({"goodput": {"time": "noon"}}), [], "ml/gpt: status.goodput.time cannot be read: 'noon'"),
    (document({"attempt": "two"}), [], "ml/gpt: status.attempt cannot be read: 'two'"),
    (document({"attempts": [{"lastStep": 1}]}), [], "status.attempts[0] cannot be read: number is missing"),
]


@pytest.mark.parametrize(("given", "words", "why"), BAD, ids=[each[2] for each in BAD])
def test_what_is_no_training_job_is_refused_with_a_sentence(
    given: Any, words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(given))
    assert cost.main([*words, "--file", str(file)]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("spottrain: ") and why in err


def test_a_file_that_is_not_there_or_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.json"
    assert (
        cost.main(["--file", str(file)]) == 1
        and "job.json cannot be read: No such file" in capsys.readouterr().err
    )
    file.write_text("status: {}")
    assert cost.main(["--file", str(file)]) == 1 and "job.json is not JSON" in capsys.readouterr().err
    file.write_text("[" * 100_000)
    assert cost.main(["--file", str(file)]) == 1 and "nested too deeply" in capsys.readouterr().err


ODD = "\x1b[31mred\x1b]0;title\x07\n\u202eevil\ud800"


@pytest.mark.parametrize("many", [False, True], ids=["report", "namespace"])
def test_nothing_that_a_job_says_acts_on_the_terminal(said: Callable[..., list[str]], many: bool) -> None:
    held = [{"type": ODD, "status": "True", "reason": ODD}]
    attempts = [attempt(1, cause=ODD, instanceType=ODD, zone=ODD, capacityType=ODD), attempt(2, stopping=ODD)]
    job = document(ENDED | {"phase": ODD, "conditions": held, "attempts": attempts}, name=ODD, team=ODD)
    job["metadata"]["namespace"] = ODD
    text = "\n".join(said(a_list(job, document(ENDED)) if many else job))
    assert "?[31mred" in text and all(each.isprintable() or each == "\n" for each in text)
    assert text.count("evil") >= (4 if many else 6)


def test_names_in_messages_do_not_act_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.json"
    for given in (a_list(document(name=ODD)), document({"attempt": "two"}, name=ODD)):
        file.write_text(json.dumps(given))
        assert cost.main(["--file", str(file), "bert"]) == 1
        said = capsys.readouterr().err
        assert "evil" in said and all(each.isprintable() or each == "\n" for each in said)


@pytest.mark.parametrize(
    "words",
    [["gpt", "-A"], ["-n", "ml", "-A"], ["--file", "x", "-A"], ["--file", "x", "--context", "c"]],
    ids=" ".join,
)
def test_flags_that_contradict_each_other_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cost.main(words)
    assert left.value.code == 2 and "leave out" in capsys.readouterr().err


# --- kubectl --------------------------------------------------------------------------------------------
@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script on the PATH as kubectl, alone there."""

    def put(body: str) -> None:
        file = tmp_path / "bin" / "kubectl"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(file.parent))

    return put


def test_kubectl_gets_the_user_s_context_and_namespace(
    fake: Callable[[str], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "answer").write_text(json.dumps(document(ENDED)))
    fake(f'echo "$@" > {tmp_path}/words; /bin/cat {tmp_path}/answer')
    assert cost.main(["gpt", "-n", "ml", "--context", "east", "--kubeconfig", "/k"]) == 0
    assert "gpt in namespace ml" in capsys.readouterr().out
    words = (tmp_path / "words").read_text().split()
    assert {"--kubeconfig=/k", "--context=east", "--namespace=ml", "--output=json"} <= set(words)
    assert words[-3:] == ["--", "trainingjobs.spottrain.io", "gpt"]


def test_a_name_that_begins_with_a_dash_is_no_flag_of_kubectl(
    fake: Callable[[str], None], tmp_path: Path
) -> None:
    fake(f'echo "$@" > {tmp_path}/words; echo "{{}}"')
    kubectl.get(Access(), "--token=x")
    assert (tmp_path / "words").read_text().split()[-3:] == ["--", "trainingjobs.spottrain.io", "--token=x"]


def test_without_kubectl_it_says_how_to_go_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cost.main(["gpt"]) == 1
    said = capsys.readouterr().err
    assert "kubectl is not on the PATH: install it" in said and "--file job.json" in said


def test_kubectl_s_own_words_are_shown_before_ours(
    fake: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    fake('echo "Error from server (NotFound): no gpt here" >&2; exit 1')
    assert cost.main(["gpt"]) == 1
    out, err = capfd.readouterr()
    theirs, ours = err.splitlines()
    assert not out and theirs == "Error from server (NotFound): no gpt here"
    assert ours.startswith("spottrain: `kubectl get trainingjobs.spottrain.io gpt` ended with exit code 1")


def test_an_answer_of_kubectl_that_is_no_json(fake: Callable[[str], None]) -> None:
    fake("echo NAME PHASE")
    with pytest.raises(RunError, match=r"the output of `kubectl get trainingjobs.spottrain.io` is not JSON"):
        kubectl.get(Access(all_namespaces=True))


def test_a_kubectl_that_does_not_end_is_given_up(fake: Callable[[str], None]) -> None:
    fake("exec /bin/sleep 600")
    with pytest.raises(RunError, match=r"did not end within 0.2 s: is a login waiting for you\?"):
        kubectl.get(Access(), "gpt", seconds=0.2)


# --- values ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0", "$0.00"),
        ("0.004200", "$0.0042"),
        ("1234.5", "$1,234.50"),
        ("-1", "-$1.00"),
        ("-0.001", "-$0.001"),
    ],
)
def test_dollars(value: str, text: str) -> None:
    assert dollars(Decimal(value)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (30, "30 node-seconds"),
        (360, "0.10 node-hours"),
        (7560, "2.10 node-hours"),
        (7.2e6, "2,000.0 node-hours"),
    ],
)
def test_node_hours(seconds: float, text: str) -> None:
    assert node_hours(Decimal(str(seconds))) == text


def test_it_needs_no_torch() -> None:
    program = (
        "import sys\nfrom spottrain.cli import cost\nprint({'torch', 'numpy', 'boto3'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
