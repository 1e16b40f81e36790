"""A job, its operator's process, and nodes of one GPU each on which only it may run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.api.kube import MERGE, Json, wait_for
from tests.api.scene import OperatorProcess, Scene

POOL_LABEL = "example.com/pool"


@dataclass(frozen=True, kw_only=True)
class Stage(Scene):
    kubeconfig: Path
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)
        for node in self.nodes:
            self.kube.call("DELETE", f"/api/v1/nodes/{node}")

    def operate(self, **settings: str) -> None:
        process = OperatorProcess(kubeconfig=self.kubeconfig, namespace=self.namespace, **settings)
        self._open.enter_context(process).wait_ready()

    def add_gpu_node(self, zone: str = "z1", *, cpu: str = "8") -> str:
        """With room for one worker. Admission's taint goes: no node controller is here to take it off."""
        name = f"{self.namespace}-{len(self.nodes) + 1}"
        labels = {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": zone}
        meta = {"name": name, "labels": labels | {POOL_LABEL: self.namespace}}
        self.kube.call("POST", "/api/v1/nodes", {"metadata": meta})
        room = {"cpu": cpu, "memory": "32Gi", "pods": "20", "nvidia.com/gpu": "1"}
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"capacity": room, "allocatable": room, "conditions": conditions}
        self.kube.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, kind=MERGE)
        self.kube.call("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}}, kind=MERGE)
        self.nodes.append(name)
        return name

    def start(self, **template: Any) -> list[Json]:
        """A gang of two, on this stage's nodes only."""
        container: Json = {"name": "trainer", "image": "example.com/train:1"}
        container |= {"resources": {"requests": {"cpu": "4"}}}
        body = {"containers": [container], "nodeSelector": {POOL_LABEL: self.namespace}} | template
        self.create(workers=2, gpusPerWorker=1, template={"spec": body})
        return self.wait_gang(1, 2)

    def bound(self, attempt: int = 1) -> list[str]:
        """Nodes of the attempt's pods, by rank; "" for one without."""
        pods = self.wait_gang(attempt, 2)
        return [pod["spec"].get("nodeName", "") for pod in pods]

    def wait_bound(self, count: int, attempt: int = 1) -> list[str]:
        def look() -> list[str] | None:
            nodes = self.bound(attempt)
            return nodes if len([n for n in nodes if n]) == count else None

        nodes: list[str] = wait_for(f"{count} of the pods to be bound", look)
        return nodes

    def group(self, kind: str, version: str) -> Json | None:
        """The only group of this namespace."""
        path = f"/apis/scheduling.k8s.io/{version}/namespaces/{self.namespace}/{kind}"
        listed = self.kube.get(path)
        items: list[Json] = listed["items"] if listed else []
        return items[-1] if items else None
