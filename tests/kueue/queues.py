"""What a test asks of Kueue, and what it reads there. Used by the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spottrain_operator.api.kueue import WORKLOADS
from spottrain_operator.names import QUEUE_LABEL, QUEUE_PRIORITY_LABEL

from tests.api.kube import MERGE, Json, Kube, wait_for
from tests.api.scene import Scene, job_body

ROOT = "/apis/kueue.x-k8s.io/v1beta2"
TOLERATION = {"key": "spot", "operator": "Exists"}


@dataclass(frozen=True, kw_only=True)
class Queues:
    """A LocalQueue and a ClusterQueue of one name, with flavors and classes of their own."""

    kube: Kube
    namespace: str
    name: str

    # --- what it is told ---
    def make(self, **cpus: int) -> None:
        """A queue with so many CPUs of each flavor, in this order; a more important job preempts others."""
        for flavor in cpus:
            spec: Json = {"nodeLabels": {"capacity": flavor}}
            spec |= {"tolerations": [TOLERATION]} if flavor == "spot" else {}
            self._post("resourceflavors", "ResourceFlavor", self.flavor(flavor), spec)
        quotas = [
            {"name": self.flavor(flavor), "resources": [{"name": "cpu", "nominalQuota": str(number)}]}
            for flavor, number in cpus.items()
        ]
        group = {"coveredResources": ["cpu"], "flavors": quotas}
        preemption = {"withinClusterQueue": "LowerPriority"}
        spec = {"namespaceSelector": {}, "resourceGroups": [group], "preemption": preemption}
        self._post("clusterqueues", "ClusterQueue", self.name, spec)
        self._post("localqueues", "LocalQueue", self.name, {"clusterQueue": self.name}, self.namespace)

    def flavor(self, name: str) -> str:
        return f"{self.name}-{name}"

    def make_class(self, name: str, value: int) -> str:
        """Returns its full name."""
        body = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass", "value": value}
        self.kube.call(
            "POST", f"{ROOT}/workloadpriorityclasses", body | {"metadata": {"name": f"{self.name}-{name}"}}
        )
        return f"{self.name}-{name}"

    def create(self, scene: Scene, *, cpus: int, priority: str = "", **spec: Any) -> None:
        """Creates the scene's job, whose pods request so many CPUs each."""
        trainer = {"name": "trainer", "image": "x", "resources": {"requests": {"cpu": str(cpus)}}}
        pod = {"containers": [trainer], "securityContext": {"runAsNonRoot": True}}
        given = {"template": {"spec": pod}, "gpusPerWorker": 0, "capacity": {"sameZone": False}} | spec
        body = job_body(scene.job, **given)
        body["metadata"]["labels"] = {QUEUE_LABEL: self.name}
        if priority:
            body["metadata"]["labels"][QUEUE_PRIORITY_LABEL] = priority
        scene.kube.create_job(scene.namespace, body)

    def set_active(self, job: str, active: bool) -> None:
        self.kube.call("PATCH", self._path(self.wait(job)), {"spec": {"active": active}}, kind=MERGE)

    def _post(self, plural: str, kind: str, name: str, spec: Json, namespace: str = "") -> None:
        where = f"{ROOT}/namespaces/{namespace}/{plural}" if namespace else f"{ROOT}/{plural}"
        body = {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
        self.kube.call("POST", f"{where}?fieldValidation=Strict", body)

    # --- what it says ---
    def of(self, job: str) -> Json | None:
        """The job's Workload."""
        version, _, plural = WORKLOADS.rpartition("/")
        path = f"/apis/{version}/namespaces/{self.namespace}/{plural}"
        items = self.kube.call("GET", path)["items"]
        return next((w for w in items if w["metadata"]["ownerReferences"][0]["name"] == job), None)

    def wait(self, job: str) -> Json:
        workload: Json = wait_for(f"the Workload of {job}", lambda: self.of(job))
        return workload

    def says(self, job: str, kind: str) -> str:
        """A condition of the Workload: status and reason."""
        conditions = self.wait(job).get("status", {}).get("conditions", ())
        found = next((c for c in conditions if c["type"] == kind), None)
        return f"{found['status']} {found['reason']}" if found is not None else ""

    def wait_said(self, job: str, kind: str, words: str) -> None:
        wait_for(f"{kind}={words} of the Workload of {job}", lambda: self.says(job, kind).startswith(words))

    def used(self) -> dict[str, str]:
        """The CPUs of each flavor that admitted Workloads hold, as Kueue counts them."""
        queue = self.kube.get(f"{ROOT}/clusterqueues/{self.name}") or {}
        flavors = queue.get("status", {}).get("flavorsUsage") or ()
        return {f["name"].removeprefix(f"{self.name}-"): str(f["resources"][0]["total"]) for f in flavors}

    def wait_used(self, **cpus: str) -> None:
        wait_for(f"Kueue to count {cpus}", lambda: self.used() == cpus)

    def _path(self, workload: Json) -> str:
        return f"{ROOT}/namespaces/{self.namespace}/workloads/{workload['metadata']['name']}"
