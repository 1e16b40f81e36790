"""With which account the operator logs in, and on which address it serves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import certifi
import kopf
import pytest
from kubernetes.aio.config import kube_config
from spottrain.contract import BIND_ADDRESS
from spottrain_operator.control.handlers import registry
from spottrain_operator.control.service import Service
from spottrain_operator.io.cluster import Cluster
from spottrain_operator.io.health import Health
from spottrain_operator.names import SERVICE_ACCOUNT_VARIABLE
from spottrain_operator.settings import Settings

from tests.support.environment import read

IN_POD = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
KUBECONFIG_SERVER = "https://127.0.0.1:7443"


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a service account, beside a kubeconfig; the process runs in a pod."""
    for name, value in IN_POD.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("of-the-account")
    shutil.copy(certifi.where(), folder / "ca.crt")
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "x",
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": KUBECONFIG_SERVER}}],
                "users": [{"name": "u", "user": {"token": "of-the-kubeconfig"}}],
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    monkeypatch.setenv(SERVICE_ACCOUNT_VARIABLE, str(folder))
    return folder


def kopfs_login() -> tuple[str | None, str | None]:
    """Server and token of kopf's watch of the jobs."""
    handlers: Mapping[str, Any] = {
        str(getattr(each.fn, "__name__", "")): each.fn
        for each in registry(Service(Settings()))._activities.get_all_handlers()
    }
    found = handlers["login"](settings=kopf.OperatorSettings())
    return found.server, found.token


async def clients_login() -> tuple[str, str]:
    """Server and token of the operator's own requests."""
    cluster = await Cluster.connect()
    try:
        configuration = cluster._api.configuration
        return configuration.host, configuration.api_key["BearerToken"].split()[-1]
    finally:
        await cluster.close()


async def test_the_folder_of_the_service_account_can_be_set_and_outranks_a_kubeconfig(account: Path) -> None:
    found = ("https://[fd00::1]:6443", "of-the-account")
    assert kopfs_login() == found
    assert await clients_login() == found


async def test_a_new_token_in_the_folder_is_used_at_the_next_login(account: Path) -> None:
    kopfs_login()
    (account / "token").write_text("renewed\n")
    assert kopfs_login()[1] == "renewed"


async def test_in_a_pod_without_an_account_the_kubeconfig_is_used(account: Path) -> None:
    shutil.rmtree(account)
    found = (KUBECONFIG_SERVER, "of-the-kubeconfig")
    assert kopfs_login() == found
    assert await clients_login() == found


async def test_outside_a_pod_the_kubeconfig_is_used(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in IN_POD:
        monkeypatch.delenv(name)
    found = (KUBECONFIG_SERVER, "of-the-kubeconfig")
    assert kopfs_login() == found
    assert await clients_login() == found


async def test_two_operators_serve_on_the_same_port_of_different_addresses() -> None:
    port, runners = 0, []
    for ready, address in ((True, "127.64.0.1"), (False, "127.64.0.2")):
        host = read(Settings, {BIND_ADDRESS: address}).bind_address
        health = Health(ready=lambda ready=ready: ready)  # type: ignore[misc]
        runners.append(await health.start(port, host))
        port = runners[-1].addresses[0][1]
    async with aiohttp.ClientSession() as session:
        for address, ready in (("127.64.0.1", True), ("127.64.0.2", False)):
            async with session.get(f"http://{address}:{port}/readyz") as reply:
                assert (reply.status == 200) == ready
    for runner in runners:
        await runner.cleanup()


def test_an_address_that_is_none_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=f"{BIND_ADDRESS}='here' must be one IP address of this pod"):
        read(Settings, {BIND_ADDRESS: "here"})
