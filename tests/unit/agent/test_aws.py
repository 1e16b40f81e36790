"""What AWS's metadata says, as tables; and its client against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest
from spottrain_operator.agent.findings import NOTHING, Finding, Findings, found
from spottrain_operator.agent.sources.aws import (
    Aws,
    parse_instance_action,
    parse_maintenance,
    parse_rebalance,
)
from spottrain_operator.agent.sources.client import LARGEST, Client

from tests.support.imds import ACTION, FakeImds, fake_imds
from tests.unit.agent.bodies import GARBAGE, LISTS, RECORDS
from tests.unit.agent.fakes import DEADLINE, refusal, why

SPOT = "AWS spot/instance-action"
PLANNED = "AWS events/maintenance/scheduled"
TERMINATE = Finding(source=SPOT, action="terminate", at=DEADLINE)
EVENT = {
    "NotBefore": "21 Nov 2026 10:02:00 GMT",
    "Code": "system-reboot",
    "Description": "scheduled reboot",
    "EventId": "instance-event-0d59937288b749b32",
    "NotAfter": "21 Nov 2026 10:17:23 GMT",
    "State": "active",
}
REBOOT = Finding(source=PLANNED, action="system-reboot", id=EVENT["EventId"], at=DEADLINE, lead=120.0)


# --- bodies --------------------------------------------------------------------------------------------
def spot(action: str, **more: Any) -> Findings:
    return found(Finding(source=SPOT, action=action, **more))


TIME = "2026-11-21T10:02:00Z"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
ACTIONS: dict[str, tuple[dict[str, Any], Findings]] = {
    "terminate": ({"action": "terminate", "time": TIME}, found(TERMINATE)),
    "stop": ({"action": "stop", "time": TIME}, spot("stop", at=DEADLINE)),
    "hibernate: at once, whatever the time says": (
        {"action": "hibernate", "time": TIME},
        spot("hibernate", id=TIME, after=0.0),
    ),
    "no zone: UTC": ({"action": "terminate", "time": "2026-11-21T10:02:00"}, found(TERMINATE)),
    "a time in the past, and a field more": (
        {"action": "terminate", "time": "2020-01-01T00:00:00Z", "more": [1]},
        spot("terminate", at=LONG_AGO),
    ),
    "no time: an end that may have begun": ({"action": "terminate"}, spot("terminate", after=10.0)),
    "a time that is none": ({"action": "stop", "time": 3}, spot("stop", after=10.0)),
    "an action of days to come, with its time": (
        {"action": "reclaim", "time": TIME},
        spot("reclaim", at=DEADLINE),
    ),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_an_instance_action_is_an_end(name: str) -> None:
    body, answer = ACTIONS[name]
    assert parse_instance_action(json.dumps(body) + "\n") == answer


@pytest.mark.parametrize(
    "text",
    [*GARBAGE, *LISTS, *RECORDS, '{"action": 3, "time": "2026-11-21T10:02:00Z"}', '{"action": "reclaim"}'],
)
def test_what_is_no_instance_action_is_not_taken_for_none(text: str) -> None:
    said = refusal(parse_instance_action, text)
    assert said.startswith("AWS spot/instance-action returned text that cannot be parsed: ")


def test_a_recommendation_is_advice_of_its_time() -> None:
    assert parse_rebalance('{"noticeTime": "2026-11-21T10:02:00Z"}') == found(
        Finding(ends=False, source="AWS events/recommendations/rebalance", action="rebalance", at=DEADLINE)
    )


@pytest.mark.parametrize("text", [*GARBAGE, *LISTS, *RECORDS, '{"noticeTime": null}', '{"noticeTime":"x"}'])
def test_what_is_no_recommendation_is_said(text: str) -> None:
    assert refusal(parse_rebalance, text)


MAINTENANCES: dict[str, tuple[list[object], Findings]] = {
    **{
        code: ([EVENT | {"Code": code}], found(replace(REBOOT, action=code)))
        for code in ("system-reboot", "instance-reboot", "instance-stop", "instance-retirement")
    },
    "none": ([], NOTHING),
    "over": ([EVENT | {"State": "completed"}, EVENT | {"State": "canceled"}], NOTHING),
    "the network is touched: the instance goes on": (
        [EVENT | {"Code": "system-maintenance"}],
        found(Finding(ends=False, source=PLANNED, action="system-maintenance", id=EVENT["EventId"])),
    ),
    "no state, no id": (
        [{"Code": "system-reboot", "NotBefore": "21 Nov 2026 10:02:00 GMT"}],
        found(replace(REBOOT, id="")),
    ),
}


@pytest.mark.parametrize("name", MAINTENANCES)
def test_a_list_of_maintenance_is_read(name: str) -> None:
    events, answer = MAINTENANCES[name]
    assert parse_maintenance(json.dumps(events)) == answer


@pytest.mark.parametrize(
    "bad",
    [
        3,
        None,
        "system-reboot",
        [],
        {},
        EVENT | {"NotBefore": ""},
        EVENT | {"NotBefore": 3},
        EVENT | {"Code": "instance-teleport"},
        EVENT | {"Code": ["system-reboot"]},
        EVENT | {"State": {}},
    ],
    ids=str,
)
def test_an_event_that_cannot_be_read_is_said_and_hides_no_other(bad: object) -> None:
    answer = parse_maintenance(json.dumps([bad, EVENT]))
    assert isinstance(answer, Findings)
    assert answer.found == (REBOOT,)
    assert answer.unclear and len(answer.unclear) < 400


@pytest.mark.parametrize("text", [*GARBAGE, *RECORDS])
def test_what_is_no_list_of_maintenance_is_said(text: str) -> None:
    assert refusal(parse_maintenance, text)


# --- client --------------------------------------------------------------------------------------------
@pytest.fixture
async def aws(imds: FakeImds) -> AsyncIterator[Aws]:
    async with aiohttp.ClientSession() as session:
        yield Aws(Client(session, endpoint=imds.url + "/", timeout=0.2))


async def read(aws: Aws) -> Findings:
    """Whether an interruption is announced."""
    return await aws.watches[0].read()


async def test_a_404_is_nothing(aws: Aws) -> None:
    assert [await watch.read() for watch in aws.watches] == [NOTHING] * 3


async def test_each_watch_reads_its_own_path(aws: Aws, imds: FakeImds) -> None:
    imds.announce("terminate", "2026-11-21T10:02:00Z")
    imds.recommend("2026-11-21T09:58:00Z")
    imds.schedule("system-reboot", "21 Nov 2026 10:02:00 GMT")
    advice = Finding(
        ends=False,
        source="AWS events/recommendations/rebalance",
        action="rebalance",
        at=DEADLINE - timedelta(minutes=4),
    )
    assert [await watch.read() for watch in aws.watches] == [found(TERMINATE), found(advice), found(REBOOT)]


async def test_one_token_serves_many_reads(aws: Aws, imds: FakeImds) -> None:
    for watch in aws.watches * 2:
        await watch.read()
    assert (imds.issued, len(imds.asked)) == (1, 6)


async def test_a_token_that_the_service_has_forgotten_is_renewed(aws: Aws, imds: FakeImds) -> None:
    await read(aws)
    imds.forget_tokens()
    assert await asyncio.gather(*(watch.read() for watch in aws.watches)) == [NOTHING] * 3
    issued = imds.issued
    await read(aws)
    assert imds.issued == issued


@pytest.mark.parametrize("status", [301, 400, 403, 429, 500, 503])
async def test_an_error_is_never_no_notice(aws: Aws, imds: FakeImds, status: int) -> None:
    imds.faults.status = status
    assert str(status) in await why(aws)


@pytest.mark.parametrize("status", [403, 404, 500])
async def test_a_service_that_gives_no_token_says_nothing_about_a_notice(
    aws: Aws, imds: FakeImds, status: int
) -> None:
    imds.token_status = status
    assert await why(aws) == f"PUT /latest/api/token returned {status}"
    assert imds.gets == 0


async def test_a_token_that_does_not_come_names_the_hop_limit(aws: Aws, imds: FakeImds) -> None:
    imds.hop_limit = 1
    assert await why(aws) == (
        "PUT /latest/api/token timed out after 0.2 s; an agent that is not on the node's network "
        "(hostNetwork) gets no token unless the instance's HttpPutResponseHopLimit is 2 or more"
    )


async def test_a_redirect_is_not_followed(aws: Aws, imds: FakeImds) -> None:
    imds.faults.status, imds.faults.location = 302, f"{imds.url}/elsewhere"
    assert await why(aws)
    assert imds.asked == [ACTION]


async def test_a_service_that_accepts_no_token_is_asked_twice_and_no_more(aws: Aws, imds: FakeImds) -> None:
    await read(aws)
    imds.faults.status = 401
    assert await why(aws)
    assert imds.gets == 3


@pytest.mark.parametrize("fault", ["hang", "reset", "truncate"])
async def test_a_service_that_fails_is_given_up_and_heard_again(aws: Aws, imds: FakeImds, fault: str) -> None:
    setattr(imds.faults, fault, True)
    assert "/latest/meta-data/spot/instance-action" in await why(aws)
    imds.faults.clear()
    assert await read(aws) == NOTHING


async def test_an_answer_without_end_is_not_read_to_its_end(aws: Aws, imds: FakeImds) -> None:
    imds.bodies[ACTION] = '{"action":"terminate","time":"' + "x" * LARGEST
    assert f"longer than {LARGEST} bytes" in await why(aws)


async def test_a_service_that_is_not_there_is_an_error() -> None:
    async with fake_imds() as gone:
        url = gone.url
    async with aiohttp.ClientSession() as session:
        assert await why(Aws(Client(session, endpoint=url)))
