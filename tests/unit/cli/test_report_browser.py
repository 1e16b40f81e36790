"""The page of `spottrain report` in a browser: on a phone and a screen, in light and dark."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from spottrain_cli import jobs
from spottrain_cli.report.facts import of_job, of_series
from spottrain_cli.report.page import page

from tests.support import report_scenes as scenes
from tests.support.browser import DARK, LIGHT, chromium, look

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        chromium() is None, reason="no Chromium on the PATH (Debian: apt-get install chromium)"
    ),
]


def of_a_job() -> str:
    return page(of_job(jobs.job(scenes.job(), "a test"), scenes.all_series(), now=scenes.NOW))


def of_a_job_with_long_words() -> str:
    raw = scenes.job(
        attempts=[
            each | {"evidence": "x" * 300, "node": "n" * 200} for each in copy.deepcopy(scenes.ATTEMPTS)
        ],
        progress={"step": 123_456_789, "totalSteps": 1_000_000_000, "loss": "0.000001234"},
    )
    raw["metadata"]["name"] = "a" * 63
    return page(of_job(jobs.job(raw, "a test"), scenes.all_series(), now=scenes.NOW, note="y" * 200))


def of_a_run_of_many_attempts() -> str:
    found = [scenes.series(n, n * 200, (n + 1) * 200, outcome="interrupted") for n in range(150)]
    return page(of_series("s3://bucket/run", found, now=scenes.NOW.timestamp()))


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("made", [of_a_job, of_a_job_with_long_words, of_a_run_of_many_attempts])
def test_a_page_can_be_read(made: object, scheme: int, tmp_path: Path) -> None:
    assert callable(made)
    program = chromium()
    assert program is not None
    looks, console = look(program, made(), tmp_path, scheme=scheme, widths=[360, 768, 1280])
    assert not console
    for each in looks:
        assert each.dark is (scheme == DARK) and each.texts > 50
        assert not (each.sideways or each.outside or each.overlaps or each.faint), each
        assert len(each.charts) == 2 and min(each.charts) > each.width / 4
        assert each.pointed.startswith("step ") and ": about " in each.pointed
