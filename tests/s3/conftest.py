"""One real S3 server for the level, and a fresh bucket, endpoint and proxy for each test."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.loaders import create_loader
from spottrain.storage.s3 import S3Store

from tests.support import s3server
from tests.support.faultproxy import FaultProxy
from tests.support.s3bodies import BODY_SECONDS, CHUNK
from tests.support.s3server import S3Server


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the server that stands for Google's are heavy: `make demo` has no such program."""
    for item in items:
        if "gcs" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.heavy)


@pytest.fixture(scope="session", autouse=True)
def parsed_models() -> Iterator[None]:
    """botocore's models of the S3 API are read once, not by each client: that is half of a client's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.session.create_loader", functools.cache(create_loader))
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3server.running(tmp_path_factory.mktemp("s3")) as it:
        yield it


@pytest.fixture
def bucket(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3server.credentials().items():
        monkeypatch.setenv(name, value)
    name = tmp_path.name.replace("_", "-").lower()[:50]
    server.make_bucket(name)
    return name


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.port).running(clients=2) as it:
        yield it


@pytest.fixture
def direct(server: S3Server, bucket: str) -> S3Store:
    """The same place without the proxy: to judge by."""
    return S3Store(bucket, "p", endpoint=server.endpoint, chunk_bytes=CHUNK)


@pytest.fixture
def patient(proxy: FaultProxy, bucket: str) -> S3Store:
    """The same place behind the proxy, with time for large bodies."""
    return S3Store(
        bucket,
        "p",
        endpoint=proxy.endpoint(),
        timeout=BODY_SECONDS,
        tries=3,
        chunk_bytes=CHUNK,
        connections=3,
        pause=lambda failures: 0.01,
    )
