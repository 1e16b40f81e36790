"""One HTTP request: bounded in time and size, without redirects. On the standard library alone."""

from __future__ import annotations

import http.client
import ssl
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

LARGEST: Final = 64 * 1024 * 1024
"""Bytes; a page of 500 nodes with many images has a tenth of it."""
TIMEOUT: Final = 30.0
"""Seconds without a byte."""


class Unanswered(Exception):
    """No usable response; the text names the request and the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    status: int
    body: bytes


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Returns each response as it is: errors are the caller's, and redirects are not followed."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        return response

    https_response = http_response


def call(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    body: bytes | None = None,
    tls: ssl.SSLContext | None = None,
    direct: bool = False,
    timeout: float = TIMEOUT,
) -> Reply:
    """Sends one request and returns the reply, whatever its status. Raises Unanswered.

    Args:
        method: Such as GET.
        url: http or https.
        headers: Of the request.
        body: Of the request.
        tls: Whom to trust; None: the system's certificates.
        direct: Whether to ignore the environment's proxies.
        timeout: Seconds without a byte.
    """
    if not url.startswith(("http://", "https://")):
        raise Unanswered(f"{method} {url}: the URL must begin with http:// or https://")
    proxies = urllib.request.ProxyHandler({} if direct else None)
    opener = urllib.request.build_opener(_AnyStatus, proxies, urllib.request.HTTPSHandler(context=tls))
    request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)
    try:
        with opener.open(request, timeout=timeout) as reply:
            return Reply(status=reply.status, body=_bounded(reply))
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or f"{type(error).__name__} {error}"
        raise Unanswered(f"{method} {url}: {reason}") from error


def _bounded(reply: http.client.HTTPResponse) -> bytes:
    content = reply.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"the response is longer than {LARGEST} bytes")
    return content
