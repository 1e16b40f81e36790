"""The one door of a kubelet that people use: `kubectl logs`, with -f, -p, --tail and --limit-bytes."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO
from urllib.parse import parse_qs, urlsplit

from processcluster.container import Container
from processcluster.pod import Pod

_UNKNOWN = ("timestamps", "sinceSeconds", "sinceTime")


def serve(
    address: tuple[str, int], tls: ssl.SSLContext, pods: Mapping[str, Pod], over: threading.Event
) -> ThreadingHTTPServer:
    """Answers from now on, in threads of its own."""

    class Handler(_Handler):
        known, ended = pods, over

    server = ThreadingHTTPServer(address, Handler)
    server.daemon_threads = True
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, name="kubelet-server", daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    known: Mapping[str, Pod]
    ended: threading.Event

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        words, query = url.path.strip("/").split("/"), parse_qs(url.query)
        if words[0] != "containerLogs" or len(words) != 4:
            self._refuse(404, f"a process node serves logs alone, not /{words[0]}")
        elif unknown := [name for name in _UNKNOWN if query.get(name, ["false"]) != ["false"]]:
            self._refuse(400, f"a process node keeps no time of a log line: leave {unknown[0]} out")
        elif (container := self._container(*words[1:])) is None:
            self._refuse(404, f"no container {words[3]} of the pod {words[2]} is here")
        else:
            self._send(container, query)

    def do_POST(self) -> None:
        self._refuse(
            501, "a process node has no exec, attach or port-forward: its containers are processes here"
        )

    def _container(self, namespace: str, pod: str, name: str) -> Container | None:
        found = [
            container
            for candidate in self.known.values()
            for container in candidate.containers
            if container.name == name
            and candidate.raw["metadata"]["namespace"] == namespace
            and candidate.raw["metadata"]["name"] == pod
        ]
        return found[-1] if found else None

    def _send(self, container: Container, query: Mapping[str, list[str]]) -> None:
        previous = query.get("previous") == ["true"]
        log: Path = container.log(previous=previous)
        if not log.exists():
            self._refuse(400, f"container {container.name} has not started yet")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        with log.open("rb") as file, suppress(ConnectionError, ssl.SSLError):
            if "tailLines" in query:
                _skip_to_tail(file, int(query["tailLines"][0]))
            self._copy(file, container, query, follow=query.get("follow") == ["true"] and not previous)

    def _copy(
        self, file: IO[bytes], container: Container, query: Mapping[str, list[str]], *, follow: bool
    ) -> None:
        left = int(query.get("limitBytes", ["0"])[0]) or None
        process = container.process
        while left is None or left > 0:
            over = container.process is not process or not container.running or self.ended.is_set()
            data = file.read(65536 if left is None else min(65536, left))
            if data:
                self.wfile.write(data)
                left = None if left is None else left - len(data)
            elif over or not follow:
                return
            else:
                time.sleep(0.05)

    def _refuse(self, status: int, sentence: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(sentence.encode())

    def log_message(self, format: str, *words: object) -> None:
        """Quiet: who read a log is not of interest."""


def _skip_to_tail(file: IO[bytes], lines: int) -> None:
    """Places the file before its last `lines` lines."""
    content = file.read()
    kept = content.splitlines(keepends=True)[-lines:] if lines else []
    file.seek(len(content) - sum(map(len, kept)))
