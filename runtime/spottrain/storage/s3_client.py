"""boto3 clients of one bucket: HEAD, bulk and other requests need different timeouts and retries."""

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
from spottrain.storage.s3_credentials import LateCredentials

POOL: Final = 32
"""Connections that a client keeps."""
CA_VARIABLES: Final = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
"""In the order of botocore's precedence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clients:
    quick: Any
    """HEAD: one try and short timeouts. `checkpoint.head` handles a lost response itself."""
    steady: Any
    """All other requests but bulk. `s3.py` retries them."""
    bulk: Any
    """Bodies in parallel. Retried outside the SDK, so that a cancelled upload does not wait inside it. The
    SHA-256 header covers a part's body, so the body is not hashed again for the signature."""
    endpoint: str


def clients(
    place: str, *, endpoint: str | None, path_style: bool | None, head_timeout: float, timeout: float
) -> Clients:
    """Creates the clients. Credentials (`s3_credentials`) and region: the SDK's standard chain.

    Timeouts are seconds without a byte.
    """
    style = {None: "path" if endpoint else "auto", True: "path", False: "virtual"}[path_style]
    try:
        session = Session()
        core = session._session  # boto3 has no public way to give it credentials that are looked up later
        provider = core.get_component("credential_provider")
        core._credentials = LateCredentials(provider.load_credentials)
        _check_authorities(session, endpoint)
        steady = _client(session, endpoint, style, timeout)
        return Clients(
            quick=_client(session, endpoint, style, head_timeout),
            steady=steady,
            bulk=_client(session, endpoint, style, timeout, bulk=True),
            endpoint=str(steady.meta.endpoint_url),
        )
    except (BotoCoreError, ValueError) as error:  # unknown profile or region, or an invalid URL
        raise ConfigurationError(
            f"cannot make an S3 client for {place} at {endpoint or 'AWS'}: {error}; check the endpoint and "
            "the AWS_... variables"
        ) from error


def _client(session: Session, endpoint: str | None, style: str, timeout: float, *, bulk: bool = False) -> Any:
    s3: dict[str, Any] = {"addressing_style": style}
    extra: dict[str, Any] = {}
    if bulk:
        s3["payload_signing_enabled"] = False
        extra["response_checksum_validation"] = "when_required"  # the manifest's digests cover it
    config = Config(
        connect_timeout=min(timeout, 5.0),
        read_timeout=timeout,
        retries={"mode": "standard", "total_max_attempts": 1},  # callers retry in their own way
        max_pool_connections=POOL,
        tcp_keepalive=True,
        s3=s3,
        **extra,
    )
    return session.client("s3", endpoint_url=endpoint, config=config)


def _check_authorities(session: Session, endpoint: str | None) -> None:
    """Raises ConfigurationError if the CA bundle is unusable; botocore would report a network error."""
    if endpoint and not endpoint.startswith("https:"):
        return
    configured = session._session.get_config_variable("ca_bundle")  # boto3 has no public way to read it
    bundle = configured or os.environ.get(CA_VARIABLES[1])
    if not bundle:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=Path(bundle))
    except OSError as error:  # includes ssl.SSLError: the file holds no certificate
        raise ConfigurationError(
            f"the CA bundle {bundle} ({' or '.join(CA_VARIABLES)}) cannot be used: "
            f"{error.strerror or error}; mount a PEM file with the CA of {endpoint or 'AWS'} there"
        ) from error
