"""What tests of the runtime share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fresh import Fresh


@pytest.fixture(scope="session")
def fresh() -> Iterator[Fresh]:
    fresh = Fresh()
    yield fresh
    fresh.close()
