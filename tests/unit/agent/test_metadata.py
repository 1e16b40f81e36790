"""The metadata client against a real HTTP server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import aiohttp
import pytest
from spottrain_operator.agent.metadata import Metadata
from spottrain_operator.agent.plan import InstanceAction, NoNotice, Unreadable

from tests.support.imds import FakeImds, fake_imds
from tests.unit.agent.fakes import DEADLINE


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def imds() -> AsyncIterator[FakeImds]:
    async with fake_imds() as server:
        yield server


@pytest.fixture
def clock() -> Iterator[Clock]:
    yield Clock()


@pytest.fixture
async def metadata(imds: FakeImds, clock: Clock) -> AsyncIterator[Metadata]:
    async with aiohttp.ClientSession() as session:
        yield Metadata(session, endpoint=imds.url + "/", timeout=0.2, clock=clock)


async def test_a_404_is_no_notice(metadata: Metadata) -> None:
    assert await metadata.read() == NoNotice()


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
async def test_a_notice_is_read(metadata: Metadata, imds: FakeImds, action: str) -> None:
    imds.announce(action, "2026-11-21T10:02:00Z")
    assert await metadata.read() == InstanceAction(action=action, time=DEADLINE)


async def test_a_time_without_a_zone_is_utc(metadata: Metadata, imds: FakeImds) -> None:
    imds.announce("terminate", "2026-11-21T10:02:00")
    assert await metadata.read() == InstanceAction(action="terminate", time=DEADLINE)


async def test_one_token_serves_many_reads(metadata: Metadata, imds: FakeImds) -> None:
    for _ in range(5):
        await metadata.read()
    assert (imds.issued, imds.gets) == (1, 5)


async def test_a_token_that_the_service_has_forgotten_is_renewed_within_the_same_read(
    metadata: Metadata, imds: FakeImds
) -> None:
    await metadata.read()
    imds.forget_tokens()
    assert await metadata.read() == NoNotice()
    assert imds.issued == 2


async def test_a_token_is_renewed_before_its_life_is_over(
    metadata: Metadata, imds: FakeImds, clock: Clock
) -> None:
    await metadata.read()
    clock.now = 21600 / 2
    await metadata.read()
    assert (imds.issued, imds.gets) == (2, 2)


@pytest.mark.parametrize("status", [301, 400, 403, 429, 500, 503])
async def test_an_error_is_never_no_notice(metadata: Metadata, imds: FakeImds, status: int) -> None:
    imds.status = status
    answer = await metadata.read()
    assert isinstance(answer, Unreadable) and str(status) in answer.why


@pytest.mark.parametrize("status", [403, 404, 500])
async def test_a_service_that_gives_no_token_says_nothing_about_a_notice(
    metadata: Metadata, imds: FakeImds, status: int
) -> None:
    imds.token_status = status
    assert await metadata.read() == Unreadable(
        why=f"TokenRefused: PUT /latest/api/token was answered {status}"
    )
    assert imds.gets == 0


async def test_a_redirect_is_not_followed(metadata: Metadata, imds: FakeImds) -> None:
    imds.status, imds.location = 302, f"{imds.url}/elsewhere"
    assert isinstance(await metadata.read(), Unreadable)


async def test_a_service_that_accepts_no_token_is_asked_twice_and_no_more(
    metadata: Metadata, imds: FakeImds
) -> None:
    imds.status = 401
    assert isinstance(await metadata.read(), Unreadable)
    assert imds.gets == 2


@pytest.mark.parametrize(
    "text", ["", "no json", "[]", "{}", '{"action": "terminate"}', '{"action":"stop","time":3}']
)
async def test_a_notice_that_cannot_be_read_is_an_error(
    metadata: Metadata, imds: FakeImds, text: str
) -> None:
    imds.action = text
    assert isinstance(await metadata.read(), Unreadable)


async def test_a_service_that_hangs_is_given_up_and_heard_again(metadata: Metadata, imds: FakeImds) -> None:
    imds.hang = True
    assert isinstance(await metadata.read(), Unreadable)
    imds.hang = False
    assert await metadata.read() == NoNotice()


async def test_a_service_that_is_not_there_is_an_error() -> None:
    async with fake_imds() as gone:
        url = gone.url
    async with aiohttp.ClientSession() as session:
        assert isinstance(await Metadata(session, endpoint=url).read(), Unreadable)
