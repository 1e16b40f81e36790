"""The instance metadata endpoint of one node, as AWS IMDSv2 answers it.

Run by node.py in the node's namespace.

The notice is a file: whoever reclaims the node writes it whole, and the next GET shows it.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from localcluster import layout
from localcluster.layout import Node, NodePaths
from localcluster.shell import read_json

_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
_TOKEN = "X-aws-ec2-metadata-token"
_LONGEST_TTL = 21600


@dataclass(kw_only=True, slots=True)
class Metadata:
    """What the endpoint knows: the node, its notice file, and the tokens that it gave out."""

    node: Node
    paths: NodePaths
    instance_id: str
    _tokens: dict[str, float] = field(default_factory=dict)

    def new_token(self, ttl: int) -> str:
        token = secrets.token_urlsafe(40)
        self._tokens[token] = time.monotonic() + ttl
        return token

    def knows(self, token: str | None) -> bool:
        return token is not None and self._tokens.get(token, 0.0) > time.monotonic()

    def value(self, path: str) -> str | None:
        """The text at a path, or None where AWS answers 404."""
        if path == "spot/instance-action":
            notice = read_json(self.paths.notice)
            return (
                None if notice is None else json.dumps({"action": notice["action"], "time": notice["time"]})
            )
        fixed = {
            "instance-id": self.instance_id,
            "instance-life-cycle": "spot",
            "instance-type": "local.gpu",
            "placement/availability-zone": self.node.zone,
            "placement/region": "local",
            "local-ipv4": self.node.address,
            "local-hostname": self.node.name,
        }
        return fixed.get(path)


def serve(metadata: Metadata) -> None:
    """Answers from now on, in a thread of its own."""

    class Handler(_Handler):
        source = metadata

    server = ThreadingHTTPServer((layout.METADATA_ADDRESS, 80), Handler)
    threading.Thread(target=server.serve_forever, name="metadata", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    source: Metadata
    server_version = "EC2ws"
    sys_version = ""

    def do_PUT(self) -> None:
        ttl = self.headers.get(_TTL, "")
        if self.path != "/latest/api/token":
            self._answer(404, "")
        elif not ttl.isdigit() or not 1 <= int(ttl) <= _LONGEST_TTL:
            self._answer(400, "")
        else:
            self._answer(200, self.source.new_token(int(ttl)), {_TTL: ttl})

    def do_GET(self) -> None:
        if not self.source.knows(self.headers.get(_TOKEN)):
            self._answer(401, "")
            return
        value = self.source.value(self.path.removeprefix("/latest/meta-data/"))
        if value is None:
            self._answer(404, "Not Found")
        else:
            self._answer(200, value)

    def _answer(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "text/plain",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: object) -> None:
        """Quiet: the agent polls every second."""
