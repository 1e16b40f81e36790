"""Credentials whose issuer does not respond yet are waited for; one that says no is believed.

The agents are stubs on loopback, with the answers that their documentation gives; the S3 server is real.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.auth import exceptions
from google.auth.compute_engine import _metadata
from spottrain.errors import ConfigurationError, StoreDenied, StoreUnavailable
from spottrain.storage import gcs, s3_client
from spottrain.storage.open import open_store
from spottrain.storage.outage import Outage, patient_store
from spottrain.storage.s3 import S3Store

from tests.support import s3server
from tests.support.ports import free_port
from tests.support.s3server import S3Server

auth: Any = exceptions  # it has no types
KEYS = {
    "AccessKeyId": s3server.ACCESS_KEY,
    "SecretAccessKey": s3server.SECRET_KEY,
    "Token": "",
    "Expiration": "2100-01-01T00:00:00Z",
    "Code": "Success",
}


class Agent:
    """Issues credentials at a port where nobody listens until `start`."""

    def __init__(self) -> None:
        self.port = free_port()
        self.status, self.body = 200, json.dumps(KEYS)
        self.http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        agent = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = "role" if self.path.endswith("/security-credentials/") else agent.body
                self.answer(agent.status, body)

            def do_PUT(self) -> None:  # the token of IMDSv2
                self.answer(200, "token")

            def answer(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def end(self) -> None:
        if self.http is not None:
            self.http.shutdown()
            self.http.server_close()


@pytest.fixture
def agent(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """A pod without keys. The SDK's own tries are made at once."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0)
    it = Agent()
    yield it
    it.end()


PLACES = {"agent": "AWS_CONTAINER_CREDENTIALS_FULL_URI", "metadata": "AWS_EC2_METADATA_SERVICE_ENDPOINT"}


@pytest.mark.parametrize("kind", PLACES)
def test_an_issuer_that_is_not_up_yet_is_waited_for(
    agent: Agent, server: S3Server, bucket: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACES[kind], f"{agent.url}/credentials" if kind == "agent" else agent.url)
    direct = S3Store(bucket, "p", endpoint=server.endpoint, tries=1)
    with pytest.raises(StoreUnavailable, match=r"no credentials for .* yet"):
        direct.probe()
    outage = Outage(sleep=lambda seconds: agent.start() if agent.http is None else None)
    outage.patient = True
    patient_store(direct, outage).probe()
    assert direct.list("") == []


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, "no association", StoreDenied),
        (400, "{}", StoreDenied),
        (429, "slower", StoreUnavailable),
        (500, "not ready", StoreUnavailable),
        (200, "{}", StoreUnavailable),
        (200, "<html>", StoreUnavailable),
        (200, json.dumps(KEYS | {"Expiration": "2001-01-01T00:00:00Z"}), StoreUnavailable),
    ],
)
def test_what_an_agent_answers_is_told_from_its_silence(
    agent: Agent,
    server: S3Server,
    bucket: str,
    status: int,
    body: str,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent.start()
    agent.status, agent.body = status, body
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{agent.url}/credentials")
    with pytest.raises(error, match="no credentials"):
        S3Store(bucket, "p", endpoint=server.endpoint, tries=1).get("HEAD")


def test_an_agent_s_token_file_that_is_not_there_yet_is_waited_for(
    agent: Agent, server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.start()
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{agent.url}/credentials")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    it = S3Store(bucket, "p", endpoint=server.endpoint, tries=1)
    with pytest.raises(StoreUnavailable, match=f"{tmp_path}/token"):
        it.get("HEAD")
    (tmp_path / "token").write_text("jwt")
    assert it.get("HEAD") is None


def test_an_agent_at_an_address_that_is_not_allowed_is_a_bad_configuration(
    agent: Agent, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://example.com/credentials")
    with pytest.raises(ConfigurationError, match="Unsupported host"):
        S3Store(bucket, "p", endpoint="http://127.0.0.1:9", tries=1).get("HEAD")


def test_metadata_is_expected_where_it_is_named_and_on_a_machine_of_amazon(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client, "METADATA", agent.url)
    (tmp_path / "bios_version").write_text("4.11.amazon\n")
    silent = s3_client.silent_metadata
    assert silent({}, tmp_path) == agent.url and not silent({}, tmp_path / "other")
    assert not silent({"AWS_EC2_METADATA_DISABLED": "True"}, tmp_path)
    agent.start()
    assert not silent({}, tmp_path), "it responds, and knows no role"


# --- Google -------------------------------------------------------------------------------------------
def test_a_metadata_server_of_google_that_is_not_up_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_metadata, "_METADATA_DETECT_RETRIES", 1)
    monkeypatch.setattr(_metadata, "_get_metadata_ip_root", lambda mtls: f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1")
    it = open_store("gs://bucket/p")
    with pytest.raises(StoreUnavailable, match=r"no credentials for gs://bucket/p.* yet"):
        it.stat("k")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (auth.RefreshError("no such account"), StoreDenied),
        (auth.RefreshError("busy", retryable=True), StoreUnavailable),
        (caused(auth.RefreshError("metadata"), auth.TransportError("refused")), StoreUnavailable),
        (auth.TransportError("refused"), StoreUnavailable),
        (auth.DefaultCredentialsError("none found"), StoreDenied),
    ],
)
def test_credentials_of_google_that_may_come_are_told_from_those_that_will_not(
    error: Exception, kind: type[Exception]
) -> None:
    assert type(gcs._translated(error, "gs://b/k")) is kind
