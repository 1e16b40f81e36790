"""A stub of the clouds' price services, and credentials of nobody."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import botocore.session
import pytest

from tests.support.pricestub import PriceStub, price_stub


@pytest.fixture(scope="package", autouse=True)
def descriptions() -> Iterator[None]:
    """AWS's descriptions of its services, megabytes of JSON, are read once for all clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[PriceStub]:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with price_stub() as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        yield running
