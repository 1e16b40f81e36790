"""The agent's settings for nodes that share a machine: the address of /readyz, the account's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import aiohttp
import certifi
import pytest
from spottrain.contract import BIND_ADDRESS
from spottrain_operator.agent.api import Endpoint
from spottrain_operator.agent.ready import serving
from spottrain_operator.agent.settings import AgentEnv, AgentSettings
from spottrain_operator.names import SERVICE_ACCOUNT_VARIABLE

from tests.support.ports import free_port


def settings(**env: str) -> AgentSettings:
    return AgentSettings.from_env({AgentEnv.NODE: "n1"} | env)


async def test_agents_of_two_nodes_serve_readyz_on_the_same_port() -> None:
    port, texts = free_port(), list[str]()
    first, second = (settings(**{BIND_ADDRESS: f"127.0.1.{n}"}).bind_address for n in (1, 2))
    async with (
        serving(port, lambda: (True, "first"), first),
        serving(port, lambda: (True, "second"), second),
        aiohttp.ClientSession() as session,
    ):
        for address in ("127.0.1.1", "127.0.1.2"):
            async with session.get(f"http://{address}:{port}/readyz") as reply:
                texts.append(await reply.text())
    assert texts == ["first\n", "second\n"]


def test_an_address_that_is_none_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=f"{BIND_ADDRESS}='0.0.0.0' must be one IP address"):
        settings(**{BIND_ADDRESS: "0.0.0.0"})


def test_the_token_and_the_authority_are_read_from_the_accounts_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    shutil.copy(certifi.where(), tmp_path / "ca.crt")
    endpoint = Endpoint.in_cluster(settings(**{SERVICE_ACCOUNT_VARIABLE: str(tmp_path)}).account)
    assert (endpoint.url, endpoint.token_file) == ("https://127.0.0.1:6443", tmp_path / "token")
    with pytest.raises(FileNotFoundError):
        Endpoint.in_cluster(tmp_path / "elsewhere")
