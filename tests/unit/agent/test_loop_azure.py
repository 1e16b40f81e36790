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

from tests.support.azuremetadata import EVENT, VM, FakeAzure, event, fake_azure
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


async def asked_more(azure: FakeAzure, times: int = 20) -> None:
    before = azure.gets
    await until(lambda: azure.gets > before + times, "the service was asked again")


@pytest.mark.parametrize("kind", ["Preempt", "Reboot"])
async def test_an_event_that_ends_this_vm_reaches_pods_and_node(
    azure: FakeAzure, api: FakeApi, kind: str
) -> None:
    api.add_pod("a")
    async with on_azure(azure, api, acknowledge=False):
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
    async with on_azure(azure, api, acknowledge=False) as agent:
        await until(lambda: azure.gets == 1, "the first call was made")
        assert not agent.ready
        await until(lambda: api.taints() == [TAINT], "the node was tainted")
        assert agent.ready
    said = [e["event"] for e in events(capsys)]
    assert said.count("scheduledEventsFirstCall") == 1
    assert "metadataUnreadable" not in said


# --- acknowledging -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["Preempt", "Reboot"])
async def test_an_event_is_acknowledged_once_and_only_when_the_last_trainer_has_ended(
    azure: FakeAzure, api: FakeApi, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    api.add_pod("saving")
    api.add_pod("over", phase="Failed")
    azure.schedule(event(kind, NOT_BEFORE))
    async with on_azure(azure, api):
        await until(lambda: bool(api.taints()), "the node was tainted")
        await asked_more(azure)
        assert azure.started == []
        api.pods["saving"]["status"]["phase"] = "Succeeded"
        await until(lambda: bool(azure.started), "the event was acknowledged")
        await asked_more(azure)
    assert azure.started == [EVENT]
    (said,) = [e for e in events(capsys) if e["event"] == "acknowledged"]
    assert (said["id"], said["action"]) == (EVENT, kind)


async def test_a_trainer_that_only_the_cache_has_forgotten_is_waited_for(
    azure: FakeAzure, api: FakeApi
) -> None:
    api.add_pod("saving")
    api.cached_pods = []
    azure.schedule(event("Preempt", NOT_BEFORE))
    async with on_azure(azure, api):
        await until(lambda: api.fresh_lists > 5, "the pods were read as they are")
        assert azure.started == []
        del api.pods["saving"]
        await until(lambda: azure.started == [EVENT], "the event was acknowledged")


async def test_nothing_is_acknowledged_before_the_node_is_marked(azure: FakeAzure, api: FakeApi) -> None:
    """Until it has its taint a trainer may still be sent there."""
    api.refused = "PATCH /api/v1/nodes"
    azure.schedule(event("Preempt", NOT_BEFORE))
    async with on_azure(azure, api):
        await until(lambda: len(api.requests) > 20, "the API server was asked again and again")
        assert azure.started == []
        api.refused = ""
        await until(lambda: azure.started == [EVENT], "the event was acknowledged")


@pytest.mark.parametrize(
    ("resources", "refused", "acknowledge"),
    [([VM], "GET /api/v1/pods", True), ([VM, "aks-gpu-31337-vmss_3"], "", True), ([VM], "", False)],
    ids=["pods that cannot be listed are taken for there", "it also takes a neighbour", "switched off"],
)
async def test_an_event_is_left_to_its_time(
    azure: FakeAzure, api: FakeApi, resources: list[str], refused: str, acknowledge: bool
) -> None:
    azure.schedule(event("Preempt", NOT_BEFORE, Resources=resources))
    api.refused = refused
    async with on_azure(azure, api, acknowledge=acknowledge):
        await until(lambda: bool(api.taints()), "the node was tainted")
        await asked_more(azure)
        assert azure.started == []


async def test_an_acknowledgement_that_fails_is_a_log_line_and_nothing_else(
    azure: FakeAzure, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    azure.start_status = 500
    azure.schedule(event("Preempt", NOT_BEFORE))
    async with on_azure(azure, api) as agent:
        await until(lambda: bool(azure.started), "it was tried")
        await asked_more(azure)
        assert agent.ready
        api.add_pod("late")
        await until(lambda: bool(api.annotations("late")), "a late pod was told")
    assert azure.started == [EVENT]
    (said,) = [e for e in events(capsys) if e["event"] == "acknowledgeFailed"]
    assert "POST /metadata/scheduledevents returned 500" in said["why"]
