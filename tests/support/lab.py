"""Builders and named waits for jobs on nodes: a job in a few words, a wait that says what is missing."""

from __future__ import annotations

import functools
import json
import os
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

from demo.kubectl import Kubectl
from demo.target import SECRET, SYSTEM_NAMESPACE, local_kubectl, local_pool, make_namespace
from localcluster.api import Cluster
from localcluster.layout import RUNTIME_IMAGE
from processcluster import install
from processcluster.kube import Kube
from spottrain_operator.api.bookkeeping import DATA_KEY
from spottrain_operator.names import object_name

Raw = dict[str, Any]
BUCKET = "spottrain-tests"

TRAIN = """
import os, time, torch, spottrain

first = os.environ["SPOTTRAIN_ATTEMPT"] == "1"
pace = float(os.environ.get("FIRST_ATTEMPTS_PACE" if first else "PACE", 0.05))

class Sums(torch.utils.data.Dataset):
    def __len__(self): return 100_000
    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(16, generator=generator)
        return x, x.sum().reshape(1)

torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

def loss(model, batch):
    time.sleep(pace)
    x, y = batch
    return torch.nn.functional.mse_loss(model(x), y)

trainer = spottrain.Trainer(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), train_dataset=Sums(), loss_fn=loss,
    log_every=1,
)
trainer.fit()
"""


def paced(*, first: float = 0.05, later: float = 0.05) -> list[Raw]:
    """A container's environment: seconds of a step, in the first attempt and in all that follow."""
    env = {"OMP_NUM_THREADS": 1, "FIRST_ATTEMPTS_PACE": first, "PACE": later}
    return [{"name": name, "value": str(value)} for name, value in env.items()]


@functools.cache
def client_of(cluster: Cluster) -> Kube:
    """For what waits read again and again: a call of kubectl takes thirty times the processor time."""
    pki = cluster.paths.pki
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
    server = urlsplit(json.loads(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]["server"])
    return Kube(host=str(server.hostname), port=int(server.port or 443), context=context)


def fresh_nodes(cluster: Cluster, kubectl: Kubectl) -> None:
    """Both nodes there, Ready, with no notice pending and nothing left of one that was."""
    for node in cluster.nodes:
        cluster.cancel(node)
        cluster.restore(node)
    deadline = time.monotonic() + 30
    while any("spottrain.io/" in str(node["spec"].get("taints", "")) for node in kubectl.items("nodes")):
        assert time.monotonic() < deadline, (
            "the agent did not take its taint off after the notice was withdrawn"
        )
        time.sleep(0.5)


def drawn_to(node: str, job: Raw) -> Raw:
    """On that node as long as it is there."""
    term = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    preference = {"weight": 100, "preference": {"matchExpressions": [term]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}
    job["spec"]["template"]["spec"]["affinity"] = affinity
    return job


@dataclass(frozen=True, kw_only=True)
class Lab:
    """One test's namespace on the cluster."""

    cluster: Cluster
    kubectl: Kubectl
    uri: str
    scripts: dict[str, str] = field(default_factory=lambda: {"train.py": TRAIN})

    @property
    def client(self) -> Kube:
        return client_of(self.cluster)

    @property
    def path(self) -> str:
        """Of the namespace, for Kubernetes' own kinds."""
        return f"/api/v1/namespaces/{self.kubectl.namespace}"

    def job(self, name: str = "job", **changes: Any) -> Raw:
        """A TrainingJob: 100 steps of a tiny network in about ten seconds; changes to `spec` by keyword.

        `grace` is the pod's terminationGracePeriodSeconds: a short one where nothing can be saved anyway.
        """
        container: Raw = {
            "name": "trainer",
            "image": RUNTIME_IMAGE,
            "imagePullPolicy": "Never",
            "args": ["/scripts/train.py"],
            "env": paced(),
            "volumeMounts": [{"name": "scripts", "mountPath": "/scripts"}],
        }
        container |= changes.pop("container", {})
        volumes = [{"name": "scripts", "configMap": {"name": "scripts"}}]
        spec: Raw = {
            "gpusPerWorker": 1,
            "template": {"spec": {"containers": [container], "volumes": volumes}},
            "training": {"precision": "fp32", "globalBatchSize": 8, "maxSteps": 100, "deterministic": True},
            "checkpoint": {
                "uri": f"{self.uri}/{name}",
                "endpoint": self.cluster.s3_endpoint,
                "credentialsSecretRef": {"name": SECRET},
                "interval": "20steps",
            },
            "capacity": {"type": "Spot", "pools": [local_pool()]},
            "failurePolicy": {"maxFailures": 1, "backoffSeconds": 1},
        }
        if (grace := changes.pop("grace", None)) is not None:
            spec["template"]["spec"]["terminationGracePeriodSeconds"] = grace
        for key, change in changes.items():
            spec[key] = {**spec.get(key, {}), **change} if isinstance(change, dict) else change
        api = {"apiVersion": "spottrain.io/v1alpha1", "kind": "TrainingJob"}
        return {**api, "metadata": {"name": name}, "spec": spec}

    def slow_job(self, name: str = "job", **changes: Any) -> Raw:
        """One that cannot end before it is disturbed: its 400 steps take 100 s in the first attempt."""
        container = {"env": paced(first=0.25, later=0)}
        return self.job(name, **{"training": {"maxSteps": 400}, "container": container} | changes)

    def apply(self, *jobs: Raw) -> None:
        scripts = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "scripts"},
            "data": self.scripts,
        }
        self.kubectl.apply(scripts, *jobs)

    def status(self, name: str = "job") -> Raw:
        space = f"/apis/spottrain.io/v1alpha1/namespaces/{self.kubectl.namespace}"
        found = self.client.get(f"{space}/trainingjobs/{name}")
        return found.get("status", {}) if found else {}

    def ledger(self, name: str = "job") -> Raw:
        """What the job's nodes have cost, in its bookkeeping."""
        space = self.kubectl.namespace
        job = self.client.get(f"/apis/spottrain.io/v1alpha1/namespaces/{space}/trainingjobs/{name}")
        assert job is not None, f"job {name} is gone"
        books = object_name(name, job["metadata"]["uid"], suffix="-books")
        found = self.client.get(f"/api/v1/namespaces/{space}/configmaps/{books}")
        assert found is not None, f"job {name} has no bookkeeping"
        ledger: Raw = json.loads(found["data"][DATA_KEY])["ledger"]
        return ledger

    def condition(self, kind: str, name: str = "job") -> Raw:
        return next((c for c in self.status(name).get("conditions", []) if c["type"] == kind), {})

    def pods(self, name: str = "job") -> list[Raw]:
        """Oldest attempt first, and rank 0 the last of each."""

        def place(pod: Raw) -> tuple[int, int]:
            labels = pod["metadata"]["labels"]
            return int(labels["spottrain.io/attempt"]), -int(labels["spottrain.io/rank"])

        query = urlencode({"labelSelector": f"spottrain.io/job={name}"})
        return sorted(self.client.call("GET", f"{self.path}/pods?{query}")["items"], key=place)

    def node_of(self, name: str = "job") -> str:
        return str(self.pods(name)[-1]["spec"].get("nodeName", ""))

    def expendable_node(self) -> str:
        """One without the operator, which would otherwise have to start elsewhere first."""
        query = urlencode({"labelSelector": "app.kubernetes.io/component=operator"})
        pods = self.client.call("GET", f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods?{query}")["items"]
        taken = {pod["spec"].get("nodeName") for pod in pods if not pod["metadata"].get("deletionTimestamp")}
        return next(node for node in self.cluster.nodes if node not in taken)

    def log(self, pod: str) -> str:
        return str(self.client.call("GET", f"{self.path}/pods/{pod}/log?container=trainer"))

    def stored_log(self, *, attempt: int, rank: int = 0, name: str = "job") -> str:
        """What a rank has printed, as it is kept beside the checkpoints; its pod may be gone."""
        command = [sys.executable, "-m", "spottrain", "checkpoints", "logs", f"{self.uri}/{name}"]
        command += ["--endpoint", self.cluster.s3_endpoint, "--attempt", str(attempt), "--rank", str(rank)]
        access = {
            "AWS_ACCESS_KEY_ID": self.cluster.s3_access_key,
            "AWS_SECRET_ACCESS_KEY": self.cluster.s3_secret_key,
        }
        return subprocess.run(
            command, env=os.environ | access, check=True, capture_output=True, text=True
        ).stdout

    def wait(self, what: str, done: Callable[[], Any], *, seconds: float = 90, name: str = "job") -> Any:
        """What `done` returns once it is true; else fails with the job's status and its pods."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if found := done():
                return found
            time.sleep(0.3)
        pods = [(p["metadata"]["name"], p.get("status", {})) for p in self.pods(name)]
        raise AssertionError(
            f"{what} did not come within {seconds:.0f} s.\n"
            f"status: {json.dumps(self.status(name), indent=1)}\n"
            f"pods: {json.dumps(pods, indent=1)[:4000]}"
        )

    def wait_for_step(self, step: int, *, name: str = "job", seconds: float = 90) -> str:
        """The trainer's log once it shows that step; for a pod that is still there."""
        seen: list[str] = []

        def reached() -> bool:
            pods = [p for p in self.pods(name) if p.get("status", {}).get("phase") == "Running"]
            seen[:] = [self.log(pods[-1]["metadata"]["name"])] if pods else []
            return bool(seen) and f"step={step}/" in seen[0]

        self.wait(f"step {step} of {name}", reached, name=name, seconds=seconds)
        return seen[0]

    def wait_for_phase(self, phase: str, *, name: str = "job", seconds: float = 120) -> Raw:
        self.wait(
            f"phase {phase} of {name}",
            lambda: self.status(name).get("phase") == phase,
            name=name,
            seconds=seconds,
        )
        return self.status(name)


@contextmanager
def new_lab(cluster: Cluster, installed: Kubectl, scripts: Mapping[str, str]) -> Iterator[Lab]:
    """A namespace of its own with the store's credentials, on two nodes without a notice."""
    fresh_nodes(cluster, installed)
    kubectl = local_kubectl(cluster, f"test-{uuid.uuid4().hex[:8]}")
    make_namespace(kubectl, kubectl.namespace)
    kubectl.apply(install.credentials(cluster))
    uri = f"s3://{BUCKET}/{kubectl.namespace}"
    yield Lab(cluster=cluster, kubectl=kubectl, uri=uri, scripts={"train.py": TRAIN, **scripts})
    kubectl.run("delete", "trainingjobs", "--all", "--wait=false")
    kubectl.run("delete", "namespace", kubectl.namespace, "--wait=false")
