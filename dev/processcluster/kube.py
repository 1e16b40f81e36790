"""The API client of the nodes: one short call each, and a watch that begins anew when the server ends it."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]
JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"


class Refused(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        try:
            text = json.loads(text)["message"]
        except (ValueError, KeyError, TypeError):
            text = text[:300]
        super().__init__(text)
        self.status = status

    @property
    def gone(self) -> bool:
        """The object is not there, or is another one by now."""
        return self.status in (404, 409)


@dataclass(frozen=True, kw_only=True)
class Kube:
    """Calls to one API server, by the certificate of its administrator."""

    host: str
    port: int
    context: ssl.SSLContext

    def call(self, method: str, path: str, body: Any = None, *, kind: str = JSON) -> Any:
        """The parsed reply. Raises Refused, or OSError where there is no reply."""
        connection = self._connect(timeout=30)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": kind, "Accept": JSON})
            reply = connection.getresponse()
            content = reply.read().decode()
        except http.client.HTTPException as error:
            raise OSError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
        if reply.status >= 400:
            raise Refused(reply.status, content)
        return json.loads(content) if reply.getheader("Content-Type", "").startswith(JSON) else content

    def get(self, path: str) -> Json | None:
        """The object, or None where there is none."""
        try:
            found: Json = self.call("GET", path)
        except Refused as refused:
            if refused.gone:
                return None
            raise
        return found

    def send(self, method: str, path: str, body: Any = None, *, kind: str = JSON) -> None:
        """A write whose object may be gone by now."""
        try:
            self.call(method, path, body, kind=kind)
        except Refused as refused:
            if not refused.gone:
                raise

    def watch(self, path: str, query: str, over: threading.Event) -> Iterator[tuple[str, Json]]:
        """First ("LISTED", list), then each change as ("ADDED" | "MODIFIED" | "DELETED", object), until
        `over`.
        """
        while not over.is_set():
            try:
                listed = self.call("GET", f"{path}?{query}")
                yield "LISTED", listed
                yield from self._changes(f"{path}?{query}", listed["metadata"]["resourceVersion"], over)
            except (OSError, http.client.HTTPException, Refused):
                over.wait(0.2)

    def _changes(self, path: str, version: str, over: threading.Event) -> Iterator[tuple[str, Json]]:
        connection = self._connect(timeout=60)
        try:
            connection.request("GET", f"{path}&watch=1&timeoutSeconds=50&resourceVersion={version}")
            for line in connection.getresponse():
                event = json.loads(line)
                if over.is_set() or event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]
        finally:
            connection.close()

    def _connect(self, timeout: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self.host, self.port, context=self.context, timeout=timeout)


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
