"""boto3 clients of one bucket, and their credentials.

HEAD needs other timeouts than the rest. Credentials are those of the SDK's standard chain, looked up by the
first request and not by the client: what issues them may not respond yet when a pod starts, such as an agent
on its node. A client that was made without them would never look again.
"""

from __future__ import annotations

import os
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from boto3.session import Session
from botocore.config import Config
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, NoCredentialsError

from spottrain.errors import ConfigurationError

POOL: Final = 32
"""Connections that a client keeps."""
CA_VARIABLES: Final = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
"""In the order of botocore's precedence."""
METADATA: Final = "http://169.254.169.254"
METADATA_VARIABLE: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
METADATA_SECONDS: Final = 2.0
DMI: Final = Path("/sys/class/dmi/id")
REFUSED: Final = re.compile(r"non 200 response 4(?!08|29)")
"""In the message of a CredentialRetrievalError: the agent responds, and has no credentials for this pod."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clients:
    quick: Any
    """HEAD: one try and short timeouts. `checkpoint.head` handles a lost response itself."""
    steady: Any
    """All other requests. `s3.py` retries them, so that a cancelled upload does not wait inside the SDK."""
    endpoint: str


def clients(
    place: str, *, endpoint: str | None, path_style: bool | None, head_timeout: float, timeout: float
) -> Clients:
    """Creates the clients. Credentials and region: the SDK's standard chain.

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
            endpoint=str(steady.meta.endpoint_url),
        )
    except (BotoCoreError, ValueError) as error:  # unknown profile or region, or an invalid URL
        raise ConfigurationError(
            f"cannot make an S3 client for {place} at {endpoint or 'AWS'}: {error}; check the endpoint and "
            "the AWS_... variables"
        ) from error


def _client(session: Session, endpoint: str | None, style: str, timeout: float) -> Any:
    config = Config(
        connect_timeout=min(timeout, 5.0),
        read_timeout=timeout,
        retries={"mode": "standard", "total_max_attempts": 1},  # callers retry in their own way
        max_pool_connections=POOL,
        tcp_keepalive=True,
        # The SHA-256 header covers a body, so it is not hashed again for the signature.
        s3={"addressing_style": style, "payload_signing_enabled": False},
        response_checksum_validation="when_required",  # the manifest's digests cover it
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


# --- credentials ----------------------------------------------------------------------------------------
class LateCredentials(Credentials):  # type: ignore[misc]
    """Credentials that `load` returns, which is called until it succeeds. They renew themselves."""

    method = "late"

    def __init__(self, load: Callable[[], Credentials | None]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._found: Credentials | None = None

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Raises NoCredentialsError if there are none, CredentialRetrievalError if they cannot be had now."""
        try:
            with self._lock:
                self._found = self._found or self._load()
            if self._found is not None:
                return self._found.get_frozen_credentials()
        except (BotoCoreError, ClientError, OSError):
            raise
        except ValueError as error:
            raise ConfigurationError(
                f"no credentials can be looked up: {error}; check the AWS_... variables"
            ) from error
        except Exception as error:  # botocore does not check what an agent answers
            raise CredentialRetrievalError(
                provider="credentials", error_msg=f"{type(error).__name__}: {error}"
            ) from error
        if silent := silent_metadata(os.environ):
            raise CredentialRetrievalError(
                provider="iam-role", error_msg=f"the instance metadata service at {silent} does not respond"
            )
        raise NoCredentialsError

    def get_deferred_property(self, property_name: str) -> Callable[[], Any]:
        return lambda: getattr(self._found, property_name, None)


def may_come(error: CredentialRetrievalError) -> bool:
    return REFUSED.search(str(error)) is None


def silent_metadata(env: Mapping[str, str], dmi: Path = DMI) -> str:
    """Returns the URL of the instance metadata service that should be there and does not respond, else ""."""
    if env.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return ""
    if METADATA_VARIABLE not in env and not _on_ec2(dmi):
        return ""
    url = (env.get(METADATA_VARIABLE) or METADATA).rstrip("/")
    request = urllib.request.Request(f"{url}/latest/api/token", method="PUT")
    request.add_header("X-aws-ec2-metadata-token-ttl-seconds", "60")
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(request, timeout=METADATA_SECONDS).close()
    except urllib.error.HTTPError as error:
        return url if error.code >= 500 else ""
    except (OSError, ValueError):
        return url
    return ""


def _on_ec2(dmi: Path) -> bool:
    """Whether the firmware is Amazon's (Nitro: sys_vendor; Xen: bios_version)."""
    for name in ("sys_vendor", "bios_version"):
        try:
            if "amazon" in (dmi / name).read_text().lower():
                return True
        except OSError:
            continue
    return False
