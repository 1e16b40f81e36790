"""An API server with one node, the agent's token for it, and AWS's metadata service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.imds import FakeImds, fake_imds
from tests.unit.agent.fakes import FakeApi, fake_api


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with fake_api() as server:
        yield server


@pytest.fixture
async def imds() -> AsyncIterator[FakeImds]:
    async with fake_imds() as server:
        yield server


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    return tmp_path / "token"
