"""Where the demo runs: a cluster that it starts itself, of processes or of containers, or one that the user
has.

All install the project's own chart with Helm. Only a cluster of our own may lose a node: elsewhere no node
is ever reclaimed or deleted, the trainer's pod is deleted instead.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from localcluster.api import Cluster
from localcluster.layout import OPERATOR_IMAGE, RUNTIME_IMAGE, SYNC_IMAGE, default_paths
from localcluster.progress import Progress
from localcluster.store import loaded
from processcluster import install, lifecycle

from demo.kubectl import Kubectl

Raw = dict[str, Any]
ROOT: Final = Path(__file__).resolve().parents[2]
SYSTEM_NAMESPACE: Final = install.NAMESPACE
NAMESPACE: Final = "spottrain-demo"
SECRET: Final = install.SECRET


@dataclass(frozen=True, kw_only=True)
class Target:
    """A cluster with spottrain installed, ready for jobs in `kubectl.namespace`."""

    kubectl: Kubectl
    image: str
    uri: str
    endpoint: str
    secret: str
    keys: dict[str, str]
    """Variables that give a person access to the bucket; empty where the user has it."""
    pool_of: Callable[[str | None], Raw]
    """The pool for a job that is to run on the named node, or on any."""
    notice_seconds: float
    """Between a notice and the end of the node; 0 where no node ends."""
    interrupt: Callable[[str, str], float | None]
    """Takes the names of pod and node; returns when the notice was published, None where there is none."""
    other_node: Callable[[str], str | None]
    """A node that will not be taken when the named one is; None: the scheduler's choice."""


class NotPossible(Exception):
    """The demo cannot run here; the sentence says why and what to do."""


def open_target(kind: str) -> AbstractContextManager[Target]:
    """The cluster of this kind, for the length of a `with`."""
    targets = {"processes": process_target, "containers": container_target, "existing": existing_target}
    if kind not in targets:
        raise NotPossible(f"CLUSTER={kind} is not known; it is one of {', '.join(targets)}.")
    return targets[kind]()


@contextmanager
def process_target() -> Iterator[Target]:
    """Starts a cluster of process nodes, and ends it."""
    with ExitStack() as stack:
        with Progress("Starting etcd, API server, controllers, scheduler, S3 server and two nodes", usual=8):
            cluster = stack.enter_context(lifecycle.temporary_cluster()).cluster
        with Progress("Installing spottrain from charts/spottrain", usual=10):
            install.install(cluster)
        yield _own_target(
            cluster, uri=f"s3://{install.BUCKET}", image="spottrain-runtime:checkout", notice=30
        )


@contextmanager
def container_target() -> Iterator[Target]:
    """Starts the local cluster of containers where it does not run, and leaves it running."""
    if subprocess.call([sys.executable, str(ROOT / "dev" / "cluster.py"), "up", "--no-dns"]):
        raise NotPossible("the cluster of containers is not up; what it lacks stands above.")
    cluster = Cluster.attach()
    with Progress("Installing spottrain from charts/spottrain", usual=20):
        install_local_chart(local_kubectl(cluster))
    make_bucket(cluster, "spottrain-demo")
    for node in cluster.nodes:
        cluster.restore(node)
    try:
        yield _own_target(cluster, uri="s3://spottrain-demo", image=RUNTIME_IMAGE, notice=30)
    finally:
        for node in cluster.nodes:
            cluster.restore(node)


def _own_target(cluster: Cluster, *, uri: str, image: str, notice: float) -> Target:
    kubectl = local_kubectl(cluster)
    make_namespace(kubectl, NAMESPACE)
    kubectl.apply(install.credentials(cluster))
    return Target(
        kubectl=kubectl,
        image=image,
        uri=uri,
        endpoint=cluster.s3_endpoint,
        secret=SECRET,
        keys=install.keys(cluster),
        pool_of=local_pool,
        notice_seconds=notice,
        interrupt=lambda _pod, node: cluster.reclaim(node, notice),
        other_node=lambda taken: next(node for node in cluster.nodes if node != taken),
    )


def local_kubectl(cluster: Cluster, namespace: str = NAMESPACE) -> Kubectl:
    return Kubectl(
        binary=str(cluster.kubectl),
        helm_binary=str(cluster.helm),
        kubeconfig=str(cluster.kubeconfig),
        namespace=namespace,
    )


def local_pool(node: str | None = None) -> Raw:
    """The pool that the local cluster's nodes form; one node alone where it is named."""
    selector = {"karpenter.sh/capacity-type": "spot"} | ({"kubernetes.io/hostname": node} if node else {})
    return {"name": "local-spot", "platform": "AWS", "nodeSelector": selector}


def make_namespace(kubectl: Kubectl, name: str) -> None:
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})


def make_bucket(cluster: Cluster, bucket: str) -> None:
    """A folder of the S3 server's is a bucket."""
    (cluster.paths.run / "s3" / bucket).mkdir(exist_ok=True)


def install_local_chart(kubectl: Kubectl) -> None:
    """On the cluster of containers.

    The tag is always `dev`, so it is the image's id that restarts operator and agents after a change.
    """
    images = {"operator": OPERATOR_IMAGE, "runtime": RUNTIME_IMAGE, "sync": SYNC_IMAGE}
    install_chart(
        kubectl,
        *(value for part, image in images.items() for value in image_values(image, part)),
        "image.operator.pullPolicy=Never",
        "image.runtime.pullPolicy=Never",
        f"podAnnotations.image={loaded(default_paths())[OPERATOR_IMAGE]}",
        *install.PRICES,
    )


def install_chart(kubectl: Kubectl, *values: str) -> None:
    """helm upgrade --install of charts/spottrain, waiting until the operator is ready."""
    settings = [word for value in values for word in ("--set", value)]
    kubectl.helm(
        *("upgrade", "--install", "spottrain", str(ROOT / "charts" / "spottrain")),
        *("--namespace", SYSTEM_NAMESPACE, "--create-namespace", "--wait", "--timeout", "180s"),
        *settings,
    )


@contextmanager
def existing_target() -> Iterator[Target]:
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
    pool = {
        "name": "existing",
        "platform": ask("PLATFORM", "Platform of the pool (AWS, GCP, GKE, Azure)"),
        "nodeSelector": json.loads(ask("NODE_SELECTOR", "Node selector of the pool (JSON, {} for any)")),
    }

    def delete_pod(pod: str, _node: str) -> float | None:
        kubectl.run("delete", "pod", pod, "--wait=false")
        return None

    yield Target(
        kubectl=kubectl,
        image=ask("IMAGE", "Runtime image (repository:tag)"),
        uri=ask("CHECKPOINT_URI", "Checkpoint URI (s3://bucket/prefix)").rstrip("/"),
        endpoint=os.environ.get("ENDPOINT", ""),
        secret=os.environ.get("CREDENTIALS_SECRET", ""),
        keys={},
        pool_of=lambda _node: pool,
        notice_seconds=0,
        interrupt=delete_pod,
        other_node=lambda _node: None,
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
