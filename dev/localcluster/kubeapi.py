"""The few API calls that the tool itself makes.

Called by the supervisor and `status`; tests bring a real client.
"""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any

from localcluster import layout
from localcluster.pki import Authority

MERGE = "application/merge-patch+json"
JSON = "application/json"


class ApiError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"the API server answered {status}: {text[:300]}")
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class KubeApi:
    """One short-lived connection for each call: calls are few, and no connection can go stale."""

    authority: Authority
    host: str = layout.CONTROL_ADDRESS
    port: int = layout.API_PORT

    def call(self, method: str, path: str, body: Any = None, *, kind: str = JSON) -> Any:
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        context.load_cert_chain(self.authority.cert("admin"), self.authority.key("admin"))
        connection = http.client.HTTPSConnection(self.host, self.port, context=context, timeout=10)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": kind, "Accept": JSON})
            answer = connection.getresponse()
            content = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 400:
            raise ApiError(answer.status, content)
        return json.loads(content) if content.startswith(("{", "[")) else content

    def is_ready(self) -> bool:
        try:
            return bool(self.call("GET", "/readyz") == "ok")
        except (OSError, ApiError, http.client.HTTPException):
            return False

    def node_is_ready(self, name: str) -> bool:
        try:
            node = self.call("GET", f"/api/v1/nodes/{name}")
        except (OSError, ApiError, http.client.HTTPException):
            return False
        conditions = node.get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def set_gpus(self, name: str) -> bool:
        """Gives the node its GPUs, as a device plugin would; the kubelet keeps them. False: no node yet."""
        patch = {"status": {"capacity": {"nvidia.com/gpu": str(layout.GPUS_PER_NODE)}}}
        try:
            self.call("PATCH", f"/api/v1/nodes/{name}/status", patch, kind=MERGE)
        except ApiError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    def delete_node(self, name: str) -> None:
        self._delete(f"/api/v1/nodes/{name}")

    def end_orphans(self, node: str) -> int:
        """Does at once to a dead node's pods what the pod garbage collector does after 40 s.

        A fresh node of the same name would otherwise start them again, which no cloud does.
        """
        pods = self.call("GET", f"/api/v1/pods?fieldSelector=spec.nodeName={node}")["items"]
        for pod in pods:
            path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                self._fail(path, pod)
            self._delete(path, {"gracePeriodSeconds": 0})
        return len(pods)

    def _fail(self, path: str, pod: dict[str, Any]) -> None:
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "DeletionByPodGC",
            "message": "PodGC: node no longer exists",
        }
        kept = [c for c in pod["status"].get("conditions", []) if c["type"] != "DisruptionTarget"]
        status = {"phase": "Failed", "conditions": [*kept, condition]}
        try:
            self.call("PATCH", path + "/status", {"status": status}, kind=MERGE)
        except ApiError as error:
            if error.status != 404:
                raise

    def _delete(self, path: str, options: dict[str, Any] | None = None) -> None:
        try:
            self.call("DELETE", path, options)
        except ApiError as error:
            if error.status != 404:
                raise
