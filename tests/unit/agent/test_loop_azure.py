"""The agent from Azure's Scheduled Events to API server and back, both real HTTP servers on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
from spottrain_operator import names
from spottrain_operator.agent.loop import Agent
from spottrain_operator.agent.sources.azure import Azure

from tests.support.azuremetadata import FakeAzure, event, fake_azure
from tests.unit.agent.fakes import DEADLINE_TEXT, TAINT, FakeApi, events, running, until

NOT_BEFORE = "Sat, 21 Nov 2026 10:02:00 GMT"
ADVISED = names.SAVE_ADVISED_ANNOTATION


@pytest.fixture
async def azure() -> AsyncIterator[FakeAzure]:
    async with fake_azure() as server:
        yield server


def on_azure(
    azure: FakeAzure, api: FakeApi, first_seconds: float = 5.0, **options: Any
) -> AbstractAsyncContextManager[Agent]:
    make = partial(Azure, first_seconds=first_seconds, seconds=0.2)
    return running(make, azure.url, api, **options)


@pytest.mark.parametrize("kind", ["Preempt", "Reboot"])
async def test_an_event_that_ends_this_vm_reaches_pods_and_node(
    azure: FakeAzure, api: FakeApi, kind: str
) -> None:
    api.add_pod("a")
    async with on_azure(azure, api):
        azure.schedule(event(kind, NOT_BEFORE))
        await until(lambda: api.taints() == [TAINT], "the node was tainted")
    assert api.annotations("a") == {
        names.DEADLINE_ANNOTATION: DEADLINE_TEXT,
        names.SOURCE_ANNOTATION: f"Azure scheduled event {kind}",
    }


async def test_the_call_that_enables_the_service_may_take_long(
    azure: FakeAzure, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    azure.first_seconds = 0.5  # more than any other call may take
    azure.schedule(event("Preempt", NOT_BEFORE))
    async with on_azure(azure, api) as agent:
        await until(lambda: azure.gets == 1, "the first call was made")
        assert not agent.ready
        await until(lambda: api.taints() == [TAINT], "the node was tainted")
        assert agent.ready
    said = [e["event"] for e in events(capsys)]
    assert said.count("scheduledEventsFirstCall") == 1
    assert "metadataUnreadable" not in said
