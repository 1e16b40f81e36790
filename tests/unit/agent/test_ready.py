"""/readyz of the agent, asked as the kubelet asks it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator

import aiohttp
import pytest
from spottrain_operator.agent.ready import serving

from tests.unit.agent.fakes import events


@pytest.fixture
def port() -> Iterator[int]:
    """One that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    yield number


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.text()


async def test_ready_is_200_and_not_ready_503_with_the_sentence(port: int) -> None:
    state = (False, "no answer: déjà vu")
    async with serving(port, lambda: state) as served:
        assert served == port
        assert await get(f"http://127.0.0.1:{port}/readyz") == (503, f"{state[1]}\n")
        state = (True, "watching AWS")
        assert await get(f"http://127.0.0.1:{port}/readyz?x=1") == (200, "watching AWS\n")


async def test_nothing_else_is_answered(port: int) -> None:
    async with serving(port, lambda: (True, "")):
        assert (await get(f"http://127.0.0.1:{port}/metrics"))[0] == 404
        async with aiohttp.ClientSession() as session:
            async with session.post(f"http://127.0.0.1:{port}/readyz") as reply:
                assert reply.status == 404
            async with session.head(f"http://127.0.0.1:{port}/readyz") as reply:
                assert (reply.status, await reply.text()) == (200, "")


@pytest.mark.parametrize("request_", [b"\r\n", b"nonsense\r\n", b"\xff\xfe\r\n", b"x" * 200_000, b""])
async def test_what_is_no_request_does_no_harm(port: int, request_: bytes) -> None:
    async with serving(port, lambda: (True, "watching AWS")):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_)
        writer.close()
        assert (await get(f"http://127.0.0.1:{port}/readyz"))[0] == 200


async def test_a_port_that_is_taken_is_said_and_the_agent_goes_on(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        async with serving(port, lambda: (True, "")) as served:
            assert served == 0
    (said,) = events(capsys)
    assert (said["event"], said["port"]) == ("readyPortTaken", port)
    assert "set agent.readyPort to a port that is free on the nodes" in json.dumps(said)


async def test_no_port_is_wished_for_and_none_served() -> None:
    async with serving(0, lambda: (True, "")) as served:
        assert served == 0
