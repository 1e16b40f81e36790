"""What a save at a notice is reckoned to take, and when that is said to be too much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spottrain.lifecycle.notice_budget import COMMIT_SECONDS, FULL_SHARE, MARGIN, NoticeBudget


def budget(**more: float) -> NoticeBudget:
    basis = {"bytes": 10**9, "bandwidth": 1e8, "step_seconds": 0.5, "copy_seconds": 0.25, "grace": 30.0}
    return NoticeBudget(**{**basis, **more})  # type: ignore[arg-type]


def test_the_budget_is_a_step_a_copy_an_upload_with_a_margin_and_a_commit() -> None:
    assert budget().seconds == pytest.approx(0.5 + 0.25 + MARGIN * 10 + COMMIT_SECONDS)
    assert budget().share == pytest.approx(14.75 / 30)
    assert budget().warning == ""


def test_above_its_share_of_the_notice_it_warns_with_every_part_and_what_to_do() -> None:
    assert budget(grace=14.75 / FULL_SHARE + 0.01).warning == ""
    words = budget(grace=15.0, step_seconds=0.54).warning
    assert words.startswith(
        "a save at a notice is reckoned to take 15 s (a step 0.5 s, 1.00 GB at 100 MB/s) of 15 s of notice"
    )
    assert "Use nodes with a longer notice" in words and "a shorter interval of saves" in words


@given(st.integers(0, 10**13), st.floats(1e3, 1e11), st.floats(0, 1e3), st.floats(0, 100), st.floats(1, 1e4))
def test_it_warns_exactly_above_that_share(
    size: int, bandwidth: float, step: float, copy: float, grace: float
) -> None:
    it = budget(bytes=size, bandwidth=bandwidth, step_seconds=step, copy_seconds=copy, grace=grace)
    assert bool(it.warning) == (it.seconds > FULL_SHARE * grace) == (it.share > FULL_SHARE)
