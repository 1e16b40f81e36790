"""One event as a sentence, as `key=value` and as JSON."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable

import pytest
from spottrain.core.log_format import (
    SENTENCES,
    Event,
    chosen_format,
    duration,
    json_line,
    logfmt,
    sentence,
    sentence_line,
    size,
)

AT = 1_763_726_584.123
TIME = "2025-11-21T12:03:04.123Z"


def event(name: str, /, **facts: object) -> Event:
    return Event(name=name, facts=facts, at=AT)


COMMITTED = event("committed", step=120, seconds=1.8034, bytes=10_172_817, key="checkpoints/t1/")


@pytest.mark.parametrize(
    ("it", "words"),
    [
        (COMMITTED, "Saved step 120 in 1.8 s, 10.2 MB"),
        (event("committed", step=1, seconds=0.5, bytes=None, key="k"), "Saved step 1 in 500 ms"),
        (
            event("sigterm", source="SIGTERM", deadline="2025-11-21T12:04:01.000Z"),
            "Termination notice (SIGTERM): 57 s left, saving",
        ),
        (
            event("sigterm", source="SIGTERM", deadline="2025-11-21T12:00:00.000Z"),
            "Termination notice (SIGTERM): 0 ms left, saving",
        ),
        (event("restored", step=120, seconds=0.9996, key="k"), "Resumed from step 120 in 1.0 s"),
        (event("logs-missing", of=0, bytes=0, why="w"), "Logs missing: of 0, 0 B; w"),
        (
            event("override", setting="lr", manifest=0.1, script=2),
            "lr: 0.1 by the manifest, not 2 as in the script",
        ),
        (
            event("override", setting="x", checkpoint=1, script=2),
            "x: 1 of the checkpoint, not 2 as in the script",
        ),
        (event("override", setting="x", manifest=0, script=None), "x: 0 by the manifest"),
        (event("override", setting="x", group=1, was=2), "x; group 1, was 2"),
        (
            event("step-time", step_seconds=0.002, compute="0.700", data="0.290", h2d="0.004", other="0.006"),
            "A step took 2 ms on average: 70% computing, 29% waiting for data, 1% other",
        ),
        (
            event("evaluated", step=3, seconds=1.0, eval_loss="1.83269026"),
            "Evaluated step 3 in 1.0 s: loss 1.8327",
        ),
        (event("profile-stored", folder="x", bytes=3e6), "Profile stored: folder x, 3 MB"),
        (event("diagnosis", verdict="data-bound", why="data-bound: it waits."), "data-bound: it waits."),
        (event("step", step=3, total_steps=9, loss=2.5, lr=None), "Step 3/9: loss 2.5"),
        (event("step", step=3, loss=None), "Step 3"),
        (
            event("compile-cache-not-saved", why="no room", key="k", seconds=2.0),
            "Compile cache not saved: key k, 2.0 s; no room",
        ),
        (event("of-a-later-version", some_key="v", rank=3), "Of a later version: some key v"),
        (event("advice", about="{text}", text="a [b] {about}"), "{text}: a [b] {about}"),
        (event("committed", step=1, seconds="soon"), "Saved step 1 in soon"),
    ],
)
def test_an_event_is_a_sentence(it: Event, words: str) -> None:
    assert sentence(it) == str(it) == words


def test_no_event_needs_a_fact_to_be_told() -> None:
    for name in set(SENTENCES) - {"end"}:
        assert sentence(event(name)) and "{" not in sentence(event(name))


def test_a_line_for_people_has_the_rank_and_marks_warnings() -> None:
    line = sentence_line(event("save-failed", rank=1, step=7, error="no\nnetwork"), logging.WARNING)
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[rank 1\] Warning: The save of step 7 failed: no network", line)


def test_rank_0_speaks_for_all_but_for_warnings() -> None:
    assert event("first-step", rank=0).for_people and not event("first-step", rank=1).for_people
    assert event("save-failed", rank=1, step=7).for_people
    assert not event("rank-ended", of=1, status=0).for_people
    assert event("rank-ended", of=1, status="SIGKILL").for_people
    assert not event("launcher-end", code=75).for_people and event("launcher-end", code=1).for_people
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d Compiled: graphs 2", sentence_line(event("compiled", rank=0, graphs=2), 20)
    )


def test_a_budget_that_is_too_small_is_a_warning() -> None:
    assert event("emergency-budget", warning=None).level == logging.INFO
    assert event("emergency-budget", warning="too small").level == logging.WARNING


@pytest.mark.parametrize(
    ("it", "line"),
    [
        (COMMITTED, "event=committed step=120 seconds=1.803 bytes=10172817 key=checkpoints/t1/"),
        (event("x", why="two words", a="", b='"', c="k=v", d="a\nb", e=None), None),
        (
            event("step", rank=0, step=12, total_steps=400, loss=1 / 3, lr=3e-4, samples_per_second=812.04),
            "step=12/400 rank=0 loss=0.333333333 lr=0.0003 samples/s=812.0",
        ),
        (event("step", step=12, total_steps=None, epoch=0), "step=12 epoch=0"),
    ],
)
def test_logfmt_quotes_what_would_break_a_line(it: Event, line: str | None) -> None:
    line = line or 'event=x why="two words" a="" b="\\"" c="k=v" d="a\\nb"'
    assert logfmt(it, logging.INFO) == f"{TIME} {line}"


def test_json_keeps_types_and_is_json_for_every_number() -> None:
    it = event("x", step=3, loss=float("nan"), path=ValueError("a\nb"), none=None)
    line = json_line(it, logging.WARNING)
    assert "\n" not in line
    assert json.loads(line, parse_constant=pytest.fail) == {
        "time": TIME,
        "level": "warning",
        "event": "x",
        "step": 3,
        "loss": "nan",
        "path": "a\nb",
    }


@pytest.mark.parametrize("write", [logfmt, json_line, sentence_line])
@pytest.mark.parametrize("long", ["x" * 1_000_000, ValueError("x" * 1_000_000)])
def test_a_text_of_a_megabyte_is_cut_in_its_line(write: Callable[[Event, int], str], long: object) -> None:
    line = write(event("end", message=long, error=long), logging.INFO)
    assert len(line) < 10_000 and "x... (1000000 characters)" in line


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.0 s"),
        (9.96, "10 s"),
        (99.4, "99 s"),
        (120, "2 min"),
        (5999, "1 h 40 min"),
        (90_000, "25 h 00 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_a_duration_has_two_figures_or_so(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_sizes_are_decimal() -> None:
    words = "0 B, 999 B, 1 kB, 10.2 MB, 3 GB, 2.5 TB, 4e+03 TB"
    assert ", ".join(map(size, (0, 999, 1000, 10_172_817, 3e9, 2.5e12, 4e15))) == words


@pytest.mark.parametrize(
    ("asked", "terminal", "chosen"),
    [
        ("", True, "text"),
        ("", False, "logfmt"),
        ("auto", False, "logfmt"),
        ("json", True, "json"),
        ("text", False, "text"),
        ("xml", False, "logfmt"),
    ],
)
def test_the_output_decides_unless_a_format_is_named(asked: str, terminal: bool, chosen: str) -> None:
    assert chosen_format(asked, terminal=terminal) == chosen
