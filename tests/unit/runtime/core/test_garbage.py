"""The garbage collector runs rarely until the first step, unless the script has set a threshold itself.

It does not run at all while the compiler is imported.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from spottrain.core import garbage
from spottrain.core.garbage import AT_START, USUAL, collect_as_usual, collect_rarely, no_collection


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


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a process that trains; the tests' conftest has frozen what it imported."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_an_import_makes_is_old_without_a_collection() -> None:
    before = sum(each["collections"] for each in gc.get_stats())
    with no_collection():
        made = [[number] for number in range(5 * USUAL[0])]
    assert sum(each["collections"] for each in gc.get_stats()) == before
    assert gc.isenabled()
    assert id(made) in {id(each) for each in gc.get_objects(generation=2)}
    assert gc.get_freeze_count() == 0


def test_what_a_script_has_frozen_or_switched_off_stays_so() -> None:
    gc.freeze()
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert gc.get_freeze_count()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), no_collection():
        raise ImportError
    assert gc.isenabled()
