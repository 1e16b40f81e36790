"""A small client for tests: JSON in, JSON out, and waits that say what they waited for."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlsplit

import yaml
from spottrain_operator.names import API_VERSION, GROUP, PLURAL, VERSION

Json = dict[str, Any]
JSON, MERGE, APPLY = "application/json", "application/merge-patch+json", "application/apply-patch+yaml"
NONE: Mapping[str, str] = MappingProxyType({})
PATIENCE = 90.0
"""Bound of every wait; nothing here takes a tenth of it."""


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def wait_for(what: str, look: Callable[[], Any], *, seconds: float = PATIENCE) -> Any:
    """The first answer that is not empty."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds:.0f} s in vain for {what}")


@dataclass(frozen=True, kw_only=True)
class Kube:
    host: str
    context: ssl.SSLContext
    _idle: list[http.client.HTTPSConnection] = field(default_factory=list, repr=False, compare=False)
    """Connections that are kept: a handshake costs more than most requests."""

    def __post_init__(self) -> None:
        weakref.finalize(self, _close, self._idle)

    @classmethod
    def from_kubeconfig(cls, path: Path) -> Kube:
        config = yaml.safe_load(path.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cadata=_text(cluster, "certificate-authority"))
        with tempfile.NamedTemporaryFile("w") as both:
            both.write(_text(user, "client-certificate") + "\n" + _text(user, "client-key"))
            both.flush()
            context.load_cert_chain(both.name)
        return cls(host=urlsplit(cluster["server"]).netloc, context=context)

    def call(
        self, method: str, path: str, body: Any = None, *, kind: str = JSON, headers: Mapping[str, str] = NONE
    ) -> Json:
        text = None if body is None else json.dumps(body)
        status, content = self._exchange(
            method, path, text, {"Content-Type": kind, "Accept": JSON, **headers}
        )
        answer: Json = json.loads(content) if content.startswith("{") else {"message": content}
        if status >= 400:
            raise Refused(status, answer.get("message", ""))
        return answer

    def _exchange(
        self, method: str, path: str, text: str | None, headers: Mapping[str, str]
    ) -> tuple[int, str]:
        """Status and body of the reply, by a connection that is kept or by a new one."""
        connections = [http.client.HTTPSConnection(self.host, context=self.context, timeout=10)]
        with suppress(IndexError):
            connections.insert(0, self._idle.pop())
        for connection in connections:
            try:
                connection.request(method, path, text, dict(headers))
                reply = connection.getresponse()
                content = reply.read().decode()
            except BaseException as error:
                connection.close()
                if connection is connections[-1] or not isinstance(error, (ConnectionError, ssl.SSLEOFError)):
                    raise
            else:
                self._idle.append(connection)
                break
        return reply.status, content

    def get(self, path: str) -> Json | None:
        try:
            return self.call("GET", path)
        except Refused as refused:
            if refused.status == 404:
                return None
            raise

    # --- set up ---
    def install(self, crd: Path) -> None:
        body = yaml.safe_load(crd.read_text())
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{body['metadata']['name']}"
        self.call("PATCH", f"{path}?fieldManager=tests&force=true", body, kind=APPLY)
        wait_for("the CRD to be served", lambda: self.answers(f"/apis/{GROUP}/{VERSION}/{PLURAL}"))

    def answers(self, path: str) -> bool:
        try:
            return self.get(path) is not None
        except Refused:  # 429: storage is (re)initializing
            return False

    def make_namespace(self, name: str) -> None:
        """It enforces the baseline Pod Security Standard: a silent template must pass it."""
        labels = {"pod-security.kubernetes.io/enforce": "baseline"}
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
        self.call("POST", f"/api/v1/namespaces/{name}/serviceaccounts", {"metadata": {"name": "default"}})

    # --- jobs ---
    def create_job(self, namespace: str, body: Json, *, query: str = "fieldValidation=Strict") -> Json:
        return self.call(
            "POST", f"{jobs(namespace)}?{query}", {"apiVersion": API_VERSION, "kind": "TrainingJob"} | body
        )

    def events(self, namespace: str, job: str) -> list[Json]:
        selector = quote(f"involvedObject.name={job}")
        found: list[Json] = self.call(
            "GET", f"/api/v1/namespaces/{namespace}/events?fieldSelector={selector}"
        )["items"]
        return found


def jobs(namespace: str, name: str = "") -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}" + (f"/{name}" if name else "")


def _close(connections: list[http.client.HTTPSConnection]) -> None:
    for connection in connections:
        connection.close()


def _text(table: Json, key: str) -> str:
    if data := table.get(f"{key}-data"):
        return base64.b64decode(data).decode()
    return Path(table[key]).read_text()
