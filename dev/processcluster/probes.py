"""The probes of a container: when each is due, what it says, and what follows from its failures."""

from __future__ import annotations

import http.client
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from processcluster.kube import Json

STARTUP, READINESS, LIVENESS = "startupProbe", "readinessProbe", "livenessProbe"
_LOOPBACK: Final = ("127.0.0.1", "localhost")
_WORDS: Final = {STARTUP: "Startup", READINESS: "Readiness", LIVENESS: "Liveness"}


@dataclass(kw_only=True)
class Probe:
    """One probe of a container that runs."""

    kind: str
    raw: Json
    due: float = field(init=False)
    failures: int = 0

    def __post_init__(self) -> None:
        self.due = time.monotonic() + self.raw.get("initialDelaySeconds", 0)

    def note(self, failure: str) -> bool:
        """Counts an outcome; whether it has failed as often as it may."""
        self.due = time.monotonic() + self.raw.get("periodSeconds", 10)
        self.failures = self.failures + 1 if failure else 0
        return self.failures >= int(self.raw.get("failureThreshold", 3))

    def event(self, failure: str) -> str:
        """The kubelet's words for an outcome."""
        return f"{_WORDS[self.kind]} probe failed: {failure}"

    def end(self, container: str) -> str:
        """The kubelet's words when it ends a container."""
        return f"Container {container} failed {_WORDS[self.kind].lower()} probe"


def failure(raw: Json, address: str, port: Callable[[int | str], int], run: Callable[..., int]) -> str:
    """Why a probe does not succeed now; empty where it does. `run` takes a command and seconds."""
    seconds = raw.get("timeoutSeconds", 1)
    try:
        if command := (raw.get("exec") or {}).get("command"):
            code = run(command, seconds)
            return f"the command exited with {code}" if code else ""
        if get := raw.get("httpGet"):
            return _get(get, address, port(get["port"]), seconds)
        with socket.create_connection((address, port(raw["tcpSocket"]["port"])), seconds):
            return ""
    except (OSError, subprocess.SubprocessError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


def _get(get: Json, address: str, port: int, seconds: float) -> str:
    host = get.get("host") or address
    connection = http.client.HTTPConnection(address if host in _LOOPBACK else host, port, timeout=seconds)
    try:
        connection.request("GET", get.get("path", "/"))
        status = connection.getresponse().status
    finally:
        connection.close()
    return "" if 200 <= status < 400 else f"HTTP probe failed with statuscode: {status}"
