"""The agent as a process: settings, SIGTERM, /readyz, and the timer that ends it when its loop stalls."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from spottrain_operator.agent.ready import serving
from spottrain_operator.agent.settings import AgentEnv, AgentSettings

from tests.support.imds import fake_imds
from tests.unit.agent.fakes import events, fake_api

ROOT = Path(__file__).parents[3]
SERVE = """
import asyncio, sys, time
from pathlib import Path
from spottrain_operator.agent import __main__ as agent
from spottrain_operator.agent.api import Endpoint
from spottrain_operator.agent.settings import AgentSettings

stalls, imds, api, token, port = sys.argv[1:]
if stalls == "yes":
    agent.STALLED_SECONDS = 0.2
    agent.log = lambda event, **fields: asyncio.get_running_loop().call_later(0.05, time.sleep, 60)
settings = AgentSettings(node="n1", metadata_endpoint=imds, poll_seconds=0.01, ready_port=int(port))
asyncio.run(agent.serve(settings, Endpoint(url=api, token_file=Path(token))))
"""


def test_settings_have_defaults_for_all_but_the_node() -> None:
    assert AgentSettings.from_env({str(AgentEnv.NODE): "n1"}) == AgentSettings(node="n1")


def test_settings_are_read_from_the_environment() -> None:
    environ: dict[str, str] = {
        AgentEnv.NODE: "n1",
        AgentEnv.PLATFORM: "GKE",
        AgentEnv.METADATA_ENDPOINT: "http://[fd00:ec2::254]",
        AgentEnv.NAMESPACES: "ml, research,",
        AgentEnv.POLL_SECONDS: "5",
        AgentEnv.ACKNOWLEDGE: "false",
        AgentEnv.READY_PORT: "0",
    }
    assert AgentSettings.from_env(environ) == AgentSettings(
        node="n1",
        platform="GKE",
        metadata_endpoint="http://[fd00:ec2::254]",
        namespaces=("ml", "research"),
        poll_seconds=5.0,
        acknowledge=False,
        ready_port=0,
    )


WRONG_SETTINGS: tuple[tuple[AgentEnv, str], ...] = (
    (AgentEnv.NODE, ""),
    *((AgentEnv.POLL_SECONDS, text) for text in ("0", "-1", "61", "often", "nan")),
    (AgentEnv.PLATFORM, "aws"),
    (AgentEnv.ACKNOWLEDGE, "yes"),
    *((AgentEnv.READY_PORT, text) for text in ("http", "65536", "-1", "²")),
)


@pytest.mark.parametrize(("name", "text"), WRONG_SETTINGS)
def test_a_setting_that_makes_no_sense_is_refused_by_the_name_of_its_variable(
    name: AgentEnv, text: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        AgentSettings.from_env({AgentEnv.NODE: "n1", name: text})
    with pytest.raises(ValueError, match=f"^{AgentEnv.NODE} "):
        AgentSettings.from_env({})


def test_outside_a_cluster_it_ends_with_a_sentence() -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KUBERNETES_")}
    done = subprocess.run(
        [sys.executable, "-m", "spottrain_operator.agent"],
        env=environ | {AgentEnv.NODE: "n1"},
        cwd=ROOT / "operator",
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("the notice agent cannot start")


async def _run(stalls: str, token: Path, port: int = 0) -> tuple[int, str]:
    """Runs the agent to its end, which is SIGTERM once its port has told that it watches."""
    token.write_text("t")
    async with fake_imds() as imds, fake_api() as api, asyncio.timeout(90):
        imds.token_status = 503 if port else 200
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SERVE, stalls, imds.url, api.url, str(token), str(port)),
            stdout=DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            if port:
                await _told(port, 503, "no cloud's metadata service answers on this node")
                imds.token_status = 200
                await _told(port, 200, "watching AWS spot/instance-action")
                process.send_signal(signal.SIGTERM)
            _, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode or 0, errors.decode()


async def _told(port: int, status: int, words: str) -> None:
    while True:
        await asyncio.sleep(0.05)
        with suppress(aiohttp.ClientError):
            found = await get(f"http://127.0.0.1:{port}/readyz")
            if found[0] == status and words in found[1]:
                return


async def test_readyz_tells_whether_a_metadata_service_answers_and_sigterm_ends_it_cleanly(
    tmp_path: Path, port: int
) -> None:
    assert await _run("no", tmp_path / "token", port) == (0, "")


async def test_a_loop_that_stands_still_ends_the_process_and_shows_where(tmp_path: Path) -> None:
    code, errors = await _run("yes", tmp_path / "token")
    assert code == 1
    assert "Timeout (" in errors and "File " in errors


# --- /readyz --------------------------------------------------------------------------------------------
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
