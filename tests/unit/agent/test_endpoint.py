"""The API server of a process' pod, for agent, operator and price CronJob."""

from __future__ import annotations

import shutil
from pathlib import Path

import certifi
import pytest
from spottrain_operator.environment import Endpoint, NotInPod
from spottrain_operator.names import SERVICE_ACCOUNT_VARIABLE


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a service account, in a pod whose API server has an address of IPv6."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    monkeypatch.setenv(SERVICE_ACCOUNT_VARIABLE, str(tmp_path))
    shutil.copy(certifi.where(), tmp_path / "ca.crt")
    (tmp_path / "token").write_text("first\n")
    return tmp_path


def test_the_token_and_the_authority_are_read_from_the_accounts_folder(account: Path) -> None:
    endpoint = Endpoint.in_pod()
    assert (endpoint.url, endpoint.token()) == ("https://[fd00::1]:6443", "first")
    assert endpoint.tls is not None and endpoint.tls is endpoint.tls
    (account / "token").write_text("renewed")
    assert endpoint.token() == "renewed"


@pytest.mark.parametrize("missing", ["token", "ca.crt"])
def test_an_account_without_a_file_is_refused_by_its_path(account: Path, missing: str) -> None:
    (account / missing).unlink()
    with pytest.raises(NotInPod, match=f"{account / missing} does not exist"):
        Endpoint.in_pod()


def test_outside_a_pod_the_variables_are_named(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_PORT")
    with pytest.raises(NotInPod, match="KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set"):
        Endpoint.in_pod()
