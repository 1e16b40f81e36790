"""What tests of the runtime share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count

import pytest

from tests.support.fresh import Fresh
from tests.unit.runtime.sentences import Sentences, Told, of_error, refusal


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
    sentences = Sentences()
    yield sentences
    sentences.close()


@pytest.fixture
def told(
    request: pytest.FixtureRequest, sentences: Sentences, tmp_path_factory: pytest.TempPathFactory
) -> Told:
    """Compares what is said with what sentences.txt has of this test: a text, an error, a refused call's."""
    calls = count(1)

    def compare(what: object) -> None:
        number = next(calls)
        name = request.node.name if number == 1 else f"{request.node.name} ({number})"
        if isinstance(what, pytest.ExceptionInfo):
            text = of_error(what.value)
        else:
            text = refusal(what) if callable(what) else str(what)
        if "tmp_path" in request.fixturenames:
            text = text.replace(str(request.getfixturevalue("tmp_path")), "TMP")
        text = text.replace(str(tmp_path_factory.getbasetemp()), "TMP")
        sentences.compare(request.path, name, text)

    return compare


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if Sentences().renewing:
        items[:] = [item for item in items if "told" in getattr(item, "fixturenames", ())]
