"""Where the demo runs: the local cluster that it starts itself, or one that the user has (CLUSTER=existing).

Both install the project's own chart with helm. Only the local one may lose a node: on a cluster that is not
ours no node is ever reclaimed or deleted, the trainer's pod is deleted instead.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from localcluster.api import Cluster
from localcluster.layout import OPERATOR_IMAGE, RUNTIME_IMAGE, SYNC_IMAGE, default_paths
from localcluster.store import loaded

from demo.kubectl import Kubectl

Raw = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
SYSTEM_NAMESPACE = "spottrain-system"
NAMESPACE = "spottrain-demo"
SECRET = "checkpoint-credentials"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A cluster with spottrain installed, ready for jobs in `kubectl.namespace`."""

    kubectl: Kubectl
    image: str
    uri: str
    endpoint: str
    secret: str
    pool: Raw
    interrupt: Callable[[str, str], float | None]
    """Takes the names of pod and node; returns when the notice was published, None where there is none."""
    other_node: Callable[[str], str | None]
    """A node that will not be taken when the named one is; None: the scheduler's choice."""
    restore: Callable[[], None]


class NotPossible(Exception):
    """The demo cannot run here; the sentence says why and what to do."""


def install_chart(kubectl: Kubectl, *values: str) -> None:
    """helm upgrade --install of charts/spottrain, waiting until the operator is ready."""
    settings = [word for value in values for word in ("--set", value)]
    kubectl.helm(
        *("upgrade", "--install", "spottrain", str(ROOT / "charts" / "spottrain")),
        *("--namespace", SYSTEM_NAMESPACE, "--create-namespace", "--wait", "--timeout", "180s"),
        *settings,
    )


def make_namespace(kubectl: Kubectl, name: str) -> None:
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})


def credentials_secret(access_key: str, secret_key: str) -> Raw:
    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    data = {"AWS_ACCESS_KEY_ID": encoded(access_key), "AWS_SECRET_ACCESS_KEY": encoded(secret_key)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "data": data}


def make_bucket(endpoint: str, access_key: str, secret_key: str, bucket: str) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id=access_key, aws_secret_access_key=secret_key,
        region_name="us-east-1",
    )  # fmt: skip
    if bucket not in [b["Name"] for b in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=bucket)


def local_kubectl(cluster: Cluster, namespace: str = NAMESPACE) -> Kubectl:
    return Kubectl(
        binary=str(cluster.kubectl),
        helm_binary=str(cluster.helm),
        kubeconfig=str(cluster.kubeconfig),
        namespace=namespace,
    )


def local_target(notice_seconds: float) -> Target:
    """Starts the local cluster where it does not run, installs the chart, makes bucket and secret."""
    subprocess.run([sys.executable, str(ROOT / "dev" / "cluster.py"), "up", "--no-dns"], check=True)
    cluster = Cluster.attach()
    kubectl = local_kubectl(cluster)
    install_local_chart(kubectl)
    make_namespace(kubectl, NAMESPACE)
    make_bucket(cluster.s3_endpoint, cluster.s3_access_key, cluster.s3_secret_key, "spottrain-demo")
    kubectl.apply(credentials_secret(cluster.s3_access_key, cluster.s3_secret_key))

    def reclaim(_pod: str, node: str) -> float | None:
        return cluster.reclaim(node, notice_seconds)

    def restore() -> None:
        for node in cluster.nodes:
            cluster.restore(node)

    restore()
    return Target(
        kubectl=kubectl, image=RUNTIME_IMAGE, uri="s3://spottrain-demo", endpoint=cluster.s3_endpoint,
        secret=SECRET, pool=local_pool(), interrupt=reclaim, restore=restore,
        other_node=lambda taken: next(node for node in cluster.nodes if node != taken),
    )  # fmt: skip


def local_pool(node: str | None = None) -> Raw:
    """The pool that the local cluster's nodes form; one node alone where it is named."""
    selector = {"karpenter.sh/capacity-type": "spot"} | ({"kubernetes.io/hostname": node} if node else {})
    return {"name": "local-spot", "platform": "AWS", "nodeSelector": selector}


LOCAL_DOLLARS_PER_HOUR: Final = 36
"""Made up: a cent a second, so that the cost of a run of minutes can be seen."""
LOCAL_ON_DEMAND_DOLLARS_PER_HOUR: Final = 108


def install_local_chart(kubectl: Kubectl) -> None:
    """The tag is always `dev`, so it is the image's id that restarts operator and agents after a change."""
    image_id = loaded(default_paths())[OPERATOR_IMAGE]
    install_chart(
        kubectl,
        *image_values(OPERATOR_IMAGE),
        "image.operator.pullPolicy=Never",
        *image_values(RUNTIME_IMAGE, "runtime"),
        "image.runtime.pullPolicy=Never",
        *image_values(SYNC_IMAGE, "sync"),
        f"podAnnotations.image={image_id}",
        "prices[0].instanceType=local.gpu,prices[0].capacityType=Spot",
        f"prices[0].usdPerHour={LOCAL_DOLLARS_PER_HOUR}",
        "prices[1].instanceType=local.gpu,prices[1].capacityType=OnDemand",
        f"prices[1].usdPerHour={LOCAL_ON_DEMAND_DOLLARS_PER_HOUR}",
    )


def existing_target() -> Target:
    """The cluster of the current kube-context; asks for what it cannot know."""
    for program in ("kubectl", "helm"):
        if shutil.which(program) is None:
            raise NotPossible(f"CLUSTER=existing needs {program} on PATH; install it and run again.")
    namespace = os.environ.get("NAMESPACE", NAMESPACE)
    kubectl = Kubectl(
        binary="kubectl", helm_binary="helm", namespace=namespace,
        kubeconfig=os.environ.get("KUBECONFIG", str(Path.home() / ".kube" / "config")),
    )  # fmt: skip
    context = kubectl.run("config", "current-context").strip()
    if ask("CONFIRM", f"Install spottrain into the cluster of kube-context {context!r}? (yes/no)") != "yes":
        raise NotPossible("Nothing was changed. Choose another context with `kubectl config use-context`.")
    install_chart(kubectl, *image_values(ask("OPERATOR_IMAGE", "Operator image (repository:tag)")))
    make_namespace(kubectl, namespace)

    def delete_pod(pod: str, _node: str) -> float | None:
        kubectl.run("delete", "pod", pod, "--wait=false")
        return None

    return Target(
        kubectl=kubectl,
        image=ask("IMAGE", "Runtime image (repository:tag)"),
        uri=ask("CHECKPOINT_URI", "Checkpoint URI (s3://bucket/prefix)").rstrip("/"),
        endpoint=os.environ.get("ENDPOINT", ""),
        secret=os.environ.get("CREDENTIALS_SECRET", ""),
        pool={
            "name": "existing",
            "platform": ask("PLATFORM", "Platform of the pool (AWS, GCP, GKE, Azure)"),
            "nodeSelector": json.loads(ask("NODE_SELECTOR", "Node selector of the pool (JSON, {} for any)")),
        },
        interrupt=delete_pod,
        other_node=lambda _node: None,
        restore=lambda: None,
    )


def image_values(image: str, part: str = "operator") -> tuple[str, str]:
    repository, _, tag = image.rpartition(":")
    if not repository:
        raise NotPossible(f"the image {image!r} has no tag; write it as repository:tag.")
    return f"image.{part}.repository={repository}", f"image.{part}.tag={tag}"


def ask(variable: str, question: str) -> str:
    """The environment variable, else what the user types, else a sentence."""
    if answer := os.environ.get(variable):
        return answer
    if not sys.stdin.isatty():
        raise NotPossible(f"Set {variable}: {question}.")
    return input(f"{question}: ").strip()
