"""The agent as a process: settings, SIGTERM, its ready file, and the timer that ends a stalled loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from asyncio.subprocess import DEVNULL
from pathlib import Path

import pytest
from spottrain_operator.agent.settings import PREFIX, AgentSettings

from tests.support.environment import read
from tests.support.imds import fake_imds
from tests.unit.agent.fakes import fake_api

ROOT = Path(__file__).parents[3]
NODE = {f"{PREFIX}NODE": "n1"}
SERVE = """
import asyncio, sys, time
from pathlib import Path
from spottrain_operator.agent import __main__ as agent
from spottrain_operator.agent.settings import AgentSettings
from spottrain_operator.environment import Endpoint

stalls, imds, api, token, ready = sys.argv[1:]
if stalls == "yes":
    agent.STALLED_SECONDS = 0.2
    agent.log = lambda event, **fields: asyncio.get_running_loop().call_later(0.05, time.sleep, 60)
settings = AgentSettings(node="n1", metadata_endpoint=imds, poll_seconds=0.01, ready_file=ready)
asyncio.run(agent.serve(settings, Endpoint(url=api, token_file=Path(token))))
"""


def test_settings_have_defaults_for_all_but_the_node() -> None:
    assert read(AgentSettings, NODE) == AgentSettings(node="n1")


WRONG_SETTINGS = (
    ("NODE", ""),
    *(("POLL_SECONDS", text) for text in ("0", "-1", "61", "often", "nan")),
    ("PLATFORM", "aws"),
    ("READY_PORT", "19734"),
)


@pytest.mark.parametrize(("name", "text"), WRONG_SETTINGS)
def test_a_setting_that_makes_no_sense_is_refused_by_the_name_of_its_variable(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{PREFIX}{name}[ =]"):
        read(AgentSettings, NODE | {f"{PREFIX}{name}": text})
    with pytest.raises(ValueError, match=f"^{PREFIX}NODE is missing"):
        read(AgentSettings, {})


def test_outside_a_cluster_it_ends_with_a_sentence() -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KUBERNETES_")}
    done = subprocess.run(
        [sys.executable, "-m", "spottrain_operator.agent"],
        env=environ | NODE,
        cwd=ROOT / "operator",
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("the notice agent cannot start: KUBERNETES_SERVICE_HOST and ")


async def _run(stalls: str, folder: Path, *, told: bool) -> tuple[int, str]:
    """Runs the agent to its end, which is SIGTERM once its ready file has told that it watches."""
    token, ready = folder / "token", folder / "ready"
    token.write_text("t")
    ready.touch()
    async with fake_imds() as imds, fake_api() as api, asyncio.timeout(90):
        imds.token_status = 503 if told else 200
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SERVE, stalls, imds.url, api.url, str(token), str(ready)),
            stdout=DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            if told:
                await _until(ready, False)
                imds.token_status = 200
                await _until(ready, True)
                process.send_signal(signal.SIGTERM)
            _, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode or 0, errors.decode()


async def _until(file: Path, there: bool) -> None:
    while file.exists() != there:
        await asyncio.sleep(0.01)


async def test_its_ready_file_tells_whether_a_metadata_service_answers_and_sigterm_ends_it_cleanly(
    tmp_path: Path,
) -> None:
    """A file that an earlier container of the pod has left tells nothing."""
    assert await _run("no", tmp_path, told=True) == (0, "")


async def test_a_loop_that_stands_still_ends_the_process_and_shows_where(tmp_path: Path) -> None:
    code, errors = await _run("yes", tmp_path, told=False)
    assert code == 1
    assert "Timeout (" in errors and "File " in errors
