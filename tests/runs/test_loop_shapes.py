"""The shapes of loop_shapes.md: exact over four stops, refused, or failed as too short."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from spottrain.contract import ExitCode

from tests.runs.loop_shapes import PAGE, STOPS, shapes
from tests.support.heavy import sample

ROOT = Path(__file__).parents[2]
SHAPES = shapes()
PASS = 8
"""Steps."""


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """How the shapes ended whose tests run, by name."""
    here = [each for each in request.session.items if each.path == Path(__file__)]
    asked = [name for name in SHAPES if any(each.name.endswith(f"[{name}]") for each in here)]
    command = [sys.executable, "-m", "tests.runs.loop_shapes", *asked]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return {each["name"]: each for each in map(json.loads, run.stdout.splitlines())}


def of(result: str, *always: str) -> list[ParameterSet]:
    return sample([name for name, shape in SHAPES.items() if shape.result == result], *always)


@pytest.mark.parametrize(
    "name",
    of(
        "Exact",
        *("epochs", "epochs-of-steps", "steps-stateful", "two-passes", "steps-counted-by-hand", "windows"),
        *("own-loader-skipping", "ahead-workers", "ahead-sampler", "ahead-stateful", "second-loader"),
    ),
)
def test_a_loop_of_this_shape_uses_the_same_batches_and_random_numbers_over_stops(
    played: dict[str, dict[str, Any]], name: str
) -> None:
    alone, stopped = played[name]["alone"], played[name]["stopped"]
    assert (alone["code"], stopped["code"]) == (ExitCode.DONE, ExitCode.DONE), (alone, stopped)
    assert len(alone["used"]) > max(STOPS), "the last stop is in it"
    for part in ("used", "other", "digest"):
        assert stopped[part] == alone[part]


@pytest.mark.parametrize(
    "name",
    of(
        "Refused",
        *("two-passes-in-an-epoch", "a-look-at-the-data", "epochs-by-hand", "islice", "break-in-an-epoch"),
        *("drawn-ahead", "own-second-loader", "generator-not-saved"),
    ),
)
def test_a_loop_of_this_shape_is_refused_by_the_end_of_its_first_pass(
    played: dict[str, dict[str, Any]], name: str
) -> None:
    alone = played[name]["alone"]
    assert alone["code"] == ExitCode.BAD_CONFIGURATION and SHAPES[name].says in alone["says"], alone
    assert len(alone["used"]) <= PASS + 1


@pytest.mark.parametrize("name", of("Fails", "short-one-pass", "short-of-epochs-by-return"))
def test_a_loop_that_ends_before_its_last_step_fails(played: dict[str, dict[str, Any]], name: str) -> None:
    alone = played[name]["alone"]
    assert alone["code"] == ExitCode.FAILED and SHAPES[name].says in alone["says"], alone
    assert "run.finish(ended_early=...)" in alone["says"] and alone["digest"] == 0, "no final weights"


def test_the_page_names_each_shape_once_with_its_result() -> None:
    assert re.findall(r"^## (.+)$", PAGE.read_text(), re.M) == list(SHAPES)
    assert {shape.result for shape in SHAPES.values()} == {"Exact", "Refused", "Fails"}
