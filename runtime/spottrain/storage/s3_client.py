"""The SDK's clients of one bucket: three, as HEAD, bulk and the rest differ in patience. Made by `s3.py`."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from spottrain.errors import ConfigurationError

POOL: Final = 32
"""Connections that a client keeps."""
CA_VARIABLES: Final = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
"""In the order in which botocore reads them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clients:
    quick: Any
    """HEAD: one try and short time-outs, because `owner.py` resolves what a lost reply leaves open."""
    steady: Any
    """Retried by `s3.py`, with all it does not do in bulk."""
    bulk: Any
    """Bodies in parallel: retried by us, so that a cancelled upload sits in no wait of the SDK; a part is
    not hashed once more for the signature, which covers its SHA-256 in a header."""
    endpoint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """How to get to the server. Time-outs are seconds without a byte."""

    endpoint: str | None
    path_style: bool | None
    head_timeout: float
    timeout: float


def clients(reach: Connection, place: str) -> Clients:
    """Credentials and region come from the SDK's standard chain, web identity included."""
    try:
        session = Session()
        _check_authorities(session, reach.endpoint)
        steady = _client(session, reach, reach.timeout)
        return Clients(
            quick=_client(session, reach, reach.head_timeout),
            steady=steady,
            bulk=_client(session, reach, reach.timeout, bulk=True),
            endpoint=str(steady.meta.endpoint_url),
        )
    except (BotoCoreError, ValueError) as error:  # unknown profile or region, a URL that is none
        raise ConfigurationError(
            f"no client for {place} at {reach.endpoint or 'AWS'}: {error}; check the endpoint "
            "and the AWS_... variables"
        ) from error


def _client(session: Session, reach: Connection, timeout: float, *, bulk: bool = False) -> Any:
    path_style = bool(reach.endpoint) if reach.path_style is None else reach.path_style
    style = "path" if path_style else ("auto" if reach.path_style is None else "virtual")
    s3: dict[str, Any] = {"addressing_style": style}
    extra: dict[str, Any] = {}
    if bulk:
        s3["payload_signing_enabled"] = False
        extra["response_checksum_validation"] = "when_required"  # the manifest's digests cover it
    config = Config(
        connect_timeout=min(timeout, 5.0),
        read_timeout=timeout,
        retries={"mode": "standard", "total_max_attempts": 1},  # who asks again does so in its own way
        max_pool_connections=POOL,
        tcp_keepalive=True,
        s3=s3,
        **extra,
    )
    return session.client("s3", endpoint_url=reach.endpoint, config=config)


def _check_authorities(session: Session, endpoint: str | None) -> None:
    """A CA bundle that cannot be used; botocore would only find out in each request, and call it a network
    fault."""
    if endpoint and not endpoint.startswith("https:"):
        return
    configured = session._session.get_config_variable("ca_bundle")  # boto3 passes on no way to ask
    bundle = configured or os.environ.get(CA_VARIABLES[1])
    if not bundle:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=Path(bundle))
    except OSError as error:  # ssl.SSLError too: no certificate in it
        raise ConfigurationError(
            f"the CA bundle {bundle} ({' or '.join(CA_VARIABLES)}) cannot be used: "
            f"{error.strerror or error}; mount a PEM file with the CA of {endpoint or 'AWS'} there"
        ) from error
