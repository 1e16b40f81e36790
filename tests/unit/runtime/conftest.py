"""What tests of the runtime share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fresh import Fresh
from tests.support.sentences import Sentences, renewing, told

__all__ = ["told"]


@pytest.fixture(scope="session", autouse=True)
def imported_once() -> Iterator[None]:
    """What was imported is no garbage: neither a collection nor a fork has to visit it."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def fresh() -> Iterator[Fresh]:
    fresh = Fresh()
    yield fresh
    fresh.close()


@pytest.fixture(scope="session")
def sentences() -> Iterator[Sentences]:
    sentences = Sentences(Path(__file__).parent)
    yield sentences
    sentences.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if renewing():
        items[:] = [item for item in items if "told" in getattr(item, "fixturenames", ())]
