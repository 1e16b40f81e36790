"""An API server with one node and the agent's token for it, and AWS's metadata service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.imds import FakeImds, fake_imds
from tests.unit.agent.fakes import FakeApi, fake_api


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[FakeApi]:
    async with fake_api() as server:
        server.token = tmp_path / "token"
        server.token.write_text("first\n")
        yield server


@pytest.fixture
async def imds() -> AsyncIterator[FakeImds]:
    async with fake_imds() as server:
        yield server
