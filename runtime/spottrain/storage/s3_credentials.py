"""Credentials of S3 clients: the SDK's standard chain, looked up by the first request and not by the client.

What issues credentials may not respond yet when a pod starts, such as an agent on its node. A client that was
made without them would never look again.
"""

from __future__ import annotations

import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, NoCredentialsError

from spottrain.errors import ConfigurationError

METADATA: Final = "http://169.254.169.254"
METADATA_VARIABLE: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
METADATA_SECONDS: Final = 2.0
DMI: Final = Path("/sys/class/dmi/id")
REFUSED: Final = re.compile(r"non 200 response 4(?!08|29)")
"""In the message of a CredentialRetrievalError: the agent responds, and has no credentials for this pod."""


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
