"""One HTTP request with JSON: bounded in time and size, without redirects. On the standard library alone."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.request
from collections.abc import Mapping
from typing import Any, Final

LARGEST: Final = 64 * 1024 * 1024
"""Bytes; a page of 500 nodes with many images has a tenth of it."""
TIMEOUT: Final = 30.0
"""Seconds without a byte."""


class Failed(Exception):
    """Something could not be asked or written; the text says what, why and what to do."""

    def __init__(self, sentence: str, *, status: int = 0) -> None:
        super().__init__(sentence)
        self.status = status
        """Of the HTTP response; 0 where there is none."""


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Returns each response as it is: a redirect is not followed."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        return response

    https_response = http_response


def call(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: Any = None,
    tls: ssl.SSLContext | None = None,
    direct: bool = False,
) -> Any:
    """Sends one request and returns the response's JSON. Raises Failed.

    Args:
        method: Such as GET.
        url: http or https.
        headers: Of the request, beside those for JSON.
        body: Sent as JSON.
        tls: Whom to trust; None: the system's certificates.
        direct: Whether to ignore the environment's proxies.
    """
    what = f"{method} {url.partition('?')[0]}"
    if not url.startswith(("http://", "https://")):
        raise Failed(f"{what}: the URL must begin with http:// or https://")
    proxies = urllib.request.ProxyHandler({} if direct else None)
    opener = urllib.request.build_opener(_AnyStatus, proxies, urllib.request.HTTPSHandler(context=tls))
    data = None if body is None else json.dumps(body).encode()
    json_only = {"Accept": "application/json", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, headers={**json_only, **(headers or {})}, method=method)
    try:
        with opener.open(request, timeout=TIMEOUT) as response:
            status, content = response.status, response.read(LARGEST + 1)
        if status < 300 and len(content) <= LARGEST:
            return json.loads(content)
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        reason = getattr(error, "reason", None) or f"{type(error).__name__} {error}"
        raise Failed(f"{what}: {reason}") from error
    if status < 300:
        raise Failed(f"{what}: the response is longer than {LARGEST} bytes")
    raise Failed(f"{what}: replied {status}: {content[:500].decode(errors='replace')}", status=status)
