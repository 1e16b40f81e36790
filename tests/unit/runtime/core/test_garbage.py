"""The garbage collector runs rarely until the first step, unless the script has set a threshold itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from spottrain.core import garbage
from spottrain.core.garbage import AT_START, USUAL, collect_as_usual, collect_rarely


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


def test_the_threshold_is_high_until_the_first_step() -> None:
    collect_rarely()
    assert gc.get_threshold() == AT_START
    collect_as_usual()
    assert gc.get_threshold() == USUAL


@pytest.mark.parametrize("own", [0, 50_000])
def test_a_threshold_that_was_set_before_the_import_stays(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "USUAL", (own, 10, 10))
    gc.set_threshold(own, 10, 10)
    collect_rarely()
    assert gc.get_threshold()[0] == own


def test_a_threshold_of_the_script_stays() -> None:
    gc.set_threshold(123)
    collect_rarely()
    assert gc.get_threshold()[0] == 123
    gc.set_threshold(*USUAL)
    collect_rarely()
    gc.set_threshold(456)
    collect_as_usual()
    assert gc.get_threshold()[0] == 456
