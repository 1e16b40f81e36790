"""What Compute Engine's metadata says, as tables; its client against a server that holds questions open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import pytest
from spottrain_operator.agent.findings import NOTHING, Finding, Findings, found
from spottrain_operator.agent.sources.client import Client
from spottrain_operator.agent.sources.gcp import Gcp, parse_maintenance, parse_notice_seconds, parse_preempted

from tests.support.gcpmetadata import MAINTENANCE, NOTICE_SECONDS, PREEMPTED, FakeGcp, fake_gcp
from tests.unit.agent.bodies import GARBAGE, LISTS, RECORDS
from tests.unit.agent.fakes import events, refusal, until, why


def preempted(after: float = 25.0) -> Findings:
    return found(Finding(source="GCP instance/preempted", action="preempted", after=after))


# --- bodies --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["TRUE", "TRUE\n", "True"])
def test_true_is_an_end_after_the_warning_less_its_detection(text: str) -> None:
    assert parse_preempted(text, notice_seconds=30.0) == preempted()
    assert parse_preempted(text, notice_seconds=120.0) == preempted(after=115.0)


def test_false_is_nothing() -> None:
    assert parse_preempted("FALSE", notice_seconds=30.0) == NOTHING


EVENT = "GCP instance/maintenance-event"
MIGRATES = found(Finding(ends=False, source=EVENT, action="MIGRATE_ON_HOST_MAINTENANCE"))


@pytest.mark.parametrize("kind", ["TERMINATE", "SHUTDOWN"])
def test_a_maintenance_that_stops_the_machine_leaves_a_minute_less_its_detection(kind: str) -> None:
    action = f"{kind}_ON_HOST_MAINTENANCE"  # the second as older documentation calls it
    assert parse_maintenance(f"{action}\n") == found(Finding(source=EVENT, action=action, after=55.0))


def test_a_machine_that_moves_goes_on() -> None:
    assert parse_maintenance("MIGRATE_ON_HOST_MAINTENANCE") == MIGRATES
    assert parse_maintenance("NONE") == NOTHING


NEITHER = [case for case in GARBAGE if case.id != "a truth"]


@pytest.mark.parametrize("text", [*NEITHER, *LISTS, *RECORDS, "MAYBE", "TRUE FALSE", "TRU", "1"])
def test_any_other_word_is_said_and_taken_for_neither(text: str) -> None:
    assert refusal(partial(parse_preempted, notice_seconds=30.0), text)
    assert refusal(parse_maintenance, text)


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), ("120", 120.0), ("600\n", 600.0)])
def test_the_instance_may_say_how_much_notice_it_gets(text: str, seconds: float) -> None:
    assert parse_notice_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "120s", "29", "601", "-1", "nan", "inf", "1e999", "{}", "x" * 10_000])
def test_a_notice_that_makes_no_sense_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of seconds from 30 to 600") as refused:
        parse_notice_seconds(text)
    assert len(str(refused.value)) < 400


# --- client --------------------------------------------------------------------------------------------
@pytest.fixture
async def server() -> AsyncIterator[FakeGcp]:
    async with fake_gcp() as server:
        yield server


@pytest.fixture
async def gcp(server: FakeGcp) -> AsyncIterator[Gcp]:
    async with aiohttp.ClientSession() as session:
        yield Gcp(Client(session, endpoint=server.url, timeout=0.2), wait_seconds=0.1)


@pytest.fixture
async def patient(server: FakeGcp) -> AsyncIterator[Gcp]:
    """Its waits end by a change, or by a fault."""
    async with aiohttp.ClientSession() as session:
        yield Gcp(Client(session, endpoint=server.url, timeout=0.2), wait_seconds=60)


async def read(gcp: Gcp) -> Findings:
    return await gcp.watches[0].read()


async def awaited(gcp: Gcp, server: FakeGcp) -> asyncio.Task[Findings]:
    """A question that the server holds open."""
    await read(gcp)
    waiting = asyncio.create_task(read(gcp))
    await until(lambda: server.is_awaited(PREEMPTED), "the server holds the question open")
    return waiting


async def test_the_first_answer_is_at_once_and_the_next_when_the_time_is_up(
    gcp: Gcp, server: FakeGcp
) -> None:
    assert await read(gcp) == NOTHING
    assert await read(gcp) == NOTHING
    assert server.asked == [NOTICE_SECONDS, PREEMPTED, f"{PREEMPTED}?wait"]


async def test_a_change_ends_the_wait(patient: Gcp, server: FakeGcp) -> None:
    waiting = await awaited(patient, server)
    server.preempt()
    assert await waiting == preempted()


async def test_a_change_between_two_waits_is_not_missed(patient: Gcp, server: FakeGcp) -> None:
    await read(patient)
    server.preempt()
    assert await read(patient) == preempted()


async def test_both_values_are_awaited_side_by_side(patient: Gcp, server: FakeGcp) -> None:
    for watch in patient.watches:
        await watch.read()
    waits = [asyncio.ensure_future(watch.read()) for watch in patient.watches]
    await until(lambda: server.is_awaited(PREEMPTED) and server.is_awaited(MAINTENANCE), "both are awaited")
    server.put(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")
    assert await waits[1] == MIGRATES
    server.preempt()
    assert await waits[0] == preempted()


async def test_a_wait_that_is_cut_is_followed_by_a_question_at_once(patient: Gcp, server: FakeGcp) -> None:
    waiting = await awaited(patient, server)
    server.values[PREEMPTED] = "TRUE"  # nobody tells the one that waits
    server.cut()
    assert await waiting == preempted()


async def test_a_server_that_is_moved_is_an_error_and_then_asked_at_once(gcp: Gcp, server: FakeGcp) -> None:
    await read(gcp)
    server.faults.status = 503
    assert await why(gcp) == "GET /computeMetadata/v1/instance/preempted returned 503"
    server.faults.clear()
    server.asked.clear()
    assert await read(gcp) == NOTHING
    assert server.asked == [PREEMPTED]


@pytest.mark.parametrize("fault", ["hang", "reset", "truncate"])
async def test_a_server_that_fails_is_given_up_and_heard_again(gcp: Gcp, server: FakeGcp, fault: str) -> None:
    setattr(server.faults, fault, True)
    assert await why(gcp)
    server.faults.clear()
    server.preempt()
    assert await read(gcp) == preempted()


async def test_without_etags_it_is_asked_without_waiting(gcp: Gcp, server: FakeGcp) -> None:
    server.etags = False
    await read(gcp)
    await read(gcp)
    assert server.asked == [NOTICE_SECONDS, PREEMPTED, PREEMPTED]


async def test_an_answer_that_is_not_googles_is_none(gcp: Gcp, server: FakeGcp) -> None:
    server.faults.status = 200
    assert await why(gcp) == (
        "GET /computeMetadata/v1/instance/preempted was not answered by Google's metadata server"
    )


async def test_the_notice_that_the_instance_gets_is_asked_once(gcp: Gcp, server: FakeGcp) -> None:
    server.values[NOTICE_SECONDS] = "120"
    server.preempt()
    assert await read(gcp) == preempted(after=115.0)
    await read(gcp)
    assert server.asked.count(NOTICE_SECONDS) == 1


async def test_a_notice_that_makes_no_sense_is_said_and_the_usual_assumed(
    gcp: Gcp, server: FakeGcp, capsys: pytest.CaptureFixture[str]
) -> None:
    server.values[NOTICE_SECONDS] = "two minutes"
    server.preempt()
    assert await read(gcp) == preempted()
    (said,) = events(capsys)
    assert said["event"] == "noticeSecondsIgnored"
    assert "it must be a number of seconds from 30 to 600, not 'two minutes'; 30 is assumed" in said["why"]


async def test_a_notice_that_could_not_be_asked_is_asked_again(gcp: Gcp, server: FakeGcp) -> None:
    server.values[NOTICE_SECONDS] = "120"
    server.faults.status = 503
    await why(gcp)
    server.faults.clear()
    server.preempt()
    assert await read(gcp) == preempted(after=115.0)
