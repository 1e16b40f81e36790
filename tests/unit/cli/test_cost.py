"""`spottrain cost`: the report on a job, the sums of a namespace, and what it says of missing figures."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from difflib import ndiff
from pathlib import Path
from typing import Any

import pytest
from spottrain_cli import app, cost_report
from spottrain_cli.cost_report import node_hours, percents
from spottrain_cli.figures import dollars
from spottrain_cli.jobs import BUCKETS, jobs

from tests.support.costs import COST, ENDED, GOODPUT, attempt, document
from tests.support.sentences import Told

NOW = datetime(2026, 11, 23, 15, tzinfo=UTC)
Json = dict[str, Any]


def cost(*words: str) -> int:
    return app.main(["cost", *words])


def a_list(*items: Json) -> Json:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def lines_of(status: Json | None, **more: Any) -> list[str]:
    return cost_report.lines(jobs(document(status, **more), "it")[0], now=NOW)


def without(table: Json, *names: str) -> Json:
    return {name: value for name, value in table.items() if name not in names}


def line(lines: list[str], start: str) -> str:
    return next(each for each in lines if each.startswith(start))


# --- a job ----------------------------------------------------------------------------------------------
UNKNOWN: Json = {"unknownSeconds": "60"}
HELD = [{"type": "Running", "status": "True", "reason": "Other"}]
HELD += [{"type": "Suspended", "status": "True", "reason": "MaxCostReached"}]
RUNNING = without(attempt(1), "endTime", "cause")
TIMED_OUT: Json = {"number": 1, "cause": "SchedulingTimeout", "endTime": "2026-11-23T11:05:00Z"}


def costs(*left_out: str, **more: Any) -> Json:
    return {"cost": without(COST, *left_out) | more}


def goodput(**more: Any) -> Json:
    return {"goodput": GOODPUT | more}


def attempts(*found: Json, **more: Any) -> Json:
    return {"attempts": list(found), **more}


SITUATIONS: dict[str, Json] = {
    "failures are named beside interruptions": {"failures": 2},
    "an attempt that never saved has lost all its steps": attempts(attempt(1, lastStep=50, durableStep=None)),
    "an attempt that did not save has lost what came after its start": attempts(
        attempt(1, lastStep=850, durableStep=None, startStep=800)
    ),
    "no steps known": attempts(attempt(1, lastStep=None)),
    "a report behind its save": attempts(attempt(1, lastStep=790)),
    "five attempts are no longer in the status": attempts(
        *(attempt(number) for number in range(6, 16)), attempt=15
    ),
    "one attempt is no longer in the status": attempts(attempt(2)),
    "parts of less than an hour are minutes": goodput(
        **dict.fromkeys(BUCKETS, "0") | {"productive": "90", "startup": "30", "wanted": "120"}
    ),
    "parts that miss the wanted time": goodput(wanted="7700.000"),
    "dearer than on-demand": costs(onDemandIdeal="10.000000", saving="-27.0%"),
    "failed: a saving without a result": {"phase": "Failed"},
    "running: no result yet": {"phase": "Running"},
    "suspended: no result yet": {"phase": "Suspended"},
    "node-hours without a price make the sum a lower bound": costs(**UNKNOWN),
    "a part that the operator does not write is not free": costs("boot"),
    "an on-demand price is missing": costs(saving="Unknown"),
    "no saving, for there is no goodput": costs(saving="Unknown") | {"goodput": None},
    "no saving, for there is no report": costs(saving="Unknown") | goodput(runtime="Unknown"),
    "no saving of an older operator": costs("saving"),
    "the bookkeeping was lost": costs(lostTime="2026-11-23T12:00:00Z"),
    "nothing to compare with": costs(onDemandIdeal="0"),
    "attempts without prices are not free": attempts(
        attempt(1, spent="0", unknownSeconds="3900"),
        attempt(2, spent="2.500000", unknownSeconds="10"),
        without(attempt(3), "spent", "unknownSeconds"),
    ),
    "percentages that the operator does not know": goodput(paid="Unknown", runtime="Unknown"),
    "no goodput": {"goodput": None},
    "an operator that keeps no costs": {"goodput": None, "cost": None},
    "an attempt that runs": attempts(RUNNING, phase="Running"),
    "an attempt that is told to stop": attempts(RUNNING | {"stopping": "Suspended"}),
    "an attempt that waits for nodes": attempts(
        without(RUNNING, "boundTime", "lastStep", "durableStep"), phase="Pending"
    ),
    "an attempt that never had its nodes": attempts(
        attempt(1, boundTime=None, cause="SchedulingTimeout", lastStep=None)
    ),
    "an older operator does not say since when it has its nodes": attempts(without(RUNNING, "boundTime")),
    "suspended with what it had spent": attempts(attempt(1, cause="Suspended"), phase="Suspended"),
    "suspended by its limit": {"phase": "Suspended", "conditions": HELD},
    "resumed since": {"conditions": [{"type": "Suspended", "status": "False", "reason": "Resumed"}]},
}
"""What a status has instead of that of a job that has ended."""
WITHOUT_NODES: dict[str, Json | None] = {
    "new": None,
    "empty": {},
    "pending": {"phase": "Pending", "attempt": 1, "attempts": [{"number": 1, "capacityType": "Spot"}]},
    "no capacity at first": {"phase": "Pending", "attempt": 2, "attempts": [TIMED_OUT, {"number": 2}]},
    "attempts that are gone may have had nodes": {"phase": "Pending", "attempt": 25}
    | attempts(*({"number": number, "cause": "SchedulingTimeout"} for number in range(6, 26))),
}
SPECS: dict[str, Json] = {"checkpoint": {"mode": "Self"}, "capacity": {"maxCostUSD": "12.00"}}


def test_the_report_fits_a_terminal_but_for_its_table() -> None:
    for status in (ENDED, ENDED | costs(**UNKNOWN)):
        lines = lines_of(status)
        begin = lines.index(line(lines, "NO."))
        assert max(map(len, lines[begin : begin + 3])) < 100
        assert max(map(len, lines[:begin] + lines[begin + 3 :])) <= 80


def test_a_report_says(told: Told) -> None:
    lines = lines_of(ENDED)
    told("\n".join(lines))


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_report_says_otherwise(name: str, told: Told) -> None:
    status = {key: value for key, value in (ENDED | SITUATIONS[name]).items() if value is not None}
    lines = lines_of(status)
    told("\n".join(each for each in ndiff(lines_of(ENDED), lines) if each[0] in "+-"))


@pytest.mark.parametrize("name", WITHOUT_NODES)
def test_a_job_that_has_had_no_node_has_spent_nothing_yet(name: str, told: Told) -> None:
    told("\n".join(lines_of(WITHOUT_NODES[name])))


@pytest.mark.parametrize("name", SPECS)
def test_a_report_depends_on_the_spec(name: str, told: Told) -> None:
    status = without(ENDED, "goodput")
    lines = lines_of(status, spec={name: SPECS[name]})
    told("\n".join(each for each in ndiff(lines_of(status), lines) if each[0] in "+-"))


@pytest.mark.parametrize("limit", [12, 12.0])
def test_a_limit_may_be_any_number(limit: float) -> None:
    lines = lines_of(ENDED, spec={"capacity": {"maxCostUSD": limit}})
    assert line(lines, "Limit").split() == ["Limit", "$12.00", "capacity.maxCostUSD"]


def test_where_the_time_went_adds_up_to_a_hundred_percent() -> None:
    lines = lines_of(ENDED)
    begin = lines.index(line(lines, "WHERE THE TIME WENT"))
    rows = [each.split()[-2:] for each in lines[begin + 1 : begin + 10]]
    assert sum(Decimal(share) for _, share in rows[:-1]) == 100


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


# --- JSON -----------------------------------------------------------------------------------------------
def test_a_program_gets_numbers_and_null_where_a_figure_is_unknown() -> None:
    unknown = {"unknownSeconds": "60", "saving": "62.0%"}
    found = cost_report.facts(jobs(document(ENDED | {"cost": COST | unknown}), "it")[0], now=NOW)
    json.dumps(found)
    assert found["cost"]["spent"] == 12.7 and found["cost"]["known"] is False
    assert found["cost"]["saving"] is None
    assert found["goodput"]["paid"] == 86.9 and found["goodput"]["productive"] == 6620
    assert found["attempts"][0]["lostSteps"] == 12 and found["attempts"][0]["seconds"] == 3300
    bare = cost_report.facts(jobs(document(None), "it")[0], now=NOW)
    assert bare["cost"] is None and bare["goodput"] is None and bare["attempts"] == []


# --- a namespace ----------------------------------------------------------------------------------------
@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., list[str]]:
    """Runs the command over a document, and returns the lines."""

    def run(given: Json, *words: str) -> list[str]:
        file = tmp_path / "jobs.json"
        file.write_text(json.dumps(given))
        assert cost("--file", str(file), *words) == 0
        out, err = capsys.readouterr()
        assert not err
        return [*out.splitlines()]

    return run


def in_namespace(namespace: str, **status: Any) -> Json:
    made = document(ENDED | status)
    made["metadata"]["namespace"] = namespace
    return made


WITHOUT_PRICE: Json = ENDED | costs(unknownSeconds="3600")
WITHOUT_COST, WITHOUT_SUM = without(ENDED, "cost"), ENDED | costs("spent")
LISTS: dict[str, Json] = {
    "each job and a sum": a_list(document(ENDED), document(ENDED, name="bert")),
    "unknown prices make the sum a lower bound": a_list(
        document(ENDED),
        document(WITHOUT_PRICE, name="b"),
        document(WITHOUT_COST, name="c"),
        document(name="d"),
    ),
    "a cost without a sum": a_list(document(WITHOUT_SUM)),
    "a cost without a sum among others": a_list(document(ENDED), document(WITHOUT_SUM, name="b")),
    "the report of a cost without a sum": document(WITHOUT_SUM),
    "nothing known": a_list(document(ENDED | costs(unknownSeconds="3600", spent="0"))),
    "the report of nothing known": document(ENDED | costs(unknownSeconds="3600", spent="0")),
    "sums by team": a_list(
        document(ENDED, team="vision"),
        document(WITHOUT_PRICE, name="b", team="audio"),
        document(ENDED, name="c", team="vision"),
        document(ENDED, name="d"),
    ),
    "several namespaces": a_list(document(ENDED), in_namespace("speech")),
    "no jobs": a_list(),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_namespace_has_a_line_for_each_job_and_sums(
    name: str, said: Callable[..., list[str]], told: Told, tmp_path: Path
) -> None:
    told("\n".join(said(LISTS[name])))


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
    both = a_list(document(ENDED), in_namespace("speech", phase="Failed"))
    assert said(both, "gpt", "-n", "speech")[0].startswith("gpt in namespace speech: Failed")
    assert "1 job: $12.70" in said(both, "-n", "ml") and "2 jobs: $25.40" in said(both)
    assert said(both, "-n", "vision")[0].endswith("jobs.json, namespace vision.")
    assert said(document(ENDED), "-n", "ml")[0].startswith("gpt in namespace ml")


def test_messages_do_not_call_standard_input_a_dash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, words in (("[1]", []), (json.dumps(a_list(document())), ["bert"]), ("{", [])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert cost("--file", "-", *words) in (2, 3)
        assert capsys.readouterr().err.startswith("spottrain: the input ")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(a_list()).encode())))
    assert cost("--file", "-") == 0
    assert capsys.readouterr().out == "There is no TrainingJob in the input.\n"


def test_a_dash_is_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = io.TextIOWrapper(io.BytesIO(json.dumps(document(ENDED)).encode()))
    monkeypatch.setattr(sys, "stdin", text)
    assert cost("--file", "-") == 0 and "$12.70" in capsys.readouterr().out


BAD: list[tuple[Any, list[str]]] = [
    ({"kind": "Job", "apiVersion": "batch/v1"}, []),
    (document() | {"apiVersion": "kubeflow.org/v1"}, []),
    ({}, []),
    ([1], []),
    (a_list({"kind": "Pod"}), []),
    (a_list(document()), ["bert"]),
    (a_list(document(), document()), ["gpt"]),
    (a_list(document()), ["gpt", "-n", "x"]),
    (document(), ["-n", "x"]),
    (a_list() | {"items": 5}, []),
    ({"kind": ["\x1b[2J"]}, []),
    ({"kind": "a\x1bb"}, []),
    (document({"attempts": 5}), []),
    (document({"attempts": "abc"}), []),
    (document({"attempts": ["abc"]}), []),
    (document({"conditions": 5}), []),
    (document({"cost": 5}), []),
    (document({"phase": 5}), []),
    (document({"attempts": [attempt(1, cause=[])]}), []),
    (document({"cost": {"updateTime": "0001-01-01T00:00:00+23:00"}}), []),
    (document({"attempts": [{"number": float("inf")}]}), []),
    (document({"cost": {"spent": "1e999"}}), []),
    (document({"cost": {"spent": "1e-999999"}}), []),
    (document({"attempt": "\x1b[2J"}), []),
    (document({"cost": {"spent": "much"}}), []),
    (document({"cost": {"spent": "NaN"}}), []),
    (document({"cost": {"updateTime": "noon"}}), []),
    (document({"attempt": "two"}), []),
    (document({"attempts": [{"lastStep": 1}]}), []),
]


def test_what_is_no_training_job_is_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    file, said = tmp_path / "job.json", []
    for given, words in BAD:
        file.write_text(json.dumps(given))
        assert cost(*words, "--file", str(file)) in (2, 3)
        out, err = capsys.readouterr()
        assert not out and err.startswith("spottrain: ") and err.count("\n") == 1
        said.append(err)
    told("".join(said).rstrip("\n"))


def test_a_file_that_is_not_there_or_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.json"
    assert (
        cost("--file", str(file)) == 2 and "job.json cannot be read: No such file" in capsys.readouterr().err
    )
    file.write_text("status: {}")
    assert cost("--file", str(file)) == 2 and "job.json is not JSON" in capsys.readouterr().err
    file.write_text("[" * 100_000)
    assert cost("--file", str(file)) == 2 and "nested too deeply" in capsys.readouterr().err


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
        assert cost("--file", str(file), "bert") in (2, 3)
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
    assert cost(*words) == 2 and "leave out" in capsys.readouterr().err


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
    modules = "spottrain_cli.commands.cost, spottrain_cli.cost_sums, spottrain_cli.cluster"
    program = f"import sys, {modules}\nprint({{'torch', 'numpy', 'boto3'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
