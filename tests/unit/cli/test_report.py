"""What `spottrain report` shows: of a job, of its series alone, of hostile texts, of a million steps."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from spottrain.contract import series_key
from spottrain.core.series import Point, Series
from spottrain.storage.local import FolderStore
from spottrain_cli import app, jobs
from spottrain_cli.report.curves import Axis, Column, axis_of, columns
from spottrain_cli.report.facts import Report, of_job, of_series
from spottrain_cli.report.findings import findings
from spottrain_cli.report.page import page
from spottrain_cli.report.reading import read_of_job

from tests.support import report_scenes as scenes
from tests.support.sentences import Told


class Words(HTMLParser):
    """The texts of a page, and whether each element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.names: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & {*self.open} and data.strip():
            self.texts.append(data.strip())


def shown(report: Report) -> str:
    words = Words(page(report))
    assert not words.open
    return " ".join(words.texts)


def of_scene(**status: Any) -> Report:
    return of_job(jobs.job(scenes.job(**status), "a test"), scenes.all_series(), now=scenes.NOW)


# --- the page -------------------------------------------------------------------------------------------
def test_a_page_of_a_job(told: Told) -> None:
    told("\n".join(Words(page(of_scene())).texts))


def test_a_page_of_a_job_without_series_tells_why_and_has_all_that_the_status_has() -> None:
    report = of_job(jobs.job(scenes.job(), "a test"), [], now=scenes.NOW, note="the bucket refused")
    text = shown(report)
    assert "the bucket refused" in text and "Loss and speed" not in text
    assert "SpotNotice" in text and "$3.41" in text and "61.7 %" in text and "start-up" in text


def test_a_page_of_a_job_that_has_not_begun() -> None:
    raw = scenes.job(attempts=[], phase="Pending", conditions=[], progress={}, cost=None, goodput=None)
    text = shown(of_job(jobs.job(raw, "a test"), [], now=scenes.NOW))
    assert "Pending, 0 attempts" in text and "not known" in text


def test_a_page_of_a_job_that_runs_shows_the_steps_to_come() -> None:
    running = copy.deepcopy(scenes.ATTEMPTS[:1])
    for name in ("endTime", "cause"):
        del running[0][name]
    report = of_scene(attempts=running, phase="Running", progress={"step": 1000, "totalSteps": 9000})
    assert report.live and "1,000 of 9,000" in shown(report) and "running" in shown(report)


def test_a_page_of_a_local_run_is_made_from_its_series() -> None:
    report = of_series("./checkpoints/vit", scenes.all_series(), now=scenes.NOW.timestamp())
    text = shown(report)
    assert "Done, 3 attempts, 2 interruptions" in text and "data-bound" in text and "Killed" in text
    assert [each.step for each in report.breaks] == [2000, 5000]
    assert report.parts is not None and report.parts["rollback"] == 40.0
    assert report.parts["productive"] == (2000 + 3200 + 4000) / 2 - 40.0
    assert [span.lost for span in report.spans] == [0, 0, None]


def test_no_step_is_on_the_page_twice_and_those_of_other_jobs_on_the_uri_are_not() -> None:
    report = of_scene()
    steps = [point.step for point in report.points]
    assert steps == sorted(set(steps)) == list(range(10, 9001, 10))
    other = scenes.job()
    other["metadata"]["uid"] = "another"
    assert not of_job(jobs.job(other, "a test"), scenes.all_series(), now=scenes.NOW).points
    later = scenes.series(4, 100, 300)
    later = replace(later, attempt=replace(later.attempt, jobUID="another"))
    found = [*scenes.all_series(), later]  # a job that went on from an old checkpoint takes nothing from it
    assert of_job(jobs.job(scenes.job(), "a test"), found, now=scenes.NOW).points == report.points


HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


def test_no_text_of_a_job_becomes_markup() -> None:
    raw = scenes.job(
        phase=HOSTILE,
        conditions=[{"type": "Succeeded", "status": "True", "message": HOSTILE}],
        attempts=[
            each | {"node": HOSTILE, "cause": HOSTILE, "evidence": HOSTILE} for each in scenes.ATTEMPTS
        ],
    )
    raw["metadata"]["name"] = HOSTILE
    text = page(of_job(jobs.job(raw, "a test"), scenes.all_series(), now=scenes.NOW, note=HOSTILE))
    words = Words(text)
    assert "img" not in words.names and HOSTILE in " ".join(words.texts)
    assert text.count("<script") == 1 and "onerror=alert" in text  # as text


def test_a_page_loads_nothing() -> None:
    text = page(of_scene())
    assert not re.search(r"https?://|@import|src=|href=", text)
    assert "default-src" in text and "viewport" in text


def test_a_million_steps_in_a_hundred_attempts_take_less_than_2_mb() -> None:
    first = scenes.series(0, 0, 10_000, every=10, outcome="interrupted")
    found = [shifted(first, number) for number in range(100)]
    report = of_series("s3://bucket/run", found, now=scenes.NOW.timestamp())
    assert report.points[-1].step == 1_000_000 and len(report.points) == 100_000
    assert len(page(report).encode()) < 2_000_000


def shifted(series: Series, number: int) -> Series:
    """The same as attempt `number`, after all those before it."""
    ahead = 10_000 * number
    facts = replace(series.attempt, term=number, number=number, startStep=ahead, step=ahead + 10_000)
    points = (point._replace(step=point.step + ahead) for point in series.points)
    return Series(attempt=facts, points=tuple(points))


# --- curves ---------------------------------------------------------------------------------------------
def test_a_column_has_the_mean_and_the_extremes_of_its_points() -> None:
    points = [Point(step=step, time=0.0, loss=float(step)) for step in (1, 2, 9)]
    found = columns(points, lambda p: (p.loss or 0, p.loss or 0, p.loss or 0), 8000)
    assert [(each.step, each.mean, each.low, each.high) for each in found] == [(9, 4, 1, 9)]
    assert len(columns(points, lambda p: (1.0, 1.0, 1.0), 10)) == 3


@pytest.mark.parametrize(
    ("means", "logarithmic", "ticks"),
    [
        ([1.0, 2.0], False, [1.0, 1.5, 2.0]),
        ([3.0], False, [2.8, 3.0, 3.2]),
        ([0.0], False, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        ([0.01, 10.0], True, [0.01, 0.1, 1.0, 10.0]),
        ([1e-12, 1e6], True, None),
        ([-5.0, 5.0], False, [-5.0, 0.0, 5.0]),
    ],
)
def test_an_axis_has_round_ticks(means: list[float], logarithmic: bool, ticks: list[float] | None) -> None:
    axis = axis_of([Column(step=0, mean=mean, low=mean, high=mean) for mean in means])
    assert axis.logarithmic is logarithmic and 2 <= len(axis.ticks()) <= 8
    assert all(0 <= axis.share(each) <= 1 for each in [*means, *axis.ticks()])
    if ticks is not None:
        assert axis.ticks() == pytest.approx(ticks)


def test_a_value_beyond_an_axis_is_at_its_end() -> None:
    assert Axis(low=0, high=10).share(99) == 1 and Axis(low=1, high=10, logarithmic=True).share(-5) == 0


# --- what was slow --------------------------------------------------------------------------------------
def test_the_largest_part_that_was_lost_is_named_with_its_fix() -> None:
    steps, time = findings(of_scene())
    assert steps.title == "The steps are data-bound" and "numWorkers to 6" in steps.text
    assert time.title == "The most time was lost to: start-up" and time.text.startswith("7%, 20 min of")
    assert "compile cache" in time.fix


def test_a_run_that_lost_little_is_praised_and_one_that_reports_nothing_is_not() -> None:
    good = scenes.GOODPUT | {
        name: "100" for name in scenes.GOODPUT if name in ("startup", "waiting", "rollback")
    }
    assert findings(of_scene(goodput=good | {"productive": "16000"}))[-1].title == "Little time was lost"
    assert "not known" in findings(of_scene(goodput=None))[-1].title


# --- the command ----------------------------------------------------------------------------------------
def stored(folder: Path) -> str:
    for each in scenes.all_series():
        FolderStore(folder).put(series_key(each.attempt.term), each.to_bytes())
    return str(folder)


def test_the_command_writes_a_file_and_again_but_not_over_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = stored(tmp_path / "vit")
    assert [app.main(["report", uri]) for _ in range(2)] == [0, 0]
    assert "Done, 3 attempts" in (tmp_path / "vit-report.html").read_text()
    assert app.main(["report", uri, "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("vit-report.html\nvit-report.html\n<!doctype html>")
    (tmp_path / "train.py").write_text("import torch\n")
    assert app.main(["report", uri, "-o", "train.py"]) == 2
    assert app.main(["report", uri, "-o", "none/x.html"]) == 2
    assert app.main(["report", uri, "-o", "-", "--open"]) == 2
    told(capsys.readouterr().err.strip())


def test_a_uri_without_a_series_or_with_a_damaged_one_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "series").mkdir()
    (tmp_path / "series" / "t000001.jsonl.gz").write_bytes(b"?")
    (tmp_path / "empty").mkdir()
    codes = [app.main(["report", str(tmp_path / name), "-o", "-"]) for name in ("", "empty", "none")]
    assert codes == [1, 3, 3]
    damaged, empty, none = capsys.readouterr().err.splitlines()
    assert "t000001.jsonl.gz cannot be read" in damaged
    assert "no series of steps" in empty and "no folder" in none


@pytest.mark.parametrize(
    ("checkpoint", "why"),
    [
        ({"mode": "Sync", "uri": "s3://bucket/run"}, "with checkpoint.mode Sync"),
        ({"mode": "Self"}, "with checkpoint.mode Self"),
        ({}, "it has none"),
        ({"uri": "/volume/of/its/pods"}, "mount it on this machine"),
        ({"uri": "s3://bucket/run", "endpoint": "http://minio.none.invalid"}, "no address on this machine"),
    ],
)
def test_a_job_whose_series_cannot_be_read_from_here_gets_a_page_that_says_why(
    checkpoint: dict[str, Any], why: str
) -> None:
    raw = scenes.job()
    raw["spec"]["checkpoint"] = checkpoint
    job = jobs.job(raw, "a test")
    found, note = read_of_job(job, "")
    assert not found and why in note
    assert note in shown(of_job(job, found, now=scenes.NOW, note=note))


def test_a_job_whose_uri_has_another_jobs_series_alone_is_told_so(tmp_path: Path) -> None:
    raw = scenes.job()
    raw["metadata"]["uid"], raw["spec"]["checkpoint"] = "another", {"uri": stored(tmp_path)}
    found, note = read_of_job(jobs.job(raw, "a test"), "")
    assert not found and "no attempt has stored them" in note
