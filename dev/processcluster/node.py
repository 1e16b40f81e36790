"""A node: its Node object, its Lease, the pods that are bound to it, and its end."""

from __future__ import annotations

import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Final

from localcluster import layout
from localcluster import metadata as cloud

from processcluster import logs
from processcluster.images import Image
from processcluster.kube import MERGE, STRATEGIC, Json, Kube, Refused, now
from processcluster.names import Names
from processcluster.pod import Pod

KUBELET_PORT: Final = 10250
METADATA_PORT: Final = 8169
_HEARTBEAT_SECONDS: Final = 5.0
_LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


@dataclass(kw_only=True)
class Node:
    """`start` brings it up; `power_off` ends everything on it between two instructions, and nobody
    reports.
    """

    name: str
    address: str
    kube: Kube
    site: Path
    """The run folder of the cluster."""
    folder: Path
    images: Mapping[str, Image]
    labels: Mapping[str, str]
    tls: ssl.SSLContext
    new_address: Callable[[], str]
    """An address for a pod that no other pod has."""
    names: Names
    metadata: cloud.Metadata
    pods: dict[str, Pod] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    _servers: list[ThreadingHTTPServer] = field(default_factory=list)

    @property
    def metadata_url(self) -> str:
        return f"http://{self.address}:{METADATA_PORT}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._servers.append(cloud.serve(self.metadata, (self.address, METADATA_PORT)))
        self._servers.append(logs.serve((self.address, KUBELET_PORT), self.tls, self.pods, self.over))
        self._register()
        for loop in (self._beat, self._follow, self._watch_memory):
            threading.Thread(target=loop, name=f"{self.name}{loop.__name__}", daemon=True).start()

    def power_off(self) -> None:
        self.over.set()
        for pod in list(self.pods.values()):
            pod.stop()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def note(self, text: str) -> None:
        """A line of the cluster's log."""
        print(f"{now()} {self.name} {text}", file=sys.stderr, flush=True)

    # --- the Node object ---
    def _register(self) -> None:
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **self.labels,
        }
        self.kube.call("POST", "/api/v1/nodes", {"metadata": {"name": self.name, "labels": labels}})
        self.kube.call(
            "PATCH", f"/api/v1/nodes/{self.name}/status", {"status": self._status()}, kind=STRATEGIC
        )
        # Admission has put a taint on it that the node controller takes off some seconds later.
        self.kube.call("PATCH", f"/api/v1/nodes/{self.name}", {"spec": {"taints": None}}, kind=MERGE)

    def _status(self) -> Json:
        gpus = {"nvidia.com/gpu": str(layout.GPUS_PER_NODE)}
        room = {"cpu": "16", "memory": "64Gi", "ephemeral-storage": "100Gi", "pods": "50"} | gpus
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "processes of this machine",
        }
        return {
            "capacity": room,
            "allocatable": room,
            "addresses": [{"type": "InternalIP", "address": self.address}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": KUBELET_PORT}},
            "nodeInfo": {
                "kubeletVersion": f"v{layout.KUBERNETES_VERSION}",
                "containerRuntimeVersion": "process://1",
            },
            "conditions": [ready | {"lastHeartbeatTime": now(), "lastTransitionTime": now()}],
        }

    def _beat(self) -> None:
        """Renews the Lease: the node controller takes a node whose Lease is old for silent."""
        while not self.over.is_set():
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
            lease = {"metadata": {"name": self.name}}
            lease["spec"] = {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": stamp}  # type: ignore[dict-item]
            try:
                if self.kube.get(f"{_LEASES}/{self.name}") is None:
                    self.kube.send("POST", _LEASES, lease)
                else:
                    self.kube.send("PATCH", f"{_LEASES}/{self.name}", lease, kind=MERGE)
            except (OSError, Refused) as error:
                self.note(f"cannot renew its Lease: {error}")
            self.over.wait(_HEARTBEAT_SECONDS)

    # --- its pods ---
    def _follow(self) -> None:
        for kind, thing in self.kube.watch(
            "/api/v1/pods", f"fieldSelector=spec.nodeName={self.name}", self.over
        ):
            if self.over.is_set():
                return
            if kind == "LISTED":
                present = {pod["metadata"]["uid"] for pod in thing["items"]}
                for uid in set(self.pods) - present:
                    self.pods.pop(uid).stop()
                for pod in thing["items"]:
                    self._see(pod)
            elif kind == "DELETED":
                if (gone := self.pods.get(thing["metadata"]["uid"])) is not None:
                    gone.stop()
            elif kind in ("ADDED", "MODIFIED"):
                self._see(thing)

    def _see(self, raw: Json) -> None:
        uid = raw["metadata"]["uid"]
        if uid not in self.pods:
            if (raw.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
                return
            address = self.address if raw["spec"].get("hostNetwork") else self.new_address()
            self.names.add(raw, address)
            self.pods[uid] = Pod(self, raw, address)
        self.pods[uid].update(raw)

    def _watch_memory(self) -> None:
        while not self.over.wait(1.0):
            for pod in list(self.pods.values()):
                for container in pod.containers:
                    container.end_when_out_of_memory()
