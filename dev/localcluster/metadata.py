"""The instance metadata endpoint of one node, as AWS (IMDSv2), GCP and Azure answer it, each at its paths.

Run by node.py in the node's namespace.

The notice is a file: whoever reclaims the node writes it whole, and the next GET shows it, on each cloud.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from localcluster import layout
from localcluster.layout import Node, NodePaths
from localcluster.shell import read_json

_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
_TOKEN = "X-aws-ec2-metadata-token"
_LONGEST_TTL = 21600
_GCP, _AZURE = "/computeMetadata/v1/", "/metadata/"
_EVENTS = "scheduledevents"
_LOOK_SECONDS = 0.1
"""How often a GET that waits for a change looks for one."""


@dataclass(kw_only=True, slots=True)
class Metadata:
    """What the endpoint knows: the node, its notice file, and what it gave out."""

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

    def gcp_value(self, key: str) -> str | None:
        """The text at a key, or None where GCP answers 404."""
        preempted = "FALSE" if read_json(self.paths.notice) is None else "TRUE"
        values = {
            "instance/preempted": preempted,
            "instance/maintenance-event": "NONE",
            "instance/id": str(int(hashlib.sha256(self.instance_id.encode()).hexdigest()[:15], 16)),
            "instance/name": self.node.name,
            "instance/zone": f"projects/1/zones/{self.node.zone}",
            "instance/machine-type": "projects/1/machineTypes/local-gpu",
        }
        return values.get(key)

    def azure_events(self) -> dict[str, Any]:
        """The document of Scheduled Events: the notice is an eviction."""
        notice = read_json(self.paths.notice)
        if notice is None:
            return {"DocumentIncarnation": 1, "Events": []}
        id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.instance_id} {notice['published_at']}"))
        not_before = format_datetime(datetime.fromtimestamp(notice["deadline"], UTC), usegmt=True)
        event = {
            "EventId": id,
            "EventStatus": "Scheduled",
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": [self.node.name],
            "NotBefore": not_before,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        return {"DocumentIncarnation": int(notice["published_at"]), "Events": [event]}


def serve(
    metadata: Metadata, address: tuple[str, int] = (layout.METADATA_ADDRESS, 80)
) -> ThreadingHTTPServer:
    """Answers from now on, in a thread of its own."""

    class Handler(_Handler):
        source = metadata

    server = ThreadingHTTPServer(address, Handler)
    threading.Thread(target=server.serve_forever, name="metadata", daemon=True).start()
    return server


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
        if self.path.startswith(_GCP):
            self._get_gcp()
        elif self.path.startswith(_AZURE):
            self._get_azure()
        else:
            self._get_aws()

    def _get_aws(self) -> None:
        if not self.source.knows(self.headers.get(_TOKEN)):
            self._answer(401, "")
            return
        value = self.source.value(self.path.removeprefix("/latest/meta-data/"))
        if value is None:
            self._answer(404, "Not Found")
        else:
            self._answer(200, value)

    def _get_gcp(self) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self._answer(403, "Missing Metadata-Flavor:Google header.")
            return
        url = urlsplit(self.path)
        key, query = url.path.removeprefix(_GCP), parse_qs(url.query)
        value = self.source.gcp_value(key)
        if query.get("wait_for_change") == ["true"]:
            known = query.get("last_etag", [_etag(value)])[0]
            until = time.monotonic() + float(query.get("timeout_sec", ["3600"])[0])
            while _etag(value) == known and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
                value = self.source.gcp_value(key)
        headers = {"Metadata-Flavor": "Google", "ETag": _etag(value)}
        with suppress(ConnectionError):  # it may have grown tired of waiting
            self._answer(404 if value is None else 200, value or "", headers)

    def _get_azure(self) -> None:
        if not self._is_azures():
            return
        path = urlsplit(self.path).path.removeprefix(_AZURE)
        if path == _EVENTS:
            self._answer(200, json.dumps(self.source.azure_events()))
        elif path == "instance/compute/name":
            self._answer(200, self.source.node.name)
        else:
            self._answer(404, "")

    def _is_azures(self) -> bool:
        """Whether the request is as Azure wants it; else it has its answer."""
        well = self.headers.get("Metadata") == "true" and "api-version=" in self.path
        if not well:
            self._answer(400, '{"error": "Bad request"}')
        return well

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


def _etag(value: str | None) -> str:
    return hashlib.sha256((value or "").encode()).hexdigest()[:16]
