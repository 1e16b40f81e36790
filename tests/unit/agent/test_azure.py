"""What Azure's Scheduled Events say, as tables; and their client against a real HTTP server on loopback."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest
from spottrain_operator.agent.findings import NOTHING, Finding, Findings, found
from spottrain_operator.agent.sources.azure import Azure, parse_events
from spottrain_operator.agent.sources.client import Client

from tests.support.azuremetadata import EVENT, VM, FakeAzure, event, fake_azure
from tests.unit.agent.bodies import GARBAGE, LISTS, RECORDS
from tests.unit.agent.fakes import DEADLINE, events, refusal, why

NOT_BEFORE = "Sat, 21 Nov 2026 10:02:00 GMT"


def document(*items: object) -> str:
    return json.dumps({"DocumentIncarnation": 3, "Events": list(items)})


def ending(kind: str, **changes: Any) -> Finding:
    values = {"id": EVENT} | changes
    return Finding(source=f"Azure scheduled event {kind}", action=kind, **values)


# --- bodies --------------------------------------------------------------------------------------------
PREEMPT, PLANNED = ending("Preempt", at=DEADLINE), {"at": DEADLINE, "lead": 120.0}
TIMELESS = ending("Preempt", after=10.0)
NEIGHBOUR = "aks-gpu-31337-vmss_3"
EVENTS: dict[str, tuple[dict[str, Any], Findings]] = {
    "preempt: at once": (event("Preempt", NOT_BEFORE), found(PREEMPT)),
    "an ISO time": (event("Preempt", "2026-11-21T10:02:00Z"), found(PREEMPT)),
    "begun: seconds": (event("Preempt", EventStatus="Started"), found(TIMELESS)),
    "begun, whatever its time says": (event("Preempt", NOT_BEFORE, EventStatus="Started"), found(TIMELESS)),
    "no time": (event("Preempt", ""), found(TIMELESS)),
    "a time that is none": (event("Preempt", "soon"), found(TIMELESS)),
    "a time that is null": (event("Preempt", NotBefore=None), found(TIMELESS)),
    "terminate": (event("Terminate", NOT_BEFORE), found(ending("Terminate", **PLANNED))),
    "redeploy": (event("Redeploy", NOT_BEFORE), found(ending("Redeploy", **PLANNED))),
    "reboot": (event("Reboot", NOT_BEFORE), found(ending("Reboot", **PLANNED))),
    "freeze: it pauses and goes on": (
        event("Freeze", NOT_BEFORE, DurationInSeconds=5),
        found(Finding(ends=False, source="Azure scheduled event Freeze", action="Freeze", id=EVENT)),
    ),
    "with a neighbour": (
        event("Reboot", NOT_BEFORE, Resources=[VM, NEIGHBOUR]),
        found(ending("Reboot", **PLANNED)),
    ),
    "Azure's names have no case": (event("Preempt", NOT_BEFORE, Resources=[VM.upper()]), found(PREEMPT)),
    "another VM": (event("Preempt", NOT_BEFORE, Resources=[NEIGHBOUR]), NOTHING),
    "no VM": (event("Preempt", NOT_BEFORE, Resources=[]), NOTHING),
    "completed": (event("Preempt", NOT_BEFORE, EventStatus="Completed"), NOTHING),
    "canceled": (event("Preempt", NOT_BEFORE, EventStatus="Canceled"), NOTHING),
    "as little as there can be": (
        {"EventType": "Preempt", "Resources": [VM]},
        found(ending("Preempt", id="", after=10.0)),
    ),
}


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_is_what_it_does_to_this_machine(name: str) -> None:
    item, answer = EVENTS[name]
    assert parse_events(document(item), VM) == answer


def test_no_events_are_nothing() -> None:
    assert parse_events(document(), VM) == NOTHING


@pytest.mark.parametrize(
    "bad",
    [
        3,
        None,
        "Preempt",
        [],
        {},
        event("Explode", NOT_BEFORE),
        event("Preempt", NOT_BEFORE, EventType=["Preempt"]),
        event("Preempt", NOT_BEFORE, EventStatus={}),
        event("Preempt", NOT_BEFORE, Resources=VM),
        event("Preempt", NOT_BEFORE, Resources=[VM, 3]),
        event("Preempt", NOT_BEFORE, Resources=None),
    ],
    ids=lambda bad: str(bad)[:60],
)
def test_an_event_that_cannot_be_read_is_said_and_hides_no_other(bad: object) -> None:
    answer = parse_events(document(bad, event("Preempt", NOT_BEFORE)), VM)
    assert isinstance(answer, Findings)
    assert answer.found == (ending("Preempt", at=DEADLINE),)
    assert answer.unclear and len(answer.unclear) < 400


@pytest.mark.parametrize("text", [*GARBAGE, *LISTS, *RECORDS, '{"DocumentIncarnation": 1, "Events": null}'])
def test_what_is_no_document_of_events_is_said(text: str) -> None:
    assert refusal(partial(parse_events, name=VM), text)


# --- client --------------------------------------------------------------------------------------------
@pytest.fixture
async def server() -> AsyncIterator[FakeAzure]:
    async with fake_azure() as server:
        yield server


@pytest.fixture
async def azure(server: FakeAzure) -> AsyncIterator[Azure]:
    async with aiohttp.ClientSession() as session:
        yield Azure(Client(session, endpoint=server.url, timeout=0.2), first_seconds=5.0, seconds=0.2)


async def read(azure: Azure) -> Findings:
    return await azure.watches[0].read()


async def test_an_event_of_this_vm_is_read(azure: Azure, server: FakeAzure) -> None:
    server.schedule(event("Preempt", NOT_BEFORE), event("Preempt", NOT_BEFORE, Resources=["other"]))
    assert await read(azure) == found(ending("Preempt", at=DEADLINE))


async def test_the_first_call_is_waited_for_longer_and_said_once(
    azure: Azure, server: FakeAzure, capsys: pytest.CaptureFixture[str]
) -> None:
    server.first_seconds = 0.5
    assert await read(azure) == NOTHING
    server.faults.hang = True
    assert await why(azure)
    assert [e["event"] for e in events(capsys)] == ["scheduledEventsFirstCall"]


async def test_a_vm_without_a_name_says_nothing_about_its_events(azure: Azure, server: FakeAzure) -> None:
    server.name = " "
    assert "not a VM's name" in await why(azure)
    assert server.gets == 0
    server.name = VM
    assert await read(azure) == NOTHING


@pytest.mark.parametrize("status", [400, 404, 410, 429, 500])
async def test_an_error_is_never_no_event(azure: Azure, server: FakeAzure, status: int) -> None:
    server.faults.status = status
    assert await why(azure) == f"GET /metadata/scheduledevents returned {status}"
